"""Layers with K and V of each head, as vLLM's own code writes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import triton_attn, triton_attn_diffkv
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from kvferry.planner import Path
from tests.integrations.vllm.layouts.worlds import LAYERS, LAYOUTS, TOKENS, Model, Rank, Shape, World, check_read

HEADS, KEY, VALUE = 6, 16, 32


@cache
def request(layer: str, width: int) -> torch.Tensor:
    """K or V of a layer, ``[tokens, heads, width]``."""
    random = torch.Generator().manual_seed(LAYERS.index(layer) * 1000 + width)
    return torch.randn(TOKENS, HEADS, width, generator=random).to(torch.bfloat16)


def packed_spec(cache_dtype: str, key: int, value: int) -> Callable[[int, int], Any]:
    """Specs as vLLM's `Attention.get_kv_cache_spec` makes them."""
    mode = get_kv_quant_mode(cache_dtype)
    dtype = torch.bfloat16 if cache_dtype == "auto" else torch.uint8

    def spec(block: int, heads: int) -> Any:
        return FullAttentionSpec(
            block_size=block, num_kv_heads=heads, head_size=key, head_size_v=value, dtype=dtype, kv_quant_mode=mode
        )

    return spec


def triton(cache_dtype: str = "auto", key: int = KEY, value: int = KEY) -> Model:
    """vLLM's Triton backend; with K and V of different sizes its variant for these."""
    backend, impl_of = triton_attn.TritonAttentionBackend, triton_attn.TritonAttentionImpl
    if key != value:
        backend, impl_of = triton_attn_diffkv.TritonAttentionDiffKVBackend, triton_attn_diffkv.TritonAttentionDiffKVImpl
    mode = get_kv_quant_mode(cache_dtype)
    made = packed_spec(cache_dtype, key, value)

    def module(heads: int) -> Any:
        impl = object.__new__(impl_of)
        impl.attn_type, impl.head_size, impl.kv_cache_dtype = AttentionType.DECODER, key, cache_dtype
        impl._kv_quant_mode, impl._is_per_token_head_quant = mode, mode.is_per_token_head
        impl.fp8_dtype = torch.float8_e4m3fn
        scale = torch.tensor(0.25)
        return SimpleNamespace(impl=impl, kv_cache_dtype=cache_dtype, _k_scale=scale, _v_scale=scale)

    def write(rank: Rank, layer: str, slots: torch.Tensor) -> None:
        held, of = rank.heads, rank.modules[layer]
        k, v = (part[: len(slots), held].contiguous() for part in (request(layer, key), request(layer, value)))
        of.impl.do_kv_cache_update(of, k, v, rank.caches[layer], slots)

    name = f"{backend.__module__}.{backend.__qualname__}"
    return Model(name, HEADS, lambda block, heads: backend.customize_spec(made(block, heads)), write, module)


SOURCES = [
    Shape(2, 16, "LBHNC"),
    Shape(3, 32, "LBNHC"),
    Shape(1, 48, "LHBNC"),
    Shape(2, 32, "BLHNC"),
    Shape(3, 16, "BLNHC"),
    Shape(1, 16, "BHLNC"),
    Shape(2, 48, "LBHNC", kernel_block=16),
]
DESTINATIONS = [
    Shape(3, 16, "LBNHC"),
    Shape(2, 48, "BLHNC"),
    Shape(1, 32, "LBHNC", padding=64),
    Shape(3, 48, "LHBNC"),
    Shape(2, 16, "BHLNC"),
    Shape(6, 32, "BLNHC"),
    Shape(1, 48, "LBNHC", kernel_block=16),
]


@cache
def world(name: str, make: Callable[..., Model], arguments: tuple[Any, ...], shape: Shape) -> World:
    """An engine, written once for all of its reads."""
    return World(name, make(*arguments), shape)


def test_every_layout_is_read_into_every_other() -> None:
    assert {shape.layout for shape in SOURCES} == {shape.layout for shape in DESTINATIONS} == set(LAYOUTS)


@pytest.mark.parametrize("destination", DESTINATIONS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_packed_keys_and_values(source: Shape, destination: Shape) -> None:
    for begin, path in itertools.product((0, destination.block), Path):
        check_read(world("p", triton, (), source), world("d", triton, (), destination), begin, path)
