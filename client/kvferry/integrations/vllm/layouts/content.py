"""What the elements of a layer's cache are."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from kvferry.errors import InvalidField
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.layer import Layer
from kvferry.testing.layout import SCALED

# Contents whose bytes depend on factors that stand outside the cache.
_SCALED = ("fp8", "fp8 slots", "nvfp4")


def content_of(spec: Any) -> str:
    """Return what a spec of vLLM says of the elements: ``plain``, ``fp8``, ``nvfp4``, ``int8_per_token_head`` …

    ``slots`` follows where K and V are two slots of all heads instead of the two parts of each head's content.
    """
    packed = getattr(spec, "cache_dtype_str", None)
    if packed in ("fp8_ds_mla", "nvfp4_ds_mla"):
        return str(packed)
    mode = spec.kv_quant_mode.name.lower()
    content = {"none": "plain", "fp8_per_tensor": "fp8"}.get(mode, mode)
    return f"{content} slots" if spec.num_head_slots is not None and content in ("plain", "fp8") else content


def element_type(layer: Layer, plane: Plane) -> str:
    """Return the name of a plane's elements, by which both engines of a read recognise each other's.

    vLLM keeps fp8 in tensors of bytes, so their type does not tell two kinds of fp8 apart. Static scales belong to the
    name: the same bytes mean other numbers under another scale.

    Raises:
        InvalidField: scales that each engine would compute by itself.
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
    """vLLM's name of the type; layers of a model may differ in it."""
    found = getattr(layer.module, "kv_cache_dtype", None) or layer.vllm_config.cache_config.cache_dtype
    return str(found)


def _fp8(layer: Layer) -> str:
    if "e5m2" in _cache_dtype(layer):
        return "float8_e5m2"
    # On some AMD GPUs e4m3 is of another encoding.
    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def _scale(layer: Layer, plane: Plane) -> str:
    """The static scale as the end of the type's name; nothing for 1."""
    if getattr(layer.module, "calculate_kv_scales", False):
        raise InvalidField(f"calculate_kv_scales of {layer.name}", True, "static scales: both engines need the same")
    scale = getattr(layer.module, "_v_scale" if plane.component.startswith("value") else "_k_scale", None)
    values = [1.0] if scale is None else [float(value) for value in scale.flatten().tolist()]
    if len(values) > 1:
        raise InvalidField(f"scales of {layer.name}", len(values), "one for K and one for V")
    return "" if values[0] == 1.0 else f"{SCALED}{values[0]!r}"
