"""Makes a device the current one of a thread.

CUDA and HIP have a current device per thread, and torch's name for both is ``torch.cuda``. UCX takes the current
device's context when memory is registered and when peers are connected. Without one it silently leaves out
``cuda_ipc``, and with it NVLink. So the device is set on every thread that calls NIXL or gives the device work.

A thread of kvferry's own is also taken out of other threads' captures of CUDA graphs. While a thread captures a graph
in the mode "global", torch's default, CUDA refuses "potentially unsafe" calls on all threads, e.g. allocating memory
or querying an event, and such a call spoils the capture. This protects threads that may take part in the capture.
kvferry's take no part: they use streams of their own, which are never captured, and nothing captured needs them. A
thread leaves captures by calling ``cuThreadExchangeStreamCaptureMode`` with the mode "thread local" (CUDA driver API,
stream management; HIP has the same function).

None of this has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvferry._logs import Log
from kvferry.errors import InvalidField
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind

logger = Log(__name__)

THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``, and HIP's constant of the same meaning."""

CUDA = ("cuThreadExchangeStreamCaptureMode", ("libcuda.so.1",))
HIP = ("hipThreadExchangeStreamCaptureMode", ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"))
"""The function with which a thread leaves captures, and the libraries that may have it: torch's wheels and the system's
packages name HIP's library differently."""


def device_of(regions: Iterable[MemoryRegion]) -> int | None:
    """The device on which the regions lie; None: all of them are host memory. Raises `InvalidField` if the regions lie
    on several devices, or torch, which sets the device, is missing."""
    devices = sorted({region.device for region in regions if region.memory_kind is MemoryKind.VRAM})
    if not devices:
        return None
    if len(devices) > 1:
        expected = "one device: a rank has one, and so has its agent"
        raise InvalidField("regions", f"memory of devices {devices}", expected)
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        problem = "is not imported" if torch is None else "has no CUDA and no ROCm here"
        raise InvalidField("regions", f"memory of device {devices[0]}", f"torch, to set the device; it {problem}")
    return devices[0]


@contextmanager
def on_device(device: int | None) -> Iterator[None]:
    """Make a device the current one of the calling thread inside the context; None: change nothing."""
    if device is None:
        yield
        return
    torch: Any = sys.modules["torch"]
    with torch.cuda.device(device):
        yield


def enter_device(device: int | None) -> None:
    """Make a device the current one of the calling thread, which is kvferry's own, for good; None: change nothing."""
    if device is None:
        return
    torch: Any = sys.modules["torch"]
    torch.cuda.set_device(device)
    ignore_captures(hip=torch.version.hip is not None)


def ignore_captures(*, hip: bool) -> None:
    """Take the calling thread out of other threads' captures of graphs. Log a warning if the driver cannot do that."""
    function, libraries = HIP if hip else CUDA
    problem: object = ""
    for library in libraries:
        try:
            exchange = getattr(ctypes.CDLL(library), function)
        except (OSError, AttributeError) as error:
            problem = error
            continue
        problem = exchange(ctypes.byref(ctypes.c_int(THREAD_LOCAL)))
        break
    if problem:
        logger.warning("%s: %s; reads that run while a graph is captured may spoil the capture", function, problem)
