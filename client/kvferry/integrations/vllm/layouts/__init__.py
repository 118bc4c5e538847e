"""vLLM's KV caches as planes: strides from the tensor, meaning from the layer's spec and its attention backend; what is
unknown is refused."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import InvalidField
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.backends import BACKENDS
from kvferry.integrations.vllm.layouts.content import content_of, element_type
from kvferry.integrations.vllm.layouts.family import Family as Family
from kvferry.integrations.vllm.layouts.family import Proof as Proof
from kvferry.integrations.vllm.layouts.layer import Layer as Layer
from kvferry.integrations.vllm.layouts.layer import backend_of as backend_of
from kvferry.integrations.vllm.layouts.state import state_planes

# By name, since older versions of vLLM lack some. A spec that vLLM derives from one of these may mean something else.
_SPECS = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
)


def layer_planes(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer.

    Raises:
        InvalidField: the meaning of its bytes is not known.
        BadGeometry: its tensor is not what its spec says.
    """
    if isinstance(layer.spec, MambaSpec):
        return state_planes(layer)
    planes = family_of(layer).planes(layer)
    return tuple(replace(plane, dtype=element_type(layer, plane)) for plane in planes)


def family_of(layer: Layer) -> Family:
    """Return the family that a layer of attention belongs to; raises `InvalidField` if it is not known."""
    if type(layer.spec).__name__ not in _SPECS:
        raise InvalidField(f"KV-cache spec of {layer.name}", type(layer.spec).__name__, " or ".join(_SPECS))
    known = BACKENDS.get(layer.backend)
    if known is None:
        raise InvalidField(f"attention backend of {layer.name}", layer.backend, "one whose cache is known to kvferry")
    content = content_of(layer.spec)
    family = known.get(content)
    if family is None:
        where = f"KV cache of {layer.name}"
        raise InvalidField(where, content, f"{' or '.join(known)} with {layer.backend.rpartition('.')[2]}")
    return family
