"""vLLM's KV caches as planes: strides from the tensor, meaning from the layer's spec and its attention backend. Unknown
specs and backends are refused."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.backends import Family as Family
from kvferry.integrations.vllm.layouts.backends import Proof as Proof
from kvferry.integrations.vllm.layouts.backends import family_of as family_of
from kvferry.integrations.vllm.layouts.layer import Layer as Layer
from kvferry.integrations.vllm.layouts.layer import backend_of as backend_of
from kvferry.integrations.vllm.layouts.layer import element_type
from kvferry.integrations.vllm.layouts.state import state_planes


def layer_planes(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer.

    Raises:
        InvalidField: the meaning of the layer's bytes is not known.
        BadGeometry: the tensor contradicts the spec.
    """
    if isinstance(layer.spec, MambaSpec):
        return state_planes(layer)
    planes = family_of(layer).planes(layer)
    return tuple(replace(plane, dtype=element_type(layer, plane)) for plane in planes)
