"""Planes of the engines people use, from the tensors they have.

Each function names the public source of its byte order: repository, file, function, version. Where the bytes of a
unit and token are in natural order the format is ``plain``, whatever the layout around them, so that engines of
different layouts, block sizes and even makes can read from each other. Where a kernel permutes inside a page the
format has a name of its own and a page moves whole.

Layer names are compared verbatim: both engines of a read must use the same.
"""

from __future__ import annotations

from kvferry.geometry.formats.parts import Layers as Layers
from kvferry.geometry.formats.pools import sglang_mha as sglang_mha
from kvferry.geometry.formats.pools import sglang_mla as sglang_mla
from kvferry.geometry.formats.pools import trtllm_pool as trtllm_pool
from kvferry.geometry.formats.vllm import vllm_attention as vllm_attention
from kvferry.geometry.formats.vllm import vllm_cells as vllm_cells
from kvferry.geometry.formats.vllm import vllm_cpu as vllm_cpu
from kvferry.geometry.formats.vllm import vllm_indexer as vllm_indexer
from kvferry.geometry.formats.vllm import vllm_mla as vllm_mla
from kvferry.geometry.formats.vllm import vllm_mla_fp8_ds as vllm_mla_fp8_ds
from kvferry.geometry.formats.vllm import vllm_mla_pages as vllm_mla_pages
from kvferry.geometry.formats.vllm import vllm_nvfp4 as vllm_nvfp4
from kvferry.geometry.formats.vllm import vllm_tiles as vllm_tiles
from kvferry.geometry.formats.vllm import vllm_two_slots as vllm_two_slots
from kvferry.geometry.tensors import OPAQUE as OPAQUE
from kvferry.geometry.tensors import PLAIN as PLAIN
