"""The connector in each of vLLM's worker processes; and the order of a rank's device and kvferry: which steps the
device has computed, and when arrived bytes are visible.

A block must not be published before the kernels that write to it have ended, because NIXL does not order with streams.
vLLM's step only queues kernels, and its output may leave before the drafter has run, whose KV cache is published too
(vLLM 0.32.0, ``vllm/v1/worker/gpu/model_runner.py``, ``sample_tokens``: the copy of the output starts before the
speculator proposes). So each rank records an event behind each step, and reports completed steps to the scheduler:

- CPU: a step has run when the model runner returns. No events are recorded.
- CUDA: the event is recorded on the stream that is current where vLLM calls ``wait_for_save``, which is that of the
  forward. vLLM makes this call after the drafter, when it has joined its side streams. An event completes after all
  kernels before it, and the end of a kernel makes its writes visible to the whole system, other devices included.
- ROCm: torch gives HIP's streams and events the names of CUDA's. Its events are made without
  ``hipEventDisableSystemFence``, so their completion also writes the caches back to memory.

Events are queried, never waited for (R11).

In the other direction, the kernels of a request that was read see the bytes that arrived. A read is reported when
every byte has landed, or has been permuted on the device, and only then does vLLM compute the request:

- CPU: memory is coherent.
- CUDA: a kernel sees all bytes that were in the device's memory at its launch, including those that another device or
  a network card has written. vLLM's own connector relies on this, too.
- ROCm: as CUDA. But vLLM's own connector synchronises the device after reads into models with Mamba layers, before it
  reports them (vLLM 0.32.0, ``nixl/base_worker.py``, ``_sync_device_after_direct_recv``), and so does kvferry. This is
  the only wait for a device in an engine's step.

None of this has run on a GPU; the tests simulate a stream.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from kvferry.engine import RankEnd, WorkerOutput, WorkerPort
from kvferry.errors import KvferryError
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Tensor
from kvferry.integrations.vllm.idle_steps import PATIENCE, YIELD
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.values import StepMetadata, StepsDone, WorkerNews

logger = logging.getLogger(__name__)

EVERY_STEP = 2**63 - 1
"""A number above those of all steps, for a rank whose steps have run when vLLM returns from them."""

AGAIN = 1.0
"""Shortest seconds until a failed announcement is repeated."""

AGENT_TIMEOUT = 120.0
"""Seconds for making the reading agents: pinning the memory of a large device takes a few seconds."""


class ConnectorWorker:
    """Registers a rank's caches, and reads into them.

    vLLM makes the workers' connectors before the scheduler's, which opens the engine's session. So the caches are
    registered with NIXL when vLLM hands them over, before it captures graphs and serves. The token comes with the first
    step, and a thread announces the caches while steps run.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        self._setup = setup
        self._rank = rank
        self._client = setup.settings.client()
        self._port = WorkerPort(self._client, setup.spec, rank)
        self._lock = threading.Lock()
        self._announcing = False
        self._news = WorkerNews()
        self._steps = DeviceSteps(None)
        self._fence: Callable[[], None] | None = None
        self._told = 0  # a computed step; the scheduler has received this step or a later one
        self._waits = False
        self._asked = False  # whether the scheduler waits for the end of this step

    def register(self, kv_caches: Mapping[str, Tensor], planes: Sequence[Plane]) -> None:
        """Register the caches of this rank with NIXL, and make its agents. Waits; raises `KvferryError`.

        All mapping of memory and all connections of the device are made here, on vLLM's thread and with its device set.
        vLLM captures its graphs afterwards, and kvferry does not call the device before the first read.
        """
        # `planes` declare the heads of each rank. A plane with a whole axis is either latent, and equal on all ranks,
        # or the only plane of its pipeline stage.
        self._port.register_memory(kv_caches, planes=planes, replicated=True, serve=self._setup.serves)
        if self._setup.reads:
            self._port.prepare(AGENT_TIMEOUT)
        self._steps = steps_of(kv_caches.values())
        self._fence = arrival_fence(self._setup.spec.groups, kv_caches.values())

    def step(self, metadata: StepMetadata) -> None:
        """Start and cancel reads by the scheduler's message. Returns at once."""
        self._steps.begun(metadata.step)
        self._waits, self._asked = metadata.waits, metadata.asks
        if not metadata.token:
            with self._lock:
                self._do(metadata)
        elif not self._announcing:
            announce = threading.Thread(
                target=self._announce, args=(metadata.token,), name="kvferry-announce", daemon=True
            )
            try:
                announce.start()
                self._announcing = True
            except (RuntimeError, MemoryError) as error:
                # The system has no more threads. The next step has the token again.
                logger.warning("rank %d is not announced yet: %s", self._rank, error)

    def queued(self, step: int) -> None:
        """Record that a whole step is queued on the device. Returns at once."""
        self._steps.queued(step)

    def news(self) -> WorkerNews | None:
        """Return the news since the last call, or None. Waits if the engine computes nothing, and for the device after
        some reads, see `arrival_fence`."""
        if self._waits and self._port.running():
            self._port.wait_news(PATIENCE)
        elif self._waits:
            # The reads have ended, or wait for the announcement, on a thread that needs Python's lock.
            time.sleep(YIELD)
        with self._lock:
            news, self._news = self._news, WorkerNews()
            output = self._port.finished()
            if output:
                if output.ended and self._fence is not None:
                    self._fence()
                news.outputs.append(output)
        if self._asked or self._told < EVERY_STEP:
            # The message calls `now` again when it is sent, and may then report later steps.
            self._told = self._steps.done().computed
            news.rank, news.now = self._rank, self._steps.done
        return news if news.outputs or news.registered or news.errors or news.now else None

    def close(self) -> None:
        self._port.close()
        self._client.close()

    def _do(self, metadata: StepMetadata) -> None:
        for grant in metadata.starts:
            try:
                self._port.start(grant, tails=self._setup.tails)
            except KvferryError as error:
                name, values = type(error).__name__, dict(error.values)
                end = RankEnd(grant.read_id, grant.request_id, False, True, 0, {}, name, error.message, values)
                self._news.outputs.append(WorkerOutput(self._rank, failed=(end,)))
        for step in metadata.grant_steps:
            self._port.add_step(step)
        for read_id in metadata.cancels:
            self._port.cancel(read_id)
        for publication, blocks, last in metadata.sums:
            # If this fails, readers count the blocks as unverified.
            what = f"publication {publication} was not summed"
            try:
                summing = self._port.cache.checksum(publication, blocks, last=last)
                summing.add_done_callback(partial(_log_error, what))
            except KvferryError as error:
                logger.warning("%s: %s", what, error)

    def _announce(self, token: str) -> None:
        """Announce the caches to the node server, on a thread of its own; repeat while errors are retryable."""
        while True:
            try:
                self._port.announce(token)
                break
            except KvferryError as error:
                if error.retryable:
                    logger.warning("rank %d is not announced yet: %s", self._rank, error)
                    time.sleep(max(AGAIN, error.retry_after or 0.0))
                    continue
                problem = str(error)
            except Exception as error:
                logger.exception("rank %d could not be announced", self._rank)
                problem = repr(error)
            with self._lock:
                self._news.errors[self._rank] = problem
            return
        with self._lock:
            self._news.registered.add(self._rank)


