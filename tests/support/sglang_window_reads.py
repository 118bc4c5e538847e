"""SGLang's `torch_native` attention, which computes models with windows right.

In 0.5.23 it writes K and V of windows where their own pool has them, and reads them where full attention's pool would:
right only as long as both pools happen to give a request the same slots. This hands it the slots of the windows' pool.
SGLang loads `register` as a plug-in, in each of its processes; `environment` says where.
"""

from __future__ import annotations

from typing import Any

from tests.support.vllm_engines import plugged

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def environment() -> dict[str, str]:
    """What an instance's environment has beside the usual one."""
    return plugged("sglang.srt.plugins", __name__)


def register() -> None:
    """Let `torch_native` read windows where they are."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for step in ("extend", "decode"):
        HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_{step}", _attend, HookType.AROUND)


def _attend(
    attend: Any,
    backend: Any,
    query: Any,
    output: Any,
    keys: Any,
    values: Any,
    slots: Any,
    requests: Any,
    *more: Any,
    **named: Any,
) -> Any:
    pool = backend.token_to_kv_pool
    if any(keys.data_ptr() == buffer.data_ptr() for buffer in pool.swa_kv_pool.k_buffer):
        slots = slots.clone()
        slots[requests] = pool.translate_loc_from_full_to_swa(slots[requests].long()).to(slots.dtype)
    return attend(backend, query, output, keys, values, slots, requests, *more, **named)
