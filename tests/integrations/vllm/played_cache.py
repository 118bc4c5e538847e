"""A prefix cache that is vLLM's own, of an engine whose requests a test plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvferry import EngineSpec
from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.setup import Setup, block_tables
from kvferry.testing import Fabric
from tests.integrations.vllm.played_setup import setup_of

BLOCK, BLOCKS = 16, 400
HASH = "sha256"
HEADS: dict[str, Any] = {"num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=BLOCK, **HEADS)
STATES = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 16), (4, 8, 8)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_type=MambaAttentionBackendEnum.MAMBA2,
    mamba_cache_mode="align",
)
WINDOW = SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * BLOCK, **HEADS)


class Cache:
    """vLLM's cache manager, and the connector's view of it."""

    def __init__(self, fabric: Fabric, *specs: KVCacheSpec, share: float = 0.25, **options: Any) -> None:
        init_none_hash(get_hash_fn_by_name(HASH))
        self._hash = get_request_block_hasher(BLOCK, get_hash_fn_by_name(HASH))
        groups = [KVCacheGroupSpec([f"{index}"], spec) for index, spec in enumerate(specs or (FULL,))]
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        parallel = SimpleNamespace(decode_context_parallel_size=1)
        tables = block_tables(SimpleNamespace(parallel_config=parallel), config)
        spec = EngineSpec("prefill", tuple(table.group for table in tables))
        setup = setup_of(fabric, spec, serves=True, caches_prefixes=True)
        settings = replace(setup.settings, prefix_share=share)
        self.setup: Setup = replace(setup, tables=tables, settings=settings, **options)
        self.manager = KVCacheManager(config, 1 << 16, BLOCK, BLOCK)
        self.pool = self.manager.block_pool
        self.cache = PrefixCache(self.setup, self.manager)
        self.free = self.pool.get_num_free_blocks()
        self._number = 0

    def request(self, tokens: Sequence[int], adapter: str = "", **more: Any) -> Request:
        """An arrived request."""
        self._number += 1
        lora = LoRARequest(adapter, 1, f"/adapters/{adapter}") if adapter else None
        request = Request(
            f"r{self._number}",
            list(tokens),
            SamplingParams(max_tokens=1),
            None,
            block_hasher=self._hash,
            lora_request=lora,
            **more,
        )
        self.cache.see(request)
        return request

    def schedule(self, tokens: Sequence[int], adapter: str = "", **more: Any) -> Request:
        """A request whose tokens the next steps compute: first whole blocks, of which vLLM keeps the state."""
        self.manager.new_step_starts()
        request = self.request(tokens, adapter, **more)
        blocks, computed, _ = self.manager.get_computed_blocks(request)
        done, found = computed, (computed, blocks)
        self._had: list[list[int]] = [[] for _ in self.setup.tables]
        for end in (request.num_tokens // BLOCK * BLOCK, request.num_tokens):
            if end > done:
                assert self.manager.allocate_slots(request, end - done, *found) is not None
                request.num_computed_tokens = done = end
                found = (0, None)
            # Blocks that vLLM frees between, such as those before a window, stay in its prefix cache.
            for before, listed in zip(self._had, self.manager.get_block_ids(request.request_id), strict=True):
                before[:] = [block or old for block, old in zip_longest(listed, before)]
        return request

    def compute(self, tokens: Sequence[int], adapter: str = "", **more: Any) -> list[list[int]]:
        """Compute a request, and end it; returns the blocks that it has had, by group."""
        self.manager.free(self.schedule(tokens, adapter, **more))
        return self._had

    @property
    def used(self) -> int:
        return int(self.free - self.pool.get_num_free_blocks())
