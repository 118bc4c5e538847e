"""vLLM's KV caches as planes: strides from the tensor, meaning from the layer's spec; what is unknown is refused."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec

from kvferry.errors import InvalidField
from kvferry.geometry.model import Plane
from kvferry.integrations.vllm.layouts.attention import attention_planes
from kvferry.integrations.vllm.layouts.latent import latent_planes
from kvferry.integrations.vllm.layouts.layer import Layer as Layer
from kvferry.integrations.vllm.layouts.state import state_planes


def layer_planes(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer.

    Raises:
        InvalidField: the meaning of its bytes is not known.
        BadGeometry: its tensor is not what its spec says.
    """
    if isinstance(layer.spec, MLAAttentionSpec):
        return latent_planes(layer)
    if isinstance(layer.spec, MambaSpec):
        return state_planes(layer)
    if isinstance(layer.spec, AttentionSpec):
        return attention_planes(layer)
    known = "a layer of attention or of latent attention"
    raise InvalidField(f"KV-cache spec of {layer.name}", type(layer.spec).__name__, known)
