"""The layouts that vLLM's attention backends write: K and V of each head, or one latent for all heads (MLA) with its
indexer, the same on every rank.

`BACKENDS` is the table of all that are known, by backend and content of the layer's elements (`content_of`), and of how
each was proven. Everything else is refused: for example backends whose own pages have not been examined (TurboQuant,
UltraQuant, MiniMax M3, DeepSeek V4.1, GLM 5 with pooled keys, Qwen 4, Kimi K3), those that the self-check cannot write
to (DeepSeek V4, the indexer on ROCm), and those of XPUs.

Where `Proof` is not KERNEL, the code that writes the cache on a GPU has not been run: only a check on the machine
itself can show that the planes are right.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import InvalidField
from kvferry.geometry import formats
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.state import state_planes
from kvferry.integrations.vllm.shards import Layer
from kvferry.testing.layout import SCALED

Planes = tuple[Plane, ...]

# Contents whose bytes depend on factors outside the cache.
_SCALED = ("fp8", "fp8 slots", "nvfp4")

_INDEX_BYTES = {132: 128, 68: 64}
"""Bytes of an indexer's key by the bytes of key and scales: 128 fp8 and a float32, or 128 fp4 and 4 exponents."""


def layer_planes(layer: Layer) -> Planes:
    """Return the planes of a layer. Raises `InvalidField`: the meaning of the layer's bytes is not known;
    `BadGeometry`: the tensor contradicts the spec."""
    if isinstance(layer.spec, MambaSpec):
        return state_planes(layer)
    planes = family_of(layer).planes(layer)
    return tuple(replace(plane, dtype=element_type(layer, plane)) for plane in planes)


def content_of(spec: Any) -> str:
    """Return the content of the elements by vLLM's spec: ``plain``, ``fp8``, ``nvfp4``, ``int8_per_token_head`` …
    ``slots`` follows if K and V are two slots of all heads instead of the two parts of each head's content."""
    packed = getattr(spec, "cache_dtype_str", None)
    if packed in ("fp8_ds_mla", "nvfp4_ds_mla"):
        return str(packed)
    mode = spec.kv_quant_mode.name.lower()
    content = {"none": "plain", "fp8_per_tensor": "fp8"}.get(mode, mode)
    return f"{content} slots" if spec.num_head_slots is not None and content in ("plain", "fp8") else content


def element_type(layer: Layer, plane: Plane) -> str:
    """Return the name of a plane's element type, which both engines of a read compare.

    vLLM keeps fp8 in tensors of bytes, so the tensor's type does not distinguish two kinds of fp8. Static scales belong
    to the name: the same bytes mean other numbers under another scale. Raises `InvalidField`: each engine would compute
    its own scales.
    """
    content = content_of(layer.spec)
    if content not in (*_SCALED, "fp8_per_token_head"):
        return plane.dtype
    # May differ between layers of a model.
    setting = str(getattr(layer.module, "kv_cache_dtype", None) or layer.vllm_config.cache_config.cache_dtype)
    if content == "nvfp4":
        found = setting
    elif content in _SCALED and "e5m2" in setting:
        found = "float8_e5m2"
    else:
        # On some AMD GPUs e4m3 has another encoding.
        found = str(current_platform.fp8_dtype()).removeprefix("torch.")
    return found + _scale(layer, plane) if content in _SCALED else found


def _scale(layer: Layer, plane: Plane) -> str:
    """Return the static scale as a suffix of the type's name; empty for 1."""
    if getattr(layer.module, "calculate_kv_scales", False):
        raise InvalidField(f"calculate_kv_scales of {layer.name}", True, "static scales: both engines need the same")
    scale = getattr(layer.module, "_v_scale" if plane.component.startswith("value") else "_k_scale", None)
    values = [1.0] if scale is None else [float(value) for value in scale.flatten().tolist()]
    if len(values) > 1:
        raise InvalidField(f"scales of {layer.name}", len(values), "one for K and one for V")
    return "" if values[0] == 1.0 else f"{SCALED}{values[0]!r}"


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


class Proof(enum.Enum):
    """The code that filled the caches in the tests of tests/integrations/vllm/layouts, all without a GPU."""

    KERNEL = "the backend's own cache-write code, on CPU tensors"
    PORT = "vLLM's Triton port of the CUDA or HIP kernel, called by the backend's own code where it has any"
    REFERENCE = "the tests, through vLLM's own view of a page or after the source that the format names"
    SOURCE = "nothing for this backend: its order was read in vLLM's source, and is that of a proven one"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of layers: a name for people, the function that makes a layer's planes, and their proof."""

    name: str
    planes: Callable[[Layer], Planes]
    proof: Proof


KERNEL, PORT, REFERENCE, SOURCE = Proof


def _families(name: str, planes: Callable[[Layer], Planes], proofs: Mapping[str, Proof]) -> dict[str, Family]:
    """Return families by content."""
    return {content: Family(f"{name}, {content}", planes, proof) for content, proof in proofs.items()}


