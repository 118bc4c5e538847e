"""vLLM's latent attention and its indexers, the same on every rank."""

from __future__ import annotations

from dataclasses import replace

from kvferry._arguments import integer
from kvferry.errors import BadGeometry
from kvferry.geometry.formats.parts import Layers, latent_parts
from kvferry.geometry.formats.vllm_attention import vllm_cells
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import PLAIN, Holding, Part, named_tensors, planes_of_tensor, view_of

FP8_DS_BYTES = 656


def vllm_mla(kv_caches: Layers, group: Group, latent_dim: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's latent attention: latent and rope side by side for each token, the same on every rank.

    Args:
        kv_caches: by layer, ``[blocks, tokens, latent_dim + rope_dim]`` or, since 0.32, ``[blocks, 1, tokens, …]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        latent_dim: kv_lora_rank of the model.

    Source: vllm-project/vllm, ``concat_and_cache_mla_kernel`` in csrc/cache_kernels.cu (kv_cache is ``[num_blocks,
    block_size, kv_lora_rank + pe_dim]``); ``create_kv_cache_views`` in vllm/v1/kv_cache_interface.py, 0.32.0.
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = view_of(tensor)
        axes = ("block", "token", "content") if len(view.shape) == 3 else ("block", "head", "token", "content")
        found += planes_of_tensor(view, axes, group, layer, latent_parts(layer, view.shape[-1], latent_dim), holding)
    return tuple(found)


def vllm_mla_fp8_ds(kv_caches: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's ``fp8_ds_mla`` cache of DeepSeek V3.2: quantised latent, its scales and rope in 656 bytes of each token.

    One component ``kv`` of a format of its own, since parts of it mean nothing alone; divisible by token. DeepSeek V4
    has pages of another order under the same name (`vllm_mla_pages`).

    Args:
        kv_caches: by layer, ``uint8 [blocks, tokens, 656]`` or ``[blocks, 1, tokens, 656]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.

    Raises:
        BadGeometry: rows of another width.

    Source: vllm-project/vllm, ``concat_and_cache_ds_mla_kernel`` in csrc/cache_kernels.cu: 512 bytes of fp8, 4 float32
    scales, 64 bfloat16.
    """
    for layer, tensor in named_tensors(kv_caches).items():
        view = view_of(tensor)
        if view.tail_bytes(len(view.shape) - 1) != FP8_DS_BYTES:
            raise BadGeometry(f"layer {layer}", f"rows of {FP8_DS_BYTES} bytes are expected of {view.described}")
    return vllm_cells(kv_caches, group, "vllm-fp8-ds-mla", holding)


def vllm_mla_pages(
    kv_caches: Layers, group: Group, row_bytes: int, format: str, holding: Holding | None = None
) -> tuple[Plane, ...]:
    """vLLM's packed latent cache of DeepSeek V4: in each page the rows of all states, then their scales.

    Two components, ``kv`` (quantised latent and rope of a state) and ``kv_scale``, each divisible by state.

    Args:
        kv_caches: by layer, ``uint8 [blocks, 1, states, row_bytes + scale bytes]``. The shape is only a size: inside a
            page the bytes are ``[states · row_bytes | states · scale bytes]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        row_bytes: bytes of a state without its scales: 576 in V4.
        format: name of what is in a row and its scales.

    Source: vllm-project/vllm 0.32.0, ``quantize_and_insert_k_kernel`` in
    vllm/models/deepseek_v4/common/ops/cache_utils.py: 448 bytes of fp8 and 64 bfloat16, then 8 bytes of scales for each
    state.
    """
    parts = (Part("kv", format=format), Part("kv_scale", format=format))
    return _rows_then_scales(kv_caches, group, row_bytes, parts, holding)


def vllm_indexer(
    kv_caches: Layers,
    group: Group,
    index_dim: int,
    holding: Holding | None = None,
    *,
    format: str = PLAIN,
    token_granule: int = 1,
) -> tuple[Plane, ...]:
    """vLLM's sparse-attention indexer cache: in each page the keys of all tokens, then their scales.

    Two components, ``index`` and ``index_scale``. Scales are in natural order and divisible by token, and so are
    keys on CUDA; on ROCm keys are in tiles of 16 tokens.

    Args:
        kv_caches: by layer, ``uint8 [blocks, tokens, index_dim + scale bytes]`` or ``[blocks, 1, tokens, …]``. The
            shape is only a size: inside a page the bytes are ``[tokens · index_dim | tokens · scale bytes]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        index_dim: bytes of a token's key.
        format, token_granule: of the keys.

    Source: vllm-project/vllm, ``indexer_k_quant_and_cache_kernel`` in csrc/cache_kernels.cu: per block the fp8 values
    of all tokens, followed by one float32 scale for each token and 128 values; for ROCm
    ``_indexer_k_quant_and_cache_kernel`` in vllm/v1/attention/ops/rocm_aiter_mla_sparse.py, 0.32.0.
    """
    parts = (Part("index", format=format, token_granule=token_granule), Part("index_scale"))
    return _rows_then_scales(kv_caches, group, integer("index_dim", index_dim), parts, holding)


def _rows_then_scales(
    kv_caches: Layers, group: Group, row_bytes: int, parts: tuple[Part, Part], holding: Holding | None
) -> tuple[Plane, ...]:
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = view_of(tensor)
        tokens, width = view.shape[-2:]
        if view.itemsize != 1 or len(view.shape) not in (3, 4) or not 0 < row_bytes < width:
            raise BadGeometry(f"layer {layer}", f"rows of {row_bytes} bytes and scales in {view.described}")
        page = view.merge_tail(1, (tokens * width,))
        for part, begin, size in ((parts[0], 0, row_bytes), (parts[1], tokens * row_bytes, width - row_bytes)):
            rows = replace(
                page,
                address=page.address + begin,
                shape=(page.shape[0], tokens, size),
                strides=(page.strides[0], size, 1),
            )
            found += planes_of_tensor(rows, ("block", "token", "content"), group, layer, (part,), holding)
    return tuple(found)
