"""Tensors of other libraries than torch and numpy, as tensors of these two over the same memory."""

from __future__ import annotations

import sys
from typing import Any

from kvferry.errors import BadGeometry
from kvferry.geometry.plane import MemoryKind

DEVICES = {1: MemoryKind.DRAM, 2: MemoryKind.VRAM, 3: MemoryKind.DRAM, 10: MemoryKind.VRAM}
"""DLDeviceType of DLPack: the host's memory, CUDA's, the host's pinned memory, ROCm's."""


def shared(tensor: object) -> Any:
    """Return a torch tensor or numpy array over the memory of another library's tensor. Nothing is copied.

    Args:
        tensor: has ``__array_interface__``, ``__dlpack__``, or a buffer.

    Raises:
        BadGeometry: it has none of them, or does not share its memory.
    """
    try:
        found = _shared(tensor)
        # Both are alive: a library that hands out copies, as DLPack lets it, cannot give the same memory twice.
        is_same = _address(found) == _address(_shared(tensor))
    except BadGeometry:
        raise
    except Exception as error:
        # The other library's code: it may raise anything.
        raise _unusable(tensor, f"does not share its memory: {type(error).__name__}: {error}") from None
    if not is_same:
        raise _unusable(tensor, "gives copies of its memory instead of sharing it")
    return found


def _shared(tensor: Any) -> Any:
    import numpy as np

    if isinstance(tensor, type):
        raise _unusable(tensor, "is a class, and no tensor")
    if hasattr(tensor, "__array_interface__"):
        return np.asarray(tensor)
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _from_dlpack(tensor)
    try:
        buffer = memoryview(tensor)
    except TypeError:
        problem = "is neither a torch tensor nor a numpy array, and has no __array_interface__, __dlpack__ or buffer"
        raise _unusable(tensor, problem) from None
    return np.asarray(buffer)


def _from_dlpack(tensor: Any) -> Any:
    import numpy as np

    device, torch = int(tensor.__dlpack_device__()[0]), sys.modules.get("torch")
    kind, problem = DEVICES.get(device), ""
    if kind is None:
        raise _unusable(tensor, f"lies on a device of DLPack's type {device}, which kvferry does not know")
    if kind is MemoryKind.DRAM:
        # numpy before torch, which does not see that memory must not be written. Before 2.1 numpy allowed writing to
        # none, and asked for no copy.
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
            try:
                return np.from_dlpack(tensor, copy=False)
            except (RuntimeError, TypeError) as error:
                # Types that numpy lacks, such as bfloat16.
                problem = f" (numpy: {error})"
        else:
            problem = f" (it could not be written with numpy {np.__version__})"
    if torch is None:
        raise _unusable(tensor, f"needs torch, which must be imported first, to find its memory{problem}")
    return torch.from_dlpack(tensor.__dlpack__())


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data)


def _unusable(tensor: object, problem: str) -> BadGeometry:
    return BadGeometry("tensor", f"{type(tensor).__name__} {problem}; describe its memory with a TensorView")
