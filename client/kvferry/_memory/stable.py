"""Checks that device memory stays where it is mapped.

With ``expandable_segments:True``, torch maps physical memory into its segments as they grow, with CUDA's functions for
virtual memory. ``cuda_ipc`` cannot export such memory, so reads on one host silently become several hundred times
slower (NIXL, issue 1754). Pages that torch maps anew are not those that were registered for RDMA; vLLM refuses the
setting for every connector (vLLM 0.32.0, ``vllm/config/vllm.py``). torch's list of segments is asked, and not the
environment: it knows of settings made in the program, and of pools without such segments, e.g. that of vLLM's sleep
mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from kvferry.errors import InvalidField
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind


def check_stable(regions: Iterable[MemoryRegion]) -> None:
    """Raise `InvalidField` for device memory in an expandable segment of torch. Memory of other allocators is not
    checked."""
    on_device = [region for region in regions if region.memory_kind is MemoryKind.VRAM]
    torch: Any = sys.modules.get("torch")
    if not on_device or torch is None or not torch.cuda.is_available():
        return
    if torch.cuda.get_allocator_backend() != "native":
        return
    for segment in torch.cuda.memory_snapshot():
        first, device = segment["address"], segment["device"]
        last = first + segment["total_size"]
        for region in on_device:
            inside = region.device == device and region.base < last and first < region.base + region.length
            if inside and segment.get("is_expandable", False):
                raise InvalidField(
                    "regions",
                    f"{region.length} bytes at {region.base:#x} of device {device}, in an expandable segment",
                    "memory that stays mapped: leave expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF",
                )
