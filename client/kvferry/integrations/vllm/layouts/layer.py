"""One layer of a vLLM engine, and the type of its elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.platforms import current_platform

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Holding
from kvferry.testing.layout import SCALED

# Contents whose bytes depend on factors outside the cache.
_SCALED = ("fp8", "fp8 slots", "nvfp4")

# The own attributes of a class that vLLM's `subclass_attention_backend` returns.
_OF_A_DERIVED_CLASS = {"get_builder_cls", "__module__", "__doc__", "__abstractmethods__", "_abc_impl"}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of one rank.

    Attributes:
        name: vLLM's full name of the layer, the same on every rank and in both engines.
        cache: vLLM's tensor, whose strides say where bytes lie.
        spec: vLLM's KV-cache spec, which gives the bytes their meaning, together with the backend.
        group: the layer's group.
        heads: the KV heads and tokens that the rank holds; see `shards.holding`.
        vllm_config: the engine's configuration.
        backend: module and class of the layer's attention backend (`backend_of`).
    """

    name: str
    cache: torch.Tensor
    spec: Any
    group: Group
    heads: Holding
    vllm_config: Any
    backend: str = ""

    @property
    def module(self) -> Any:
        """vLLM's module of the layer, or None."""
        return self.vllm_config.compilation_config.static_forward_context.get(self.name)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor by the layer's name, as `kvferry.geometry.formats` takes tensors."""
        return {self.name: self.cache}

    @property
    def for_all_heads(self) -> Holding:
        """The tensor's holding if it is the same on every rank."""
        return replace(self.heads, units=None, axis_size=None)


def backend_of(vllm_config: Any, layer: str) -> str:
    """Return module and class of a layer's attention backend, e.g. ``vllm.v1…flash_attn.FlashAttentionBackend``.

    vLLM derives classes from its backends that build other metadata and write the same bytes; their base class is
    returned.

    Raises:
        InvalidField: vLLM knows no backend of this layer.
    """
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    if not hasattr(module, "get_attn_backend"):
        raise InvalidField(f"layer {layer}", type(module).__name__, "a layer of vLLM with an attention backend")
    backend: type = module.get_attn_backend()
    while set(vars(backend)) <= _OF_A_DERIVED_CLASS:
        backend = backend.__bases__[0]
    return f"{backend.__module__}.{backend.__qualname__}"


def content_of(spec: Any) -> str:
    """Return the content of the elements by vLLM's spec: ``plain``, ``fp8``, ``nvfp4``, ``int8_per_token_head`` …

    ``slots`` follows if K and V are two slots of all heads instead of the two parts of each head's content.
    """
    packed = getattr(spec, "cache_dtype_str", None)
    if packed in ("fp8_ds_mla", "nvfp4_ds_mla"):
        return str(packed)
    mode = spec.kv_quant_mode.name.lower()
    content = {"none": "plain", "fp8_per_tensor": "fp8"}.get(mode, mode)
    return f"{content} slots" if spec.num_head_slots is not None and content in ("plain", "fp8") else content


def element_type(layer: Layer, plane: Plane) -> str:
    """Return the name of a plane's element type, which both engines of a read compare.

    vLLM keeps fp8 in tensors of bytes, so the tensor's type does not distinguish two kinds of fp8. Static scales belong
    to the name: the same bytes mean other numbers under another scale.

    Raises:
        InvalidField: each engine would compute its own scales.
    """
    content = content_of(layer.spec)
    if content == "fp8" or content == "fp8 slots":
        found = _fp8(layer)
    elif content == "fp8_per_token_head":
        found = str(current_platform.fp8_dtype()).removeprefix("torch.")
    elif content == "nvfp4":
        found = _cache_dtype(layer)
    else:
        found = plane.dtype
    return found + _scale(layer, plane) if content in _SCALED else found


def _cache_dtype(layer: Layer) -> str:
    """vLLM's name of the type, which may differ between layers of a model."""
    found = getattr(layer.module, "kv_cache_dtype", None) or layer.vllm_config.cache_config.cache_dtype
    return str(found)


def _fp8(layer: Layer) -> str:
    if "e5m2" in _cache_dtype(layer):
        return "float8_e5m2"
    # On some AMD GPUs e4m3 has another encoding.
    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def _scale(layer: Layer, plane: Plane) -> str:
    """Return the static scale as a suffix of the type's name; empty for 1."""
    if getattr(layer.module, "calculate_kv_scales", False):
        raise InvalidField(f"calculate_kv_scales of {layer.name}", True, "static scales: both engines need the same")
    scale = getattr(layer.module, "_v_scale" if plane.component.startswith("value") else "_k_scale", None)
    values = [1.0] if scale is None else [float(value) for value in scale.flatten().tolist()]
    if len(values) > 1:
        raise InvalidField(f"scales of {layer.name}", len(values), "one for K and one for V")
    return "" if values[0] == 1.0 else f"{SCALED}{values[0]!r}"
