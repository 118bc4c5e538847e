"""What the tests must know of the version of vLLM that they run with: 0.31 to 0.33."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

MINOR = int(version("vllm").split(".")[1])

_V1 = "vllm.v1.attention.backends"

MISSING_BACKENDS: Set[str] = (
    {f"{_V1}.rocm_segmented_attn.RocmSegmentedAttentionBackend", f"{_V1}.mla.flashattn_mla.XPUFlashAttnMLABackend"}
    if MINOR < 32
    else set()
)
"""Backends that kvferry knows and this version does not have yet."""

MISSING_MEMBERS: Set[str] = {"ULTRAQUANT"} if MINOR < 32 else set()
"""Members of the registry of backends that this version does not have yet."""


def convolves_float32() -> bool:
    """Whether the convolutions of Mamba take float32 here. On CPUs with AVX-512 for bfloat16, those of vLLM 0.31 and
    older take nothing else, and end with the engine ("causal_conv1d_fwd_kernel_impl" not implemented for 'Float')."""
    import torch

    return MINOR >= 32 or not torch.cpu._is_avx512_bf16_supported()


def planned_caches(config: Any, specs: Sequence[Mapping[str, Any]], memory: list[int]) -> Any:
    """vLLM's plan of each worker's caches, of the specs of its layers and its memory in bytes."""
    try:
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    except ModuleNotFoundError:
        # vLLM 0.32 and older.
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(config, specs, memory)
    return get_kv_cache_configs(config, specs, memory, get_global_kv_cache_groups(config, specs))


@contextmanager
def aiter() -> Iterator[None]:
    """vLLM 0.31 and older import AITER, which is for ROCm, where the module is imported, and later ones where it is
    used. What the tests run of it needs no AITER."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".ops", ".ops.triton", ".ops.triton.gluon", ".ops.triton.gluon.pa_decode_gluon"):
            patch.setitem(sys.modules, f"aiter{name}", MagicMock())
        yield


OTHER = os.environ.get("KVFERRY_OTHER_VLLM", "")
"""The folder of an environment with another version of vLLM; empty: none."""


def other_vllm() -> tuple[str, str]:
    """The interpreter of `OTHER`, and its version of vLLM."""
    python = Path(OTHER).absolute() / "bin" / "python"
    asked = "from importlib.metadata import version; print(version('vllm'))"
    told = subprocess.run([str(python), "-c", asked], check=True, capture_output=True, text=True)
    return str(python), told.stdout.strip()
