"""Planes of the engines people use, from the tensors they have.

Each function names the public source of its byte order: repository, file, function, version. Where the bytes of a
unit and token are in natural order the format is ``plain``, whatever the layout around them, so that engines of
different layouts, block sizes and even makes can read from each other. Where a kernel permutes inside a page the
format has a name of its own and a page moves whole.

Layer names are compared verbatim: both engines of a read must use the same.
"""

from __future__ import annotations

from kvferry.geometry.formats.parts import Layers
from kvferry.geometry.formats.sglang import sglang_mha, sglang_mla
from kvferry.geometry.formats.trtllm import trtllm_pool
from kvferry.geometry.formats.vllm_attention import (
    vllm_attention,
    vllm_cells,
    vllm_nvfp4,
    vllm_tiles,
    vllm_two_slots,
)
from kvferry.geometry.formats.vllm_cpu import vllm_cpu
from kvferry.geometry.formats.vllm_latent import vllm_indexer, vllm_mla, vllm_mla_fp8_ds, vllm_mla_pages
from kvferry.geometry.tensors import OPAQUE, PLAIN

__all__ = [
    "OPAQUE",
    "PLAIN",
    "Layers",
    "sglang_mha",
    "sglang_mla",
    "trtllm_pool",
    "vllm_attention",
    "vllm_cells",
    "vllm_cpu",
    "vllm_indexer",
    "vllm_mla",
    "vllm_mla_fp8_ds",
    "vllm_mla_pages",
    "vllm_nvfp4",
    "vllm_tiles",
    "vllm_two_slots",
]
