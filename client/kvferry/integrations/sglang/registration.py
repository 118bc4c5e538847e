"""Makes the backend known to SGLang by its name, and hooks its methods. Imports SGLang only when SGLang calls.

SGLang calls `register` in each of its processes, before it parses its arguments, by the entry point ``kvferry`` of the
group ``sglang.srt.plugins`` (sglang/srt/plugins/__init__.py, `load_plugins`; 0.5.23). If ``SGLANG_PLUGINS`` is set, it
must name ``kvferry``. SGLang's backends are an enumeration and a function that returns five classes for each. SGLang
has no registry of further backends, so this module extends both.

The hooks:

- Decode holds the pages of failed requests until they are quiet (R4).
- Senders and receivers receive the prompts of their requests, for which SGLang passes only pages.
- Prefill gives and takes prefixes: what rank 0 decides goes to all ranks with requests, and pages that are held keep
  SGLang from emptying its cache.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import pkgutil
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import Prompt, PromptInput

logger = logging.getLogger(__name__)

BACKEND = "kvferry"
"""The backend's name for ``--disaggregation-transfer-backend``."""

MAKES_SENDERS = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
MAKES_RECEIVERS = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
MAKES_HANDLERS = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
SENDS_TO_RANKS = (
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)
IS_IDLE = "sglang.srt.managers.scheduler.Scheduler.is_fully_idle"
UNLOADS = "sglang.srt.managers.scheduler.Scheduler.unload_lora_adapter"
"""SGLang's methods that are hooked."""

_WORD = 2**32

_queues_that_hold: list[str] = []
"""Names of the classes of decode's queues in this process that hold pages until they are quiet."""
parts: list[Any] = []
"""The `RadixAnswers` and `RadixLoads` of this process, once its scheduler is made; none but in prefill."""
wakers: list[Waker] = []
"""On rank 0, if its scheduler sleeps."""

