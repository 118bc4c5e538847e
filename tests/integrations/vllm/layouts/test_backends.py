"""Which backends of vLLM are known, which are refused, and what tells two caches apart."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import subclass_attention_backend, subclass_attention_backend_with_overrides
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, get_kv_quant_mode

from kvferry import EngineGeometry, Group, Interval, RankGeometry, plan_read
from kvferry.errors import Incompatible, InvalidField
from kvferry.geometry.tensors import Holding
from kvferry.integrations.vllm.layouts.attention import BACKENDS, Proof, family_of, layer_planes
from kvferry.integrations.vllm.shards import Layer, backend_of
from tests.support.vllm_versions import MISSING_BACKENDS, MISSING_MEMBERS

NAME = "model.layers.0.self_attn.attn"
TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
REFUSED = {
    "CUSTOM",
    "CUTLASS_MSA",
    "FLASHINFER_MLA_SPARSE_DSV4",
    "FLASHINFER_MLA_SPARSE_DSV41",
    "FLASHMLA_MEGA_ATTN_DSV41",
    "FLASHMLA_SPARSE_DSV4",
    "FLASHMLA_SPARSE_DSV41",
    "MINIMAX_M3_SPARSE",
    "NO_ATTENTION",
    "ROCM_FLASHMLA_SPARSE_DSV4",
    "TORCH_SDPA",
    "TRITON_MSA",
    "TURBOQUANT",
    "ULTRAQUANT",
    "XPU_MLA_SPARSE",
}
"""Members of vLLM's registry without a cache, or with a cache that has not been examined."""


def layer(spec: Any, backend: str, **of_the_module: Any) -> Layer:
    """A layer of one head and four blocks of 16 tokens."""
    module = SimpleNamespace(**of_the_module)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={NAME: module}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    group = Group("full", block_tokens=16, num_blocks=4)
    tensor = torch.zeros(4, 1, 16, 32, dtype=spec.dtype)
    return Layer(NAME, tensor, spec, group, Holding(units=Interval(0, 1), axis_size=1), config, backend)


def spec(cache_dtype: str = "auto") -> FullAttentionSpec:
    """A spec as vLLM makes it."""
    dtype = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
    mode = get_kv_quant_mode(cache_dtype)
    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=dtype, kv_quant_mode=mode)


def test_backends_of_vllms_registry_are_all_known_or_refused() -> None:
    registered = {name: member.value for name, member in AttentionBackendEnum.__members__.items()}
    assert {name for name, path in registered.items() if path not in BACKENDS} == REFUSED - MISSING_MEMBERS


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend not in MISSING_BACKENDS])
def test_known_backends_all_exist_in_vllm(backend: str) -> None:
    module, _, name = backend.rpartition(".")
    # Looked up, not imported: some need what only a GPU's environment has.
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    assert re.search(rf"^(class )?{name}\b", Path(found.origin).read_text(), re.MULTILINE)


@pytest.mark.parametrize("backend", [FlashAttentionBackend, TritonFlashAttentionBackend])
def test_classes_that_vllm_derives_for_metadata_are_the_same_backend(backend: type) -> None:
    for found in (backend, subclass_attention_backend("ChunkedLocal", backend, object)):
        module = SimpleNamespace(get_attn_backend=lambda found=found: found)
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={NAME: module}))
        assert backend_of(config, NAME) == f"{backend.__module__}.{backend.__qualname__}"
        assert backend_of(config, NAME) in BACKENDS


def test_a_derived_class_that_writes_by_itself_is_refused_by_name() -> None:
    derived = subclass_attention_backend_with_overrides("Pooling", FlashAttentionBackend, {"get_impl_cls": object})
    module = SimpleNamespace(get_attn_backend=lambda: derived)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={NAME: module}))
    with pytest.raises(InvalidField, match="PoolingFlashAttentionBackend"):
        family_of(layer(spec(), backend_of(config, NAME)))


def test_a_layer_without_a_backend_is_refused_by_name() -> None:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    with pytest.raises(InvalidField, match=NAME):
        backend_of(config, NAME)


def test_unknown_content_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidField, match=r"turboquant_k8v4.*plain or fp8"):
        layer_planes(layer(spec("turboquant_k8v4"), TRITON))


def test_an_unknown_spec_is_refused_by_name() -> None:
    ring = CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=32, head_size_v=0, dtype=torch.float32)
    with pytest.raises(InvalidField, match="CircularBufferSpec"):
        layer_planes(layer(ring, TRITON))


def test_proof_needs_a_cache_that_vllms_own_code_wrote() -> None:
    assert family_of(layer(spec(), TRITON)).proof is Proof.KERNEL
    unproven = family_of(layer(spec(), "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"))
    assert unproven.proof is not Proof.KERNEL


def engine(name: str, cache_dtype: str, scale: float) -> EngineGeometry:
    """An engine of one layer of fp8."""
    scales = {"_k_scale": torch.tensor(scale), "_v_scale": torch.tensor(1.0)}
    of = layer(spec(cache_dtype), TRITON, kv_cache_dtype=cache_dtype, **scales)
    return EngineGeometry(name, (of.group,), (RankGeometry(0, layer_planes(of)),))


def test_engines_of_different_static_scales_are_refused() -> None:
    plan_read(engine("p", "fp8", 0.5), engine("d", "fp8", 0.5), 0)
    with pytest.raises(Incompatible, match=r"float8_e4m3fn \* 0.5"):
        plan_read(engine("p", "fp8", 0.5), engine("d", "fp8", 0.25), 0)


def test_fp8_kinds_are_distinguished() -> None:
    with pytest.raises(Incompatible, match="float8_e5m2"):
        plan_read(engine("p", "fp8", 1.0), engine("d", "fp8_e5m2", 1.0), 0)


def test_scales_that_each_engine_computes_are_refused() -> None:
    with pytest.raises(InvalidField, match="calculate_kv_scales"):
        layer_planes(layer(spec("fp8"), TRITON, kv_cache_dtype="fp8", calculate_kv_scales=True))
