"""The connector in each of vLLM's worker processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvferry.engine import RankEnd, WorkerOutput, WorkerPort
from kvferry.errors import KvferryError
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Tensor
from kvferry.integrations.vllm.device import EVERY_STEP, DeviceSteps, arrival_fence, steps_of
from kvferry.integrations.vllm.idle_steps import PATIENCE, YIELD
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews

logger = logging.getLogger(__name__)

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
        self._told = 0
        """A computed step; the scheduler has received this step or a later one."""
        self._waits = False
        self._asked = False
        """Whether the scheduler waits for the end of this step."""

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
                end = RankEnd(
                    read_id=grant.read_id,
                    request_id=grant.request_id,
                    ok=False,
                    quiet=True,
                    bytes=0,
                    error_name=type(error).__name__,
                    message=error.message,
                    values=dict(error.values),
                )
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
