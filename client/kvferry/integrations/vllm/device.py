"""The order of a rank's device and kvferry: which steps the device has computed, and when arrived bytes are visible.

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

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.tensors import Tensor
from kvferry.integrations.vllm.values import StepsDone

EVERY_STEP = 2**63 - 1
"""A number above those of all steps, for a rank whose steps have run when vLLM returns from them."""


class Event(Protocol):
    """An event on a stream of the device, e.g. ``torch.cuda.Event``."""

    def query(self) -> bool: ...


class DeviceSteps:
    """The queued and the computed steps of one rank's device.

    Threading: every method may be called from any thread. None waits for the device.

    Args:
        record: records an event behind all kernels that the calling thread has queued on its current stream; None: a
            step has run when vLLM returns from it, as on a CPU.
    """

    def __init__(self, record: Callable[[], Event] | None) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._events: deque[tuple[int, Event]] = deque()
        self._queued = 0
        self._computed = EVERY_STEP if record is None else 0

    def begun(self, step: int) -> None:
        """Record that vLLM has begun a step, so all earlier steps are queued.

        With a drafter, vLLM's older model runner never ends the steps of pipeline stages before the last
        (``vllm/v1/worker/gpu_model_runner.py``, ``sample_tokens``). Those steps end here.
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
