"""Layers with K and V of each head."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvferry.errors import InvalidField
from kvferry.geometry import formats
from kvferry.geometry.model import Plane
from kvferry.integrations.vllm.layouts.layer import Layer


def attention_planes(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with K and V of each head.

    Raises:
        InvalidField: the platform's layouts have not been checked.
    """
    if not current_platform.is_cpu():
        raise InvalidField("platform", current_platform.device_name, "cpu: other layouts have not been checked")
    # The last axis holds K and V of a head side by side.
    isa = _get_attn_isa(layer.cache.dtype, layer.group.block_tokens, layer.spec.head_size)
    return formats.vllm_cpu({layer.name: layer.cache}, layer.group, isa, layer.heads)
