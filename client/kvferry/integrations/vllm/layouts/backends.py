"""What vLLM's attention backends write, and how each was proven: the one table of this package.

A layer is looked up by its backend and what its elements are (`content_of`). What is not here is refused, also by name:
backends with pages of their own that nobody has read yet (TurboQuant, UltraQuant, MiniMax M3, DeepSeek V4.1, GLM 5 with
pooled keys, Qwen 4, Kimi K3), and DeepSeek V4 on CPUs.

Where `Proof` is not KERNEL, the kernel that writes the cache could not be run here: it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.geometry.model import Plane
from kvferry.integrations.vllm.layouts import attention, latent
from kvferry.integrations.vllm.layouts.family import Family, Proof
from kvferry.integrations.vllm.layouts.layer import Layer

KERNEL, PORT, REFERENCE = Proof.KERNEL, Proof.PORT, Proof.REFERENCE

_V1 = "vllm.v1.attention.backends"
_V4 = "vllm.models.deepseek_v4"

Order = Callable[[Layer], tuple[Plane, ...]]


def _families(name: str, planes: Order, proofs: Mapping[str, Proof]) -> dict[str, Family]:
    return {content: Family(f"{name}, {content}", planes, proof) for content, proof in proofs.items()}


def _packed(proof: Proof) -> dict[str, Family]:
    return _families("K and V in each content", attention.packed, {"plain": proof, "fp8": proof})


def _latent(proof: Proof) -> dict[str, Family]:
    return _families("latent and rope", latent.latent_and_rope, {"plain": proof, "fp8": REFERENCE})


_CELLS = _families(
    "values and scales in a cell",
    attention.cells,
    dict.fromkeys(("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"), KERNEL),
)
_SLOTS = {"plain slots": KERNEL, "fp8 slots": KERNEL}
_PACKED_LATENT = _families(
    "latent, scales and rope in a cell", latent.latent_cells, {"fp8_ds_mla": REFERENCE, "nvfp4_ds_mla": REFERENCE}
)
_NVFP4 = _families("values, then scales, of K and of V", attention.nvfp4_pages, {"nvfp4": REFERENCE})
_V4_LATENT = {
    **_families("rows, then scales", latent.v4_pages, {"fp8_ds_mla": KERNEL}),
    **_families("rows", latent.latent_rows, {"plain": REFERENCE}),
}

BACKENDS: Mapping[str, Mapping[str, Family]] = {
    # K and V of each head.
    f"{_V1}.triton_attn.TritonAttentionBackend": {**_packed(KERNEL), **_CELLS},
    f"{_V1}.triton_attn_diffkv.TritonAttentionDiffKVBackend": _packed(KERNEL),
    f"{_V1}.flash_attn.FlashAttentionBackend": _packed(PORT),
    f"{_V1}.flash_attn_diffkv.FlashAttentionDiffKVBackend": _packed(KERNEL),
    f"{_V1}.triton_flash_attn.TritonFlashAttentionBackend": _packed(PORT),
    f"{_V1}.flashinfer.FlashInferBackend": {**_packed(REFERENCE), **_NVFP4},
    f"{_V1}.triton_flashinfer.TritonFlashInferBackend": _packed(REFERENCE),
    f"{_V1}.flex_attention.FlexAttentionBackend": _packed(PORT),
    f"{_V1}.hpc_attn.HpcAttentionBackend": _packed(REFERENCE),
    f"{_V1}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend": _packed(REFERENCE),
    f"{_V1}.rocm_aiter_fa.AiterFlashAttentionBackend": {
        **_packed(REFERENCE),
        **_families("AITER's tiles of K and of V", attention.aiter_tiles, dict.fromkeys(_SLOTS, REFERENCE)),
    },
    f"{_V1}.rocm_attn.RocmAttentionBackend": _families("ROCm's tiles of K and of V", attention.rocm_tiles, _SLOTS),
    f"{_V1}.rocm_segmented_attn.RocmSegmentedAttentionBackend": _families(
        "slots of K and of V", attention.two_slots, _SLOTS
    ),
    f"{_V1}.b12x.B12xPagedAttentionBackend": _families(
        "slots of K and of V", attention.two_slots, dict.fromkeys(_SLOTS, PORT)
    ),
    f"{_V1}.cpu_attn.CPUAttentionBackend": _families(
        "pages of the CPU's kernel", attention.cpu_pages, {"plain": KERNEL, "fp8": REFERENCE}
    ),
    # A latent for all heads.
    f"{_V1}.mla.triton_mla.TritonMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.flashmla.FlashMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.flashattn_mla.FlashAttnMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.flashattn_mla.XPUFlashAttnMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.cutlass_mla.CutlassMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.flashinfer_mla.FlashInferMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.tokenspeed_mla.TokenspeedMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.rocm_aiter_mla.AiterMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.aiter_triton_mla.AiterTritonMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.cpu_mla.CPUMLABackend": _latent(KERNEL),
    f"{_V1}.mla.amx_mla.AMXMLABackend": _latent(REFERENCE),
    f"{_V1}.mla.flashmla_sparse.FlashMLASparseBackend": {**_latent(REFERENCE), **_PACKED_LATENT},
    f"{_V1}.mla.flashattn_mla_sparse.FlashAttnMLASparseBackend": _latent(REFERENCE),
    f"{_V1}.mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend": _latent(REFERENCE),
    f"{_V1}.mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend": {**_latent(REFERENCE), **_PACKED_LATENT},
    f"{_V1}.mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend": _latent(REFERENCE),
    f"{_V1}.mla.rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend": _latent(REFERENCE),
    f"{_V1}.mla.xpu_mla_sparse.XPUMLASparseBackend": _latent(REFERENCE),
    f"{_V1}.mla.indexer.DeepseekV32IndexerBackend": _families("keys, then scales", latent.index_pages, {"plain": PORT}),
    # DeepSeek V4.
    f"{_V1}.mla.indexer.DeepseekV4IndexerBackend": _families("keys, then scales", latent.index_pages, {"plain": PORT}),
    f"{_V1}.mla.sparse_swa.DeepseekSparseSWABackend": _V4_LATENT,
    f"{_V4}.nvidia.flashmla.DeepseekSparseSWAFlashMLABackend": _V4_LATENT,
    f"{_V4}.nvidia.flashinfer_sparse.DeepseekSparseSWAFlashInferBackend": _V4_LATENT,
    f"{_V4}.sparse_mla.DeepseekV4FlashMLABackend": _V4_LATENT,
    f"{_V4}.nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": _V4_LATENT,
    f"{_V4}.amd.rocm.DeepseekV4ROCMAiterMLASparseBackend": _V4_LATENT,
    f"{_V4}.xpu.xpu_sparse.DeepseekV4XPUSparseBackend": _V4_LATENT,
    f"{_V4}.compressor.CompressorBackend": _families("rows", latent.compressor_rows, {"plain": REFERENCE}),
}
