"""What the connector uses of vLLM although vLLM promises none of it to connectors: a version that lacks some of it
fails here, and not in an engine."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest
from vllm import SamplingParams
from vllm.config import CompilationConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import Request


@pytest.mark.parametrize(
    "name",
    [
        "core.block_pool:BlockPool.touch",
        "core.block_pool:BlockPool.free_blocks",
        "core.kv_cache_manager:KVCacheManager.get_block_ids",
        "core.kv_cache_manager:KVCacheManager.free",
        "core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit",
        "core.block_pool:BlockPool.get_cached_block",
        "core.kv_cache_utils:get_request_block_hasher",
        "attention.backends.cpu_attn:_get_attn_isa",
        "attention.backends.triton_attn:TritonAttentionImpl._ensure_scale_caches",
        "attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
        "engine.parallel_sampling:ParentRequest.get_child_info",
    ],
)
def test_vllm_has_the_private_functions_that_are_called(name: str) -> None:
    assert callable(resolve_name(f"vllm.v1.{name}"))


def test_vllm_has_the_private_attributes_that_are_read() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=1), None)
    # `prompts.shorten` takes tokens from it.
    assert request._all_token_ids == [1, 2, 3]
    assert isinstance(BlockPool(2, enable_caching=True, hash_block_size=16).blocks, list)
    assert CompilationConfig().static_forward_context == {}
    # `waking.Engine` puts it into the queue of an engine.
    assert EngineCoreRequestType.WAKEUP is not None
