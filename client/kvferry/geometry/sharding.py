"""The part of a model that each rank holds, for engines that divide the model by rule.

The planner never calls this: ranks declare their parts. These are the rules of most engines.
"""

from __future__ import annotations

from kvferry._arguments import integer
from kvferry.errors import BadGeometry
from kvferry.geometry.plane import Interval, TokenShard

__all__ = ["shard", "shards", "token_shard"]


def shard(index: int, count: int, size: int) -> Interval:
    """The units of part `index` of `count` of an axis of `size` units: ``[x·H//n, (x+1)·H//n)``, or one unit when that
    is empty.

    With fewer units than parts, neighbours hold the same unit: replicas. Where `size` divides `count`, part r holds
    unit ``r // (count // size)``, as vLLM gives KV heads to tensor-parallel ranks (``QKVParallelLinear``: the
    weight's shard is ``tp_rank // num_kv_head_replicas``, vllm/model_executor/layers/linear.py, and
    ``ModelConfig.get_num_kv_heads``: ``max(1, total // tp_size)``, vllm/config/model.py). Other sizes, which vLLM
    refuses, follow the same rule.

    Raises:
        BadGeometry: there is no such part, or the axis has no units.
    """
    index, count, size = integer("index", index), integer("count", count), integer("size", size)
    if not (0 <= index < count and size >= 1):
        raise BadGeometry("shard", f"part {index} of {count} of an axis of {size}")
    begin, end = index * size // count, (index + 1) * size // count
    return Interval(begin, max(end, begin + 1))


def shards(count: int, size: int) -> tuple[Interval, ...]:
    """`shard` of every part: heads over tensor-parallel ranks, or layers over pipeline stages."""
    return tuple(shard(index, count, size) for index in range(integer("count", count, 1)))


def token_shard(index: int, count: int, interleave: int = 1) -> TokenShard:
    """The tokens of context-parallel rank `index` of `count`: ``t // interleave % count == index``.

    As vLLM's decode context parallelism does (``cp_kv_cache_interleave_size``, vllm/config/parallel.py;
    `vllm/v1/worker/block_table.py` maps positions to ranks the same way).
    """
    return TokenShard(index, count, interleave if integer("count", count) > 1 else 1)
