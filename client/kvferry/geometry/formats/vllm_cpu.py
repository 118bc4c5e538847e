"""vLLM's attention on CPUs, permuted inside a page by its kernel."""

from __future__ import annotations

import re

from kvferry._arguments import text
from kvferry.errors import BadGeometry
from kvferry.geometry.formats.parts import Layers, halves, with_axes
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Holding, Part, named_tensors, planes_of_tensor

_CPU_NATURAL_VALUES = ("vec", "vec16")


def vllm_cpu(kv_caches: Layers, group: Group, isa: str, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's CPU attention: for each block and head a page of K, then a page of V, permuted inside by the kernel.

    Divisible by head, not by token: K is column-major, ``[head_dim, tokens]``, with ``vec`` and ``vec16`` (their V is
    in natural order), tiled with ``amx``, and the others have orders of their own. Engines read from each other at
    equal block size and instruction set only.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, 2 · head_dim]``, contiguous.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        isa: what ``_get_attn_isa`` in vllm/v1/attention/backends/cpu_attn.py answers on this machine: ``vec``,
            ``amx`` …

    Source: vllm-project/vllm 0.32.0, ``CPUAttentionBackendImpl.forward`` in vllm/v1/attention/backends/cpu_attn.py (the
    view ``[blocks, heads, 2 · tokens, head_dim]``, cut in two), ``AttentionImpl<ISA::VEC>::reshape_and_cache`` in
    csrc/cpu/cpu_attn_vec.hpp, ``AttentionImpl<ISA::AMX>::reshape_and_cache`` in csrc/cpu/cpu_attn_amx.hpp.
    """
    if not re.fullmatch(r"[a-z0-9_]{2,16}", text("isa", isa)):
        raise BadGeometry("tensor", f"isa is {isa!r}, not the name of an instruction set like 'vec' or 'amx'")
    own = f"vllm-cpu-{isa}"
    parts = [Part("key", kv=0, format=own, token_granule=0), Part("value", kv=1, format=own, token_granule=0)]
    if isa in _CPU_NATURAL_VALUES:
        # The kernels differ in their tiles only, so their pages are the same. V could be cut by token. But K cannot,
        # and what is cut alike is read together: the page of K and that of V, of every head, as one piece.
        parts = [
            Part("key", kv=0, format="vllm-cpu-column-major", token_granule=0),
            Part("value", kv=1, token_granule=0),
        ]
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = with_axes(layer, tensor, 4)
        _, _, tokens, width = view.shape
        halves(layer, view, width)
        pages = view.merge_tail(2, (2, tokens, width // 2))
        axes = ("block", "head", "kv", "token", "content")
        found += planes_of_tensor(pages, axes, group, layer, parts, holding)
    return tuple(found)
