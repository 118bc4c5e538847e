"""The table of the layouts that vLLM's attention backends write, and how each was proven.

The keys are the backend and the content of the layer's elements (`content_of`). Everything else is refused: for example
backends whose own pages have not been examined (TurboQuant, UltraQuant, MiniMax M3, DeepSeek V4.1, GLM 5 with pooled
keys, Qwen 4, Kimi K3), those that the self-check cannot write to (DeepSeek V4, the indexer on ROCm), and those of XPUs.

Where `Proof` is not KERNEL, the code that writes the cache on a GPU has not been run: only a check on the machine
itself can show that the planes are right.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import InvalidField
from kvferry.integrations.vllm.layouts import orders
from kvferry.integrations.vllm.layouts.orders import Layer, Planes, content_of, element_type
from kvferry.integrations.vllm.layouts.state import state_planes


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

    @property
    def proven(self) -> bool:
        return self.proof is Proof.KERNEL


KERNEL, PORT, REFERENCE, SOURCE = Proof.KERNEL, Proof.PORT, Proof.REFERENCE, Proof.SOURCE

_V1 = "vllm.v1.attention.backends"

Order = Callable[[Layer], Planes]


def _families(name: str, planes: Order, **proofs: Proof) -> dict[str, Family]:
    """Return families by content. Contents with slots of K and V are written with a space, not an underscore."""
    contents = {content.replace("_slots", " slots"): proof for content, proof in proofs.items()}
    return {content: Family(f"{name}, {content}", planes, proof) for content, proof in contents.items()}


def _packed(plain: Proof, fp8: Proof = SOURCE) -> dict[str, Family]:
    return _families("K and V in each content", orders.packed, plain=plain, fp8=fp8)


def _slots(name: str, planes: Order, plain: Proof, fp8: Proof = SOURCE) -> dict[str, Family]:
    return _families(name, planes, plain_slots=plain, fp8_slots=fp8)


def _latent(plain: Proof = SOURCE) -> dict[str, Family]:
    return _families("latent and rope", orders.latent_and_rope, plain=plain, fp8=SOURCE)


def _packed_latent(proof: Proof) -> dict[str, Family]:
    name = "latent, scales and rope in a cell"
    return _families(name, orders.latent_cells, fp8_ds_mla=proof, nvfp4_ds_mla=proof)


_CELLS = _families(
    "values and scales in a cell",
    orders.cells,
    int8_per_token_head=KERNEL,
    fp8_per_token_head=KERNEL,
    int4_per_token_head=KERNEL,
)
_NVFP4 = _families("values, then scales, of K and of V", orders.nvfp4_pages, nvfp4=REFERENCE)

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
        **_slots("AITER's tiles of K and of V", partial(orders.tiles, named="vllm-aiter-tiles"), KERNEL),
    },
    # The HIP kernel writes pages of 16 and 32 tokens, the Triton kernel all others, in the same order.
    f"{_V1}.rocm_attn.RocmAttentionBackend": _slots(
        "ROCm's tiles of K and of V", partial(orders.tiles, named="vllm-rocm-tiles"), PORT
    ),
    f"{_V1}.rocm_segmented_attn.RocmSegmentedAttentionBackend": _slots(
        "slots of K and of V", orders.two_slots, KERNEL, KERNEL
    ),
    f"{_V1}.b12x.B12xPagedAttentionBackend": _slots("slots of K and of V", orders.two_slots, PORT),
    f"{_V1}.cpu_attn.CPUAttentionBackend": _families(
        "pages of the CPU's kernel", orders.cpu_pages, plain=KERNEL, fp8=SOURCE
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
    f"{_V1}.mla.indexer.DeepseekV32IndexerBackend": _families("keys, then scales", orders.index_pages, plain=PORT),
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


def layer_planes(layer: Layer) -> Planes:
    """Return the planes of a layer.

    Raises:
        InvalidField: the meaning of the layer's bytes is not known.
        BadGeometry: the tensor contradicts the spec.
    """
    if isinstance(layer.spec, MambaSpec):
        return state_planes(layer)
    planes = family_of(layer).planes(layer)
    return tuple(replace(plane, dtype=element_type(layer, plane)) for plane in planes)
