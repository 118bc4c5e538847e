"""Engines of vLLM as far as their memory: vLLM plans and allocates the caches of every rank, kvferry describes them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry import Blocks, EngineGeometry, RankGeometry, plan_read
from kvferry._memory.access import HostAccess
from kvferry.integrations.vllm.layouts.attention import layer_planes
from kvferry.integrations.vllm.setup import BlockTable, block_tables
from kvferry.integrations.vllm.shards import RankPlace, layers_of
from kvferry.planner import Path as ReadPath
from kvferry.planner import PathRule
from tests.support.simulated_memories import copies
from tests.support.vllm_versions import planned_caches

Specs = Callable[[RankPlace], Mapping[str, Any]]
"""vLLM's specs of the layers of a rank, by layer."""

POISON = 0xA5


@dataclass(frozen=True)
class CachedEngine:
    """An engine.

    Attributes:
        places: its ranks.
        tables: its block tables, as its scheduler has them.
        config: vLLM's configuration.
        planned: vLLM's plan of the caches, by rank.
        caches: the tensors, by rank and layer.
        geometry: what kvferry makes of it.
    """

    places: list[RankPlace]
    tables: tuple[BlockTable, ...]
    config: VllmConfig
    planned: list[Any]
    caches: list[dict[str, torch.Tensor]]
    geometry: EngineGeometry

    def poison(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of the caches, and fill the caches themselves with poison."""
        wanted = [{name: cache.clone() for name, cache in caches.items()} for caches in self.caches]
        for caches in self.caches:
            for cache in caches.values():
                cache.view(torch.uint8).fill_(POISON)
        return wanted


def places(*, tp: int = 1, pcp: int = 1, pp: int = 1) -> Iterator[RankPlace]:
    """The ranks of an engine, in vLLM's order."""
    for stage, context, rank in itertools.product(range(pp), range(pcp), range(tp)):
        yield RankPlace(rank, context, stage, tp, pcp)


def configuration(model: Path | None = None, *, layout: KVCacheLayout | None = None, **parallel: int) -> VllmConfig:
    """vLLM's configuration of an engine.

    Args:
        model: folder of its model, which need not have weights; None: a model is set later.
        layout: layout of its caches.
        parallel: fields of vLLM's `ParallelConfig`.
    """
    sizes = ParallelConfig(**parallel)
    described: dict[str, Any] = {"cache_config": CacheConfig(block_size=32)}
    if sizes.prefill_context_parallel_size == 1:
        described["parallel_config"] = sizes
    if model is not None:
        described["model_config"] = ModelConfig(str(model), skip_tokenizer_init=True, dtype="float32")
    found = VllmConfig(**described)
    # Prefill context parallelism needs a model runner that vLLM does not take where there is no Triton.
    found.parallel_config = sizes
    found.cache_config.kv_cache_layout = (layout or KVCacheLayout.LBHNC).name
    return found


def engine(name: str, specs: Specs, config: VllmConfig, ranks: Sequence[RankPlace], *, num_blocks: int) -> CachedEngine:
    """An engine of these ranks; its caches are empty."""
    each = [dict(specs(place)) for place in ranks]
    config.cache_config.num_gpu_blocks_override = num_blocks
    for layer_name, spec in itertools.chain.from_iterable(of_rank.items() for of_rank in each):
        backend = TritonMLABackend if isinstance(spec, MLAAttentionSpec) else TritonAttentionBackend
        module = SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        config.compilation_config.static_forward_context[layer_name] = module
    planned = planned_caches(config, each, [1 << 30] * len(each))
    layout = config.cache_config.get_resolved_kv_cache_layout()
    caches = [allocate_kv_cache(plan, torch.device("cpu"), layout) for plan in planned]
    scheduled = generate_scheduler_kv_cache_config(planned)
    tables = block_tables(config, scheduled)
    described = []
    for place, plan, tensors in zip(ranks, planned, caches, strict=True):
        own = block_tables(config, plan)
        assert own == tables, "the processes of an engine do not agree on its groups"
        layers = layers_of(config, plan, own, tensors, place)
        described.append(RankGeometry(place.rank, tuple(plane for layer in layers for plane in layer_planes(layer))))
    geometry = EngineGeometry(name, tuple(table.group for table in tables), tuple(described))
    return CachedEngine(list(ranks), tables, config, planned, caches, geometry)


def move(
    source: EngineGeometry,
    destination: EngineGeometry,
    theirs: Mapping[str, Blocks],
    mine: Mapping[str, Blocks],
    tokens: tuple[int, int],
    path: ReadPath,
) -> None:
    """Read as every rank plans it, each descriptor as a plain copy; staging memory as it is."""
    space = HostAccess().allocate(1 << 20)
    for rank in destination.ranks:
        expansion = plan_read(source, destination, rank.rank, rule=PathRule(path)).expand(theirs, mine, tokens)
        for part in expansion.sources:
            for descriptors in part.descriptors:
                _copy(copies(descriptors))
            for read in part.staged:
                for batch in read.batches(space.region.length):
                    _copy(copies(batch.descriptors(space.region.base, read.lane.memory)))
                    space.memory.copy(batch.copies(space.region.base))


def _copy(moves: list[tuple[int, int, int]]) -> None:
    for from_address, to_address, length in moves:
        ctypes.memmove(to_address, from_address, length)
