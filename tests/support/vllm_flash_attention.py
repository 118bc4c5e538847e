"""vLLM's FlashAttention backend on CPU: its specs, cache layout, metadata and code; its two CUDA kernels are
written in torch.

vLLM's attention on CPUs keeps K column-major inside a page, which no other engine reads. This one keeps K and V as
vLLM's backends for GPUs do. vLLM loads `register` as a plug-in, in each of its processes; `environment` says where.
"""

from __future__ import annotations

from typing import Any

from tests.support.vllm_engines import plugged

BACKEND = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"


def environment() -> dict[str, str]:
    """What an engine's environment has beside the usual one."""
    return plugged("vllm.general_plugins", __name__)


def register() -> None:
    """Let vLLM choose FlashAttention on CPUs. Idempotent."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import flash_attn

    kernels: Any = flash_attn
    # vLLM asks the device for the version, and has none of these on a CPU.
    kernels.get_flash_attn_version = lambda *_, **__: 2
    kernels.flash_attn_varlen_func = attend
    kernels.reshape_and_cache_flash = write
    platform: Any = CpuPlatform
    platform.get_attn_backend_cls = classmethod(lambda cls, *_, **__: BACKEND)


def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *_: Any) -> None:
    """Write K and V of tokens, ``[tokens, heads, size]``, into caches, ``[blocks, tokens, heads, size]``."""
    used = slots >= 0
    blocks, places = slots[used] // key_cache.shape[1], slots[used] % key_cache.shape[1]
    key_cache[blocks, places] = key[: len(slots)][used]
    value_cache[blocks, places] = value[: len(slots)][used]


def attend(
    *,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    seqused_k: Any,
    block_table: Any,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None,
    softcap: float,
    alibi_slopes: Any,
    s_aux: Any,
    **_: Any,
) -> None:
    """Attention of each request's last tokens to all of its tokens, whose K and V are in the caches."""
    import torch

    if not causal or softcap or alibi_slopes is not None or s_aux is not None or (window_size or [-1, -1]) != [-1, -1]:
        raise NotImplementedError("only causal attention to all tokens is played here")
    for index, length in enumerate(seqused_k.tolist()):
        begin, end = cu_seqlens_q[index : index + 2].tolist()
        blocks = block_table[index, : -(-length // k.shape[1])].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k, v))
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        out[begin:end] = torch.nn.functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1), keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        ).transpose(0, 1)
