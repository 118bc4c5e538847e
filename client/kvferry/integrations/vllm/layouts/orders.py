"""One layer of a vLLM engine, the type of its elements, and its planes by the order of bytes that its backend writes: K
and V of each head, or one latent for all heads (MLA), the same on every rank, with its indexer. `backends` has the
table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.platforms import current_platform

from kvferry.errors import InvalidField
from kvferry.geometry import formats
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
    """A layer of one rank."""

    name: str  # vLLM's full name of the layer, the same on every rank and in both engines
    cache: torch.Tensor  # its strides say where bytes lie
    spec: Any  # vLLM's KV-cache spec, which gives the bytes their meaning, together with the backend
    group: Group
    heads: Holding  # the KV heads and tokens that the rank holds; see `shards.holding`
    vllm_config: Any
    backend: str = ""  # module and class of the layer's attention backend (`backend_of`)

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


_INDEX_BYTES = {132: 128, 68: 64}
"""Bytes of an indexer's key by the bytes of key and scales: 128 fp8 and a float32, or 128 fp4 and 4 exponents."""

Planes = tuple[Plane, ...]


def packed(layer: Layer) -> Planes:
    """K, then V, in the content of each head and token."""
    return formats.vllm_attention(layer.tensors, layer.group, layer.heads, layer.spec.head_size)


def cells(layer: Layer) -> Planes:
    """Values and scales of each head and token, mixed."""
    # vLLM sets the scales in the cache to 1 at its first write to the layer. On a decode engine, a read may come before
    # that, and its scales would be lost. So vLLM sets the scales now.
    make_scales = getattr(getattr(layer.module, "impl", None), "_ensure_scale_caches", None)
    if make_scales is not None:
        make_scales(layer.cache)
    named = f"vllm-{content_of(layer.spec).replace('_', '-')}"
    return formats.vllm_cells(layer.tensors, layer.group, named, layer.heads)


def two_slots(layer: Layer) -> Planes:
    """K and V as two slots of all heads, in natural order."""
    return formats.vllm_two_slots(layer.tensors, layer.group, layer.spec.num_kv_heads, layer.heads)


def tiles(layer: Layer, named: str) -> Planes:
    """K and V as two slots, permuted as kernels for AMD's GPUs read them: HIP's and AITER's each in its own way."""
    return formats.vllm_tiles(layer.tensors, layer.group, layer.spec.num_kv_heads, named, layer.heads)


def nvfp4_pages(layer: Layer) -> Planes:
    """Values and scales of K, then of V, in each page."""
    # Two kernels write these pages. Their orders of scales inside a head's page were not compared.
    writer = "flashinfer" if getattr(getattr(layer.module, "impl", None), "nvfp4_fa2", False) else "vllm"
    named = f"vllm-nvfp4-scales-{writer}"
    return formats.vllm_nvfp4(layer.tensors, layer.group, layer.spec.num_kv_heads, named, layer.heads)


def cpu_pages(layer: Layer) -> Planes:
    """Pages of vLLM's attention on CPUs, which permutes inside a page."""
    # Imported on this platform only: the module examines the processor.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # With the arguments of `CPUAttentionMetadataBuilder`: the dtype is the model's, also for a cache of fp8.
    config = layer.vllm_config
    cache_dtype = config.cache_config.cache_dtype
    isa = _get_attn_isa(config.model_config.dtype, layer.cache.shape[2], layer.spec.head_size, cache_dtype)
    return formats.vllm_cpu(layer.tensors, layer.group, isa, layer.heads)


def latent_and_rope(layer: Layer) -> Planes:
    """Latent and rope side by side."""
    latent_dim = layer.vllm_config.model_config.hf_text_config.kv_lora_rank
    return formats.vllm_mla(layer.tensors, layer.group, latent_dim, layer.for_all_heads)


def latent_cells(layer: Layer) -> Planes:
    """Latent, scales and rope of each token, mixed."""
    if content_of(layer.spec) == "fp8_ds_mla":
        return formats.vllm_mla_fp8_ds(layer.tensors, layer.group, layer.for_all_heads)
    return formats.vllm_cells(layer.tensors, layer.group, "vllm-nvfp4-ds-mla", layer.for_all_heads)


def index_pages(layer: Layer) -> Planes:
    """An indexer: in each page the keys of all tokens, then their scales. Raises `InvalidField`: keys of a width that
    is not known."""
    width = layer.spec.state_content_size_bytes
    index_dim = _INDEX_BYTES.get(width)
    if index_dim is None:
        raise InvalidField(f"bytes of a key of {layer.name}", width, " or ".join(map(str, _INDEX_BYTES)))
    named = formats.PLAIN if index_dim == 128 else "vllm-mxfp4"
    return formats.vllm_indexer(layer.tensors, layer.group, index_dim, layer.for_all_heads, format=named)