def _packed(plain: Proof, fp8: Proof = SOURCE) -> dict[str, Family]:
    return _families("K and V in each content", packed, {"plain": plain, "fp8": fp8})


def _slots(name: str, planes: Callable[[Layer], Planes], plain: Proof, fp8: Proof = SOURCE) -> dict[str, Family]:
    return _families(name, planes, {"plain slots": plain, "fp8 slots": fp8})


def _latent(plain: Proof = SOURCE) -> dict[str, Family]:
    return _families("latent and rope", latent_and_rope, {"plain": plain, "fp8": SOURCE})


def _packed_latent(proof: Proof) -> dict[str, Family]:
    return _families("latent, scales and rope in a cell", latent_cells, {"fp8_ds_mla": proof, "nvfp4_ds_mla": proof})


_CELLS = _families(
    "values and scales in a cell",
    cells,
    {"int8_per_token_head": KERNEL, "fp8_per_token_head": KERNEL, "int4_per_token_head": KERNEL},
)
_NVFP4 = _families("values, then scales, of K and of V", nvfp4_pages, {"nvfp4": REFERENCE})

_V1 = "vllm.v1.attention.backends"

BACKENDS: Mapping[str, Mapping[str, Family]] = {
    # K and V of each head.
    f"{_V1}.triton_attn.TritonAttentionBackend": {**_packed(KERNEL, KERNEL), **_CELLS},
    f"{_V1}.triton_attn_diffkv.TritonAttentionDiffKVBackend": _packed(KERNEL),
    f"{_V1}.flash_attn.FlashAttentionBackend": _packed(PORT),
    f"{_V1}.flash_attn_diffkv.FlashAttentionDiffKVBackend": _packed(SOURCE),
    f"{_V1}.triton_flash_attn.TritonFlashAttentionBackend": _packed(SOURCE),
    f"{_V1}.flashinfer.FlashInferBackend": {**_packed(SOURCE), **_NVFP4},
    f"{_V1}.triton_flashinfer.TritonFlashInferBackend": _packed(SOURCE),
    f"{_V1}.flex_attention.FlexAttentionBackend": _packed(PORT),
    f"{_V1}.hpc_attn.HpcAttentionBackend": _packed(SOURCE),
    f"{_V1}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend": _packed(PORT),
    f"{_V1}.rocm_aiter_fa.AiterFlashAttentionBackend": {
        **_packed(PORT),
        **_slots("AITER's tiles of K and of V", partial(tiles, named="vllm-aiter-tiles"), KERNEL),
    },
    # The HIP kernel writes pages of 16 and 32 tokens, the Triton kernel all others, in the same order.
    f"{_V1}.rocm_attn.RocmAttentionBackend": _slots(
        "ROCm's tiles of K and of V", partial(tiles, named="vllm-rocm-tiles"), PORT
    ),
    f"{_V1}.rocm_segmented_attn.RocmSegmentedAttentionBackend": _slots(
        "slots of K and of V", two_slots, KERNEL, KERNEL
    ),
    f"{_V1}.b12x.B12xPagedAttentionBackend": _slots("slots of K and of V", two_slots, PORT),
    f"{_V1}.cpu_attn.CPUAttentionBackend": _families(
        "pages of the CPU's kernel", cpu_pages, {"plain": KERNEL, "fp8": SOURCE}
    ),
    # A latent for all heads.
    f"{_V1}.mla.triton_mla.TritonMLABackend": _latent(),
    f"{_V1}.mla.flashmla.FlashMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.flashattn_mla.FlashAttnMLABackend": _latent(),
    f"{_V1}.mla.cutlass_mla.CutlassMLABackend": _latent(),
    f"{_V1}.mla.flashinfer_mla.FlashInferMLABackend": _latent(),
    f"{_V1}.mla.tokenspeed_mla.TokenspeedMLABackend": _latent(),
    f"{_V1}.mla.rocm_aiter_mla.AiterMLABackend": _latent(),
    f"{_V1}.mla.aiter_triton_mla.AiterTritonMLABackend": _latent(),
    f"{_V1}.mla.cpu_mla.CPUMLABackend": _latent(KERNEL),
    f"{_V1}.mla.amx_mla.AMXMLABackend": _latent(),
    f"{_V1}.mla.flashmla_sparse.FlashMLASparseBackend": {**_latent(), **_packed_latent(REFERENCE)},
    f"{_V1}.mla.flashattn_mla_sparse.FlashAttnMLASparseBackend": _latent(),
    f"{_V1}.mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend": _latent(),
    f"{_V1}.mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend": {**_latent(), **_packed_latent(SOURCE)},
    f"{_V1}.mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend": _latent(),
    f"{_V1}.mla.rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend": _latent(),
    f"{_V1}.mla.indexer.DeepseekV32IndexerBackend": _families("keys, then scales", index_pages, {"plain": PORT}),
}

# By name, since older versions of vLLM lack some. Derived specs are not accepted: their bytes may mean something else.
_SPECS = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
)


def family_of(layer: Layer) -> Family:
    """Return the family of an attention layer; raises `InvalidField` for an unknown spec, backend or content."""
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
