"""Layers with one latent for all heads, and indexers, as vLLM's own code writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as rocm
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvferry.errors import InvalidField
from kvferry.planner import Path
from tests.integrations.vllm.layouts.worlds import LAYERS, Model, Rank, Shape, World, check_read

MLA = "vllm.v1.attention.backends.mla"
LATENT, ROPE = 512, 64
CONFIG = {"model_config": SimpleNamespace(hf_text_config=SimpleNamespace(kv_lora_rank=LATENT))}
FEW = 37

PAIRS = (
    (Shape(1, 16, "LBHNC"), Shape(2, 32, "BLHNC")),
    (Shape(2, 32, "BLHNC"), Shape(1, 48, "LBHNC", kernel_block=16)),
    (Shape(3, 48, "LBNHC"), Shape(2, 16, "LBHNC")),
)


@cache
def rows(layer: str, width: int) -> torch.Tensor:
    """A row for each token."""
    random = torch.Generator().manual_seed(LAYERS.index(layer) * 1000 + width)
    return torch.randn(FEW, width, generator=random).to(torch.bfloat16)


def check_pairs(make: Callable[[], Model], pairs: tuple[tuple[Shape, Shape], ...] = PAIRS) -> None:
    """Pairs of engines, from the first token and from the second block, directly and staged."""
    for index, (source, destination) in enumerate(pairs):
        pair = World("p", make(), source), World("d", make(), destination)
        check_read(*pair)
        if pair[1].model.tokens > destination.block:
            check_read(*pair, destination.block, list(Path)[index % 2])


def latent_spec(block: int, heads: int) -> Any:
    """As vLLM's `MLAAttention.get_kv_cache_spec` makes it."""
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.bfloat16)


def cpu_latent() -> Model:
    """vLLM's latent attention on CPUs."""

    def write(rank: Rank, layer: str, slots: torch.Tensor) -> None:
        content = rows(layer, LATENT + ROPE)
        CPUMLAImpl.do_kv_cache_update(
            None, content[:, :LATENT], content[:, None, LATENT:], rank.caches[layer], slots, "auto", torch.tensor(1.0)
        )

    return Model(f"{MLA}.cpu_mla.CPUMLABackend", 0, latent_spec, write, config=CONFIG, tokens=FEW)


def test_latent_and_rope_move() -> None:
    check_pairs(
        cpu_latent,
        (
            (Shape(1, 16), Shape(2, 32)),
            (Shape(2, 32), Shape(1, 48, kernel_block=16)),
            (Shape(3, 48, "LBNHC"), Shape(2, 16)),
        ),
    )


def by_rows(backend: str, spec: Callable[[int, int], Any]) -> Model:
    """A cache with a row for each state, written here: its kernel needs a GPU."""

    def write(rank: Rank, layer: str, slots: torch.Tensor) -> None:
        target = rank.caches[layer].view(torch.uint8)
        page, width = target.shape[2], target.shape[3]
        content = rows(layer, -(-width // 2)).view(torch.uint8)[:, :width]
        target[slots // page, 0, slots % page] = content

    return Model(backend, 0, spec, write, config=CONFIG, tokens=FEW)


def packed_spec(cache_dtype: str, width: int) -> Callable[[int, int], Any]:
    """Specs of the quantised latent of DeepSeek V3.2."""

    def spec(block: int, heads: int) -> Any:
        return MLAAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            head_size=LATENT + ROPE,
            dtype=torch.uint8,
            cache_dtype_str=cache_dtype,
            state_content_bytes=width,
        )

    return spec


@pytest.mark.parametrize(
    ("backend", "spec"),
    [
        (f"{MLA}.flashmla.FlashMLABackend", latent_spec),
        (f"{MLA}.flashmla_sparse.FlashMLASparseBackend", packed_spec("fp8_ds_mla", 656)),
        (f"{MLA}.flashmla_sparse.FlashMLASparseBackend", packed_spec("nvfp4_ds_mla", 352)),
    ],
    ids=["bfloat16", "fp8_ds_mla", "nvfp4_ds_mla"],
)
def test_rows_of_tokens_move(backend: str, spec: Callable[[int, int], Any]) -> None:
    check_pairs(lambda: by_rows(backend, spec))


def index_spec(width: int) -> Callable[[int, int], Any]:
    """As vLLM's `DeepseekV32IndexerCache.get_kv_cache_spec` makes them."""

    def spec(block: int, heads: int) -> Any:
        return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=width, dtype=torch.uint8)

    return spec


def indexer() -> Model:
    """The indexer of DeepSeek V3.2, written by vLLM's Triton kernel in the order of the CUDA kernel."""

    def write(rank: Rank, layer: str, slots: torch.Tensor) -> None:
        target = rank.caches[layer].squeeze(1)
        page = target.shape[1]
        flat = target.view(target.shape[0], -1)
        keys, scales = (
            flat[:, : page * 128].view(current_platform.fp8_dtype()),
            flat[:, page * 128 :].view(torch.float32),
        )
        rocm._indexer_k_quant_and_cache_kernel[(len(slots),)](
            rows(layer, 128), keys, scales, slots, scales.stride(0), keys.stride(0), page, len(slots), 128,
            "NORMAL", 16, 16, IS_FNUZ=False, USE_UE8M0=True,
        )  # fmt: skip

    return Model(f"{MLA}.indexer.DeepseekV32IndexerBackend", 0, index_spec(132), write, tokens=FEW, layers=LAYERS[:1])


def test_indexer_pages_are_keys_then_scales() -> None:
    check_pairs(
        indexer, ((Shape(1, 16, "LBHNC"), Shape(2, 32, "BLHNC")), (Shape(2, 32), Shape(1, 48, kernel_block=16)))
    )


def test_keys_of_an_unknown_width_are_refused() -> None:
    with pytest.raises(InvalidField, match="132 or 68"):
        World("p", by_rows(f"{MLA}.indexer.DeepseekV32IndexerBackend", index_spec(100)), Shape())
