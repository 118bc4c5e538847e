"""Layers of a real vLLM without an engine: its modules, its specs, its plan and allocation of caches, its binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache

from kvferry.geometry import Group, GroupKind, Interval
from kvferry.geometry.tensors import Holding
from kvferry.integrations.vllm.shards import Layer, backend_of
from tests.support.vllm_versions import planned_caches

NULL_BLOCK = 0


@dataclass(frozen=True)
class Rank:
    """One rank's layers, bound to their caches.

    Attributes:
        config: vLLM's configuration, which has the modules.
        layers: what kvferry makes planes of.
        memory: all bytes of the caches.
    """

    config: Any
    layers: list[Layer]
    memory: torch.Tensor


def config_of(folder: Path, *, dtype: str = "float32", block: int = 32, cache_dtype: str = "auto", **model: Any) -> Any:
    """A configuration of vLLM for a model that is only described, not made."""
    described: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "architectures": ["Qwen3ForCausalLM"],
        **model,
    }
    transformers.Qwen3Config(**described).save_pretrained(folder)
    model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=2048)
    return VllmConfig(model_config=model_config, cache_config=CacheConfig(block_size=block, cache_dtype=cache_dtype))


def attention(
    config: Any,
    *,
    first: int = 0,
    count: int = 4,
    heads: int = 4,
    width: int = 32,
    backend: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Layers of attention, as models make them."""
    found = {}
    with set_current_vllm_config(config):
        for index in range(first, first + count):
            name = f"model.layers.{index}.self_attn.attn"
            found[name] = Attention(
                2 * heads,
                width,
                1.0,
                num_kv_heads=heads,
                cache_config=config.cache_config,
                prefix=name,
                attn_backend=backend,
                **settings,
            )
    return found


def bound(
    config: Any,
    modules: Mapping[str, Any],
    *,
    blocks: int = 8,
    layout: str = "LBHNC",
    kernel_block: int | None = None,
    specify: Callable[[Any], Any] = lambda spec: spec,
) -> Rank:
    """Plan, allocate and bind the caches of layers as a worker does.

    Args:
        blocks: about so many, by the memory.
        layout: one of vLLM's layouts.
        kernel_block: tokens of a kernel's blocks, if they are smaller than vLLM's.
        specify: what the backend makes of a layer's spec.
    """
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = blocks
    specs = {name: specify(module.get_kv_cache_spec(config)) for name, module in modules.items()}
    config.model_config.max_model_len = min(spec.block_size for spec in specs.values())
    planned = planned_caches(config, [specs], [1 << 30])[0]
    sizes = None if kernel_block is None else [kernel_block] * len(planned.kv_cache_groups)
    caches = allocate_kv_cache(planned, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), sizes)
    bind_kv_cache(caches, config.compilation_config.static_forward_context, [])
    layers = []
    for index, listed in enumerate(planned.kv_cache_groups):
        for name in listed.layer_names:
            spec = getattr(listed.kv_cache_spec, "kv_cache_specs", {}).get(name, listed.kv_cache_spec)
            # Mamba's blocks have states, not tokens.
            state = not hasattr(spec, "num_kv_heads")
            kind = GroupKind.STATE if state else GroupKind.TOKENS
            tokens = 0 if state else spec.block_size
            group = Group(f"{index}", kind, tokens, planned.num_blocks, NULL_BLOCK, 0, "device")
            count = 1 if state else spec.num_kv_heads
            held = Holding(units=Interval(0, count), axis_size=count)
            backend = "" if state else backend_of(config, name)
            layers.append(Layer(name, caches[name], spec, group, held, config, backend))
            if not state and getattr(modules[name], "attn_backend", None) is CPUAttentionBackend:
                # As its metadata builder does.
                cache_dtype = config.cache_config.cache_dtype
                modules[name].isa = _get_attn_isa(
                    config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype
                )
    memory = torch.empty(0, dtype=torch.uint8).set_(next(iter(caches.values())).untyped_storage())
    random = torch.Generator().manual_seed(7)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=random))
    return Rank(config, layers, memory)


def latent(config: Any, *, count: int = 2, latent_dim: int = 512, rope_dim: int = 64) -> dict[str, Any]:
    """Layers of latent attention with the CPU's backend."""
    found = {}
    with set_current_vllm_config(config):
        for index in range(count):
            name = f"model.layers.{index}.self_attn.mla_attn"
            found[name] = MLAAttention(
                num_heads=4,
                scale=1.0,
                qk_nope_head_dim=32,
                qk_rope_head_dim=rope_dim,
                v_head_dim=32,
                q_lora_rank=None,
                kv_lora_rank=latent_dim,
                kv_b_proj=torch.nn.Linear(latent_dim, 4 * 64, bias=False),
                cache_config=config.cache_config,
                prefix=name,
                attn_backend=CPUMLABackend,
            )
    return found


class Mamba2State(torch.nn.Module, MambaBase):  # type: ignore[misc]
    """The cache of a Mamba-2 layer: its shapes are vLLM's, the rest of the layer is left out."""

    mamba_type = MambaAttentionBackendEnum.MAMBA2

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        shapes: tuple[tuple[int, ...], ...] = MambaStateShapeCalculator.mamba2_state_shape(
            intermediate_size=4 * 16, tp_world_size=1, n_groups=1, num_heads=4, head_dim=16, state_size=8, conv_kernel=4
        )
        return shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return torch.bfloat16, torch.float32


def mamba(config: Any, *, count: int = 2) -> dict[str, Any]:
    """Layers with a recurrent state."""
    found: dict[str, Any] = {}
    config.cache_config.mamba_block_size = 2048
    for index in range(count):
        name = f"model.layers.{index}.mixer"
        found[name] = config.compilation_config.static_forward_context[name] = Mamba2State()
    return found
