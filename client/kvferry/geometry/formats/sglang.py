"""SGLang's pools."""

from __future__ import annotations

from kvferry.errors import BadGeometry
from kvferry.geometry.formats.parts import Layers, latent_parts, with_axes
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Holding, named_tensors, planes_of_tensor, view_of


def sglang_mha(k_buffer: Layers, v_buffer: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """SGLang's attention pool: K and V apart, a row for each token slot; with its HND switch a page for each row.

    A block is a page of the group's block_tokens slots; block 0 holds SGLang's padding slots, so it is the null block.

    Args:
        k_buffer, v_buffer: by layer, ``[slots, heads, head_dim]``, or ``[pages, heads, tokens, head_dim]`` with
            ``SGLANG_USE_HND_KVCACHE``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.

    Source: sgl-project/sglang 0.5.23, ``MHATokenToKVPool._kv_buffer_shapes`` and ``_create_buffers_normal`` in
    python/sglang/srt/mem_cache/memory_pool.py. Not for its ``vectorized_5d`` layout.
    """
    found: list[Plane] = []
    keys, values = named_tensors(k_buffer), named_tensors(v_buffer)
    for layer, key in keys.items():
        if layer not in values:
            raise BadGeometry(f"layer {layer}", "it has a K buffer and no V buffer")
        for component, tensor in (("key", key), ("value", values[layer])):
            view = view_of(tensor)
            axes = ("slot", "head", "content") if len(view.shape) == 3 else ("block", "head", "token", "content")
            found += planes_of_tensor(view, axes, group, layer, (component,), holding)
    return tuple(found)


def sglang_mla(kv_buffer: Layers, group: Group, latent_dim: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """SGLang's latent pool: latent and rope side by side, a row for each token slot.

    Args:
        kv_buffer: by layer, ``[slots, 1, latent_dim + rope_dim]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        latent_dim: kv_lora_rank of the model.

    Source: sgl-project/sglang 0.5.23, ``MLATokenToKVPool._create_buffers`` in
    python/sglang/srt/mem_cache/memory_pool.py.
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_buffer).items():
        view = with_axes(layer, tensor, 3)
        parts = latent_parts(layer, view.shape[-1], latent_dim)
        found += planes_of_tensor(view, ("slot", "head", "content"), group, layer, parts, holding)
    return tuple(found)