_UTILS = "sglang.srt.disaggregation.utils"


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
    queue = "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__"
    resolve = "sglang.srt.mem_cache.kv_cache_builder.resolve_decode_retraction_backup"
    for method, hook, when in (
        (f"{_UTILS}.get_kv_class", _get_kv_class, HookType.AROUND),
        (f"{_UTILS}.setup_state_kv_args", _keep_pools, HookType.BEFORE),
        (queue, hold_until_quiet, HookType.AFTER),
        (MAKES_SENDERS, tell_sender, HookType.AFTER),
        (MAKES_RECEIVERS, tell_receiver, HookType.AFTER),
        (resolve, _retract_without_a_device, HookType.BEFORE),
        (MAKES_HANDLERS, exchange_prefixes, HookType.AFTER),
        (SENDS_TO_RANKS, send_along, HookType.BEFORE),
        (IS_IDLE, is_idle, HookType.AFTER),
        (UNLOADS, forget_adapter, HookType.AFTER),
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
    from kvferry.integrations.sglang.receiver import KvferryReceiver
    from kvferry.integrations.sglang.sender import KvferrySender

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
    if not all(map(is_hooked, (SENDS_TO_RANKS, IS_IDLE, UNLOADS))):
        return
    from sglang.utils import TypeBasedDispatcher

    from kvferry.integrations.sglang.answers import AnswerStep, RadixAnswers
    from kvferry.integrations.sglang.loads import LoadStep, RadixLoads

    manager = queue.kv_manager
    answers = RadixAnswers(scheduler, manager)
    parts[:] = [answers]
    handlers: list[tuple[type, Any]] = [(AnswerStep, answers.run)]
    if RadixLoads.possible(scheduler, manager):
        manager.loads = RadixLoads(scheduler, manager)
        parts.append(manager.loads)
        handlers.append((LoadStep, manager.loads.run))
    scheduler._request_dispatcher += TypeBasedDispatcher(handlers)
    poller = getattr(scheduler.idle_sleeper, "poller", None)
    if manager.leader and poller is not None:
        wakers[:] = [Waker(poller)]
        manager.port.on_question(wakers[0].wake)


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


def hold_until_quiet(_: None, queue: Any, *__: Any, **___: Any) -> None:
    """Make SGLang hold the pages of failed requests until the backend frees them, instead of for a fixed time."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_transfer_backend == BACKEND:
        queue.enable_deferred_kv_release = True
        queue.deferred_kv_release_timeout = math.inf
        if hasattr(queue, "resolve_deferred_releases"):
            _queues_that_hold.append(type(queue).__name__)


def holds_until_quiet() -> bool:
    """Return whether decode in this process holds the pages of failed requests. If a hook fails, e.g. in a version
    without the queue, SGLang only writes a log line."""
    return bool(_queues_that_hold)


def tell_sender(made: bool, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Give a new sender the id and the prompt of its request, and the manager the request."""
    expect = getattr(request.disagg_kv_sender, "expect_prompt", None) if made else None
    if expect is not None:
        prompt = prompt_of(request, queue.scheduler)
        manager = request.disagg_kv_sender.kv_mgr
        manager.see(request, prompt.adapter)
        expect(request.rid, prompt, 0 if manager.loads is None else manager.loads.want(request, prompt))


def tell_receiver(decode_request: Any, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Give a new receiver the id, the number of tokens and the prompt of its request."""
    expect = getattr(decode_request.kv_receiver, "expect_prompt", None)
    if expect is not None:
        expect(request.rid, len(request.origin_input_ids), prompt_of(request, queue.scheduler))


def is_hooked(name: str) -> bool:
    """Return whether the hooks of a method are installed. If they cannot be, e.g. in a version without the method,
    SGLang only writes a log line."""
    owner, _, method = name.rpartition(".")
    # SGLang installs all hooks of a method at once, as one chain of wrappers, or none.
    return hasattr(getattr(pkgutil.resolve_name(owner), method, None), "__wrapped__")


def prompt_of(request: Any, scheduler: Any) -> Prompt:
    """Return the prompt of SGLang's request; unknown for embeddings, whose token ids are placeholders.

    SGLang identifies a LoRA adapter by an id that each instance may choose; the scheduler has a table of names for KV
    events.
    """
    if request.input_embeds is not None or request.positional_embed_overrides is not None:
        return Prompt.unknown
    adapter = ""
    if request.lora_id is not None:
        adapter = scheduler.kv_event_lora_names.resolve(request.lora_id) or ""
        if not adapter:
            return Prompt.unknown
    ids = np.asarray(request.origin_input_ids, np.int64)
    inputs = (ids < 0) | (ids >= _WORD)
    return Prompt(np.where(inputs, 0, ids), adapter=adapter, inputs=_inputs(ids, inputs))


def _inputs(ids: npt.NDArray[np.int64], inputs: npt.NDArray[np.bool_]) -> list[PromptInput]:
    """Return the images and other inputs of a prompt. In place of their tokens SGLang writes hashes of the content, of
    62 bits, which are not token ids."""
    if not inputs.any():
        return []
    from sglang.srt.environ import envs

    # Without hashes, SGLang draws random numbers for each request.
    hashed = not envs.SGLANG_MM_SKIP_COMPUTE_HASH.get()
    found = []
    for begin, end in np.flatnonzero(np.diff(inputs, prepend=False, append=False)).reshape(-1, 2).tolist():
        content = hashlib.sha256(ids[begin:end].astype("<i8").tobytes())
        found.append(PromptInput(begin, end - begin, content.hexdigest() if hashed else ""))
    return found


def send_along(receiver: Any, received: list[Any] | None, *more: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """Add the next steps to what rank 0 has received, before it goes to all ranks."""
    if received is not None:
        for waker in wakers:
            waker.clear()
        steps = (part.next_step() for part in parts)
        received = [*received, *(step for step in steps if step is not None)]
    return (receiver, received, *more), named


def is_idle(idle: bool, _: Any, for_health_check: bool = False, **__: Any) -> bool:
    """Return whether SGLang may empty its cache: not while pages are held. A health check asks whether it computes."""
    return idle and (for_health_check or not any(part.holding for part in parts))


def forget_adapter(_: Any, scheduler: Any, asked: Any, *__: Any, **___: Any) -> None:
    """Do not look up prompts of a LoRA adapter that was unloaded: another one may be loaded under its name, while the
    cache still has what the first has computed."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if queue is not None and queue.transfer_backend.value == BACKEND:
        queue.kv_manager.adapters.pop(asked.lora_name, None)


class Waker:
    """Wakes SGLang's scheduler where it sleeps until it receives something (``--sleep-on-idle``).

    `poller` is that of its sleep (``IdleSleeper`` in sglang/srt/managers/scheduler_components/idle_sleeper.py; 0.5.23).
    """

    def __init__(self, poller: Any) -> None:
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        poller.register(self._file, select.POLLIN)

    def wake(self) -> None:
        """Wake the scheduler, from any thread."""
        self._woken = True
        os.eventfd_write(self._file, 1)

    def clear(self) -> None:
        """Let the scheduler sleep again. What it was woken for is done next."""
        if self._woken:
            self._woken = False
            with suppress(BlockingIOError):
                os.eventfd_read(self._file)
