"""Layers of multi-head latent attention (MLA): one latent for all heads, the same on every rank."""

from __future__ import annotations

from kvferry.geometry import formats
from kvferry.geometry.model import Plane
from kvferry.integrations.vllm.layouts.layer import Layer


def latent_planes(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer of latent attention."""
    latent_dim = layer.vllm_config.model_config.hf_text_config.kv_lora_rank
    return formats.vllm_mla({layer.name: layer.cache}, layer.group, latent_dim, layer.heads)
