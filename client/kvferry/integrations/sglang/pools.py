"""SGLang's pools as kvferry's groups and planes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvferry import Group, Holding, Interval, Plane
from kvferry.errors import InvalidField
from kvferry.geometry.formats import sglang_mha, sglang_mla
from kvferry.geometry.tensors import Tensor

FULL = "full"
"""The group of full attention, with the name of the vLLM connector."""

NULL_PAGE = 0
"""The page of slot 0, into which SGLang writes the padding of a batch."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of one rank, with the tensors of the planes by name. The first group is that of full attention;
    `window` names the group of sliding windows; empty: there is none."""

    groups: tuple[Group, ...]
    window: str
    planes: tuple[Plane, ...]
    tensors: dict[str, Tensor]


def describe_pools(pool: Any, held: Interval, heads: int, window: int, layer_names: str) -> Pools:
    """Describe SGLang's pool of a rank that holds the KV heads `held` of the model's `heads`; `window` is the number of
    tokens of a sliding window (0: unknown), `layer_names` has ``{}`` for a layer's number. Raises `InvalidField`: the
    class of the pool, or its layout, is not supported."""
    parts, windowed = {FULL: pool}, ""
    if type(pool) is SWAKVPool:
        windowed = f"window-{window}" if window else "window"
        parts = {FULL: pool.full_kv_pool, windowed: pool.swa_kv_pool}
    groups: list[Group] = []
    planes: list[Plane] = []
    tensors: dict[str, Tensor] = {}
    for name, part in parts.items():
        if type(part) not in (MHATokenToKVPool, MLATokenToKVPool):
            known = f"{MHATokenToKVPool.__name__}, {MLATokenToKVPool.__name__}, or an {SWAKVPool.__name__} of these"
            raise InvalidField("KV pool", type(part).__name__, known)
        page = int(part.page_size)
        pages = int(part.size) // page + 1
        # Each pool numbers its own pages.
        group = Group(name, block_tokens=page, num_blocks=pages, null_block=NULL_PAGE, pool=name)
        layers = [layer_names.format(number) for number in part.model_layer_ids]
        described, of_part = _described(part, group, held, heads, layers)
        groups.append(group)
        planes += described
        tensors |= of_part
    return Pools(tuple(groups), windowed, tuple(planes), tensors)


def _described(
    pool: Any, group: Group, held: Interval, heads: int, layers: Iterable[str]
) -> tuple[tuple[Plane, ...], dict[str, Tensor]]:
    if isinstance(pool, MLATokenToKVPool):
        latent = dict(zip(layers, pool.kv_buffer, strict=True))
        return sglang_mla(latent, group, int(pool.kv_lora_rank)), dict(latent)
    if pool.kv_cache_layout not in ("nhd", "hnd") or pool.is_quantized_kv_cache:
        layout = "quantized" if pool.is_quantized_kv_cache else str(pool.kv_cache_layout)
        raise InvalidField("layout of the KV pool", layout, "nhd or hnd, not quantized by SGLang")
    if len(held) != int(pool.head_num):
        raise InvalidField("KV heads of the rank", int(pool.head_num), f"{len(held)} of {heads}, by its TP size")
    keys = dict(zip(layers, pool.k_buffer, strict=True))
    values = dict(zip(keys, pool.v_buffer, strict=True))
    planes = sglang_mha(keys, values, group, Holding(units=held, axis_size=heads))
    named = {f"{name} K": of for name, of in keys.items()} | {f"{name} V": of for name, of in values.items()}
    return planes, named
