"""Makes the backend known to SGLang by its name. Imports SGLang only when SGLang calls.

SGLang calls `register` in each of its processes, before it parses its arguments, by the entry point ``kvferry`` of the
group ``sglang.srt.plugins`` (sglang/srt/plugins/__init__.py, `load_plugins`; 0.5.23). If ``SGLANG_PLUGINS`` is set, it
must name ``kvferry``. SGLang's backends are an enumeration and a function that returns five classes for each. SGLang
has no registry of further backends, so this module extends both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvferry.integrations.sglang import hooks
from kvferry.integrations.sglang.hooks import BACKEND

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the backend to SGLang's. Idempotent."""
    try:
        from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
        from sglang.srt.disaggregation.utils import TransferBackend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        logger.warning("%s is not available in this version of SGLang: %s", BACKEND, error)
        return
    if BACKEND in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    DISAGG_TRANSFER_BACKEND_CHOICES.append(BACKEND)
    _add_member(TransferBackend)
    resolve = "sglang.srt.mem_cache.kv_cache_builder.resolve_decode_retraction_backup"
    for method, hook, when in (
        ("sglang.srt.disaggregation.utils.get_kv_class", _get_kv_class, HookType.AROUND),
        ("sglang.srt.disaggregation.utils.setup_state_kv_args", _keep_pools, HookType.BEFORE),
        ("sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__", hooks.hold_until_quiet, HookType.AFTER),
        (hooks.MAKES_SENDERS, hooks.tell_sender, HookType.AFTER),
        (hooks.MAKES_RECEIVERS, hooks.tell_receiver, HookType.AFTER),
        (resolve, _retract_without_a_device, HookType.BEFORE),
        (hooks.MAKES_HANDLERS, exchange_prefixes, HookType.AFTER),
        (hooks.SENDS_TO_RANKS, hooks.send_along, HookType.BEFORE),
        (hooks.IS_IDLE, hooks.is_idle, HookType.AFTER),
        (hooks.UNLOADS, hooks.forget_adapter, HookType.AFTER),
    ):
        HookRegistry.register(method, hook, when)


def _add_member(backends: Any) -> None:
    """Add a member to an enumeration, for which Python has no call. The class stays the same, because other modules
    have imported it."""
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    backends._member_names_.append(member._name_)
    backends._member_map_[member._name_] = member
    backends._value2member_map_[BACKEND] = member


def _get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Replaces SGLang's function: return the class of a backend's part."""
    if transfer_backend.value != BACKEND:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base import KVArgs

    from kvferry.integrations.sglang.bootstrap import KvferryBootstrapServer
    from kvferry.integrations.sglang.manager import KvferryManager
    from kvferry.integrations.sglang.requests import KvferryReceiver, KvferrySender

    classes = {
        "kvargs": KVArgs,
        "manager": KvferryManager,
        "sender": KvferrySender,
        "receiver": KvferryReceiver,
        "bootstrap_server": KvferryBootstrapServer,
    }
    return classes[class_type.value]


def _keep_pools(kv_args: Any, token_to_kv_pool: Any, draft_token_to_kv_pool: Any = None, *_: Any, **__: Any) -> None:
    """Add the pools to the arguments of the manager, which otherwise have only addresses."""
    kv_args.kvferry_pools = (token_to_kv_pool, draft_token_to_kv_pool)


def exchange_prefixes(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    """Make a scheduler of prefill answer questions, and ask some, if this version of SGLang has what that needs."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if queue is None or queue.transfer_backend.value != BACKEND:
        return
    if not all(map(hooks.is_hooked, (hooks.SENDS_TO_RANKS, hooks.IS_IDLE, hooks.UNLOADS))):
        return
    from sglang.utils import TypeBasedDispatcher

    from kvferry.integrations.sglang.answers import AnswerStep, RadixAnswers
    from kvferry.integrations.sglang.loads import LoadStep, RadixLoads

    manager = queue.kv_manager
    answers = RadixAnswers(scheduler, manager)
    hooks.parts[:] = [answers]
    handlers: list[tuple[type, Any]] = [(AnswerStep, answers.run)]
    if RadixLoads.possible(scheduler, manager):
        manager.loads = RadixLoads(scheduler, manager)
        hooks.parts.append(manager.loads)
        handlers.append((LoadStep, manager.loads.run))
    scheduler._request_dispatcher += TypeBasedDispatcher(handlers)
    poller = getattr(scheduler.idle_sleeper, "poller", None)
    if manager.leader and poller is not None:
        hooks.wakers[:] = [hooks.Waker(poller)]
        manager.port.on_question(hooks.wakers[0].wake)


def _retract_without_a_device(**_: Any) -> None:
    """Make decode keep retracted requests in tensors on machines without a device: SGLang's default is a pool in host
    memory, for which it calls ``cudaHostRegister``."""
    import torch
    from sglang.srt.runtime_context import get_context, get_disagg

    disagg = get_disagg()
    if disagg.disaggregation_transfer_backend != BACKEND or torch.accelerator.is_available():
        return
    if disagg.disaggregation_decode_retraction_backup is None:
        get_context().override("kvferry.sglang", disaggregation_decode_retraction_backup="cpu_tensor")