def _log_error(what: str, ended: Future[Any]) -> None:
    """Log the error of a future, if it has one, behind the text `what`."""
    error = None if ended.cancelled() else ended.exception()
    if error is not None:
        logger.warning("%s: %s", what, error)


class Event(Protocol):
    """An event on a stream of the device, e.g. ``torch.cuda.Event``."""

    def query(self) -> bool: ...


class DeviceSteps:
    """The queued and the computed steps of one rank's device. Methods may be called from any thread, and never wait.

    `record` records an event behind all kernels that the calling thread has queued on its current stream; None: a step
    has run when vLLM returns from it, as on a CPU.
    """

    def __init__(self, record: Callable[[], Event] | None) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._events: deque[tuple[int, Event]] = deque()
        self._queued = 0
        self._computed = EVERY_STEP if record is None else 0

    def begun(self, step: int) -> None:
        """Record that vLLM has begun a step, so all earlier steps are queued: with a drafter, vLLM's older model runner
        (``vllm/v1/worker/gpu_model_runner.py``, ``sample_tokens``) never ends those of pipeline stages before the last.
        """
        self.queued(step - 1)

    def queued(self, step: int) -> None:
        """Record that all kernels of a step are queued. Idempotent."""
        if step <= self._queued:
            return
        event = None if self._record is None else self._record()
        with self._lock:
            self._queued = step
            if event is not None:
                self._events.append((step, event))

    def done(self) -> StepsDone:
        """Return the progress so far."""
        with self._lock:
            while self._events and self._events[0][1].query():
                self._computed, _ = self._events.popleft()
            return StepsDone(self._computed, min(self._queued, self._computed))


def steps_of(tensors: Iterable[Tensor]) -> DeviceSteps:
    """Return the steps of the device on which a rank's caches lie."""
    device = _device_of(tensors)
    if device is None:
        return DeviceSteps(None)
    torch: Any = sys.modules["torch"]

    def record() -> Event:
        event: Event = torch.cuda.Event()
        torch.cuda.current_stream(device).record_event(event)
        return event

    return DeviceSteps(record)


def arrival_fence(groups: Iterable[Group], tensors: Iterable[Tensor]) -> Callable[[], None] | None:
    """Return the function to call after reads, before vLLM computes with the arrived bytes; None: not needed."""
    torch: Any = sys.modules["torch"]
    states = any(group.kind is GroupKind.STATE for group in groups)
    if not states or torch.version.hip is None or _device_of(tensors) is None:
        return None
    synchronize: Callable[[], None] = torch.cuda.synchronize
    return synchronize


def _device_of(tensors: Iterable[Tensor]) -> Any:
    """Return the device of tensors; None: the host."""
    devices = (getattr(tensor, "device", None) for tensor in tensors)
    return next((device for device in devices if device is not None and device.type != "cpu"), None)
