"""Tiny models for a real vLLM that keep other things than K and V of every token, and drafters. Their weights are
random and large, as those of `tests.support.vllm_engines.make_model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.vllm_engines import VOCABULARY

HIDDEN = 128
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
INNER = 256


def make_latent_model(folder: Path, *, layers: int = 4) -> Path:
    """A model of random weights with latent attention: DeepSeek V2."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        # No experts.
        first_k_dense_replace=layers,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model: Any = transformers.DeepseekV2ForCausalLM(config)
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)
    return folder


def make_hybrid_model(folder: Path, *, kv_heads: int = 4, layers: int = 4) -> Path:
    """A model of random weights whose layers are Mamba-2 and attention by turns: Granite 4."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_hidden_layers=layers,
        layer_types=["mamba", "attention"] * (layers // 2),
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        num_local_experts=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
    )
    model: Any = transformers.GraniteMoeHybridForCausalLM(config)
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)
    return folder


def make_gated_delta_model(folder: Path, *, layers: int = 4) -> Path:
    """A model whose layers are gated delta nets and attention by turns: Qwen3-Next. vLLM's kernels for CPU take heads
    of 128 channels, and bfloat16."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        layer_types=["linear_attention", "full_attention"] * (layers // 2),
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        # vLLM wants experts in one layer at least.
        mlp_only_layers=list(range(layers - 1)),
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    model: Any = transformers.Qwen3NextForCausalLM(config)
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)
    return folder


def make_eagle_head(folder: Path, *, kv_heads: int, vocabulary: int, version: int) -> Path:
    """An EAGLE head, of the first version or the third, for a model of `make_model`."""
    import torch
    import transformers

    torch.manual_seed(1)
    third = version == 3
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary,
        # The layers of the target whose states the third version sees. vLLM's own choice is three of six or more.
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
    )
    if third:
        # Attention sees the token beside those states.
        weights = _decoder_layer("midlayer", 2 * HIDDEN, kv_heads)
        weights |= {f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "hidden_norm")}
        weights |= {"fc.weight": _random(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN)}
        weights["lm_head.weight"] = _random(vocabulary, HIDDEN)
    else:
        weights = _decoder_layer("layers.0", HIDDEN, kv_heads)
        weights["fc.weight"] = _random(HIDDEN, 2 * HIDDEN)
    config.save_pretrained(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def make_predicting_model(folder: Path, *, vocabulary: int, layers: int = 4) -> Path:
    """A model with a layer of its own that predicts the token after the next (MTP): MiMo."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        dtype="float32",
    )
    model: Any = transformers.Qwen2ForCausalLM(config)
    # MiMo is Qwen2 with that layer; transformers does not have it.
    layer = "model.mtp_layers.0"
    weights = dict(model.state_dict())
    weights |= _decoder_layer(layer, HIDDEN, HEADS)
    weights |= {f"{layer}.self_attn.{name}_proj.bias": torch.zeros(HIDDEN) for name in "qkv"}
    norms = ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
    weights |= {f"{layer}.{name}.weight": torch.ones(HIDDEN) for name in norms}
    weights[f"{layer}.input_proj.weight"] = _random(HIDDEN, 2 * HIDDEN)
    config.save_pretrained(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    described = json.loads((folder / "config.json").read_text())
    described.update(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def make_adapter(folder: Path, *, layers: int, rank: int = 8) -> Path:
    """A LoRA adapter for a model of `tests.support.vllm_engines.make_model`, which changes what it says."""
    import torch

    torch.manual_seed(2)
    folder.mkdir()
    name = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    weights = {}
    for layer in range(layers):
        for projection in "qv":
            weights[name.format(layer, projection, "A")] = _random(rank, HIDDEN)
            weights[name.format(layer, projection, "B")] = _random(HEADS * HEAD_DIM, rank)
    torch.save(weights, folder / "adapter_model.bin")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


def _random(*shape: int) -> Any:
    import torch

    return 0.2 * torch.randn(*shape)


def _decoder_layer(prefix: str, seen: int, kv_heads: int) -> dict[str, Any]:
    """The weights of a layer as Llama's, whose attention sees so many channels."""
    import torch

    shapes = {
        "self_attn.q_proj": (HIDDEN, seen),
        "self_attn.k_proj": (kv_heads * HEAD_DIM, seen),
        "self_attn.v_proj": (kv_heads * HEAD_DIM, seen),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    weights = {f"{prefix}.{name}.weight": _random(*shape) for name, shape in shapes.items()}
    return {**weights, f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN)}
