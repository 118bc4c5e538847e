"""Hooks in SGLang's loop, by which prefill gives and takes prefixes: what rank 0 decides goes to all ranks with
requests, and pages that are held keep SGLang from emptying its cache."""

from __future__ import annotations

import os
import pkgutil
import select
from contextlib import suppress
from typing import Any

from kvferry.integrations.sglang.hooks import BACKEND

MAKES_HANDLERS = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
SENDS_TO_RANKS = (
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)
IS_IDLE = "sglang.srt.managers.scheduler.Scheduler.is_fully_idle"
UNLOADS = "sglang.srt.managers.scheduler.Scheduler.unload_lora_adapter"
"""SGLang's methods that are hooked."""

READ = "tree_cache", "token_to_kv_pool_allocator", "result_queue", "chunked_req", "_engine_paused"
"""What is read of SGLang's scheduler beside its queue of prefill."""

_parts: list[Any] = []
"""The `RadixAnswers` and `RadixLoads` of this process, once its scheduler is made; none but in prefill."""
_wakers: list[Waker] = []
"""On rank 0, if its scheduler sleeps."""


def exchange_prefixes(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    """Make a scheduler of prefill answer questions, and ask some, if this version of SGLang has what that needs."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if queue is None or queue.transfer_backend.value != BACKEND:
        return
    if not all(map(_hooked, (SENDS_TO_RANKS, IS_IDLE, UNLOADS))) or not all(hasattr(scheduler, name) for name in READ):
        return
    from sglang.utils import TypeBasedDispatcher

    from kvferry.integrations.sglang.answers import AnswerStep, RadixAnswers
    from kvferry.integrations.sglang.loads import LoadStep, RadixLoads

    manager = queue.kv_manager
    answers = RadixAnswers(scheduler, manager)
    _parts[:] = [answers]
    handlers: list[tuple[type, Any]] = [(AnswerStep, answers.run)]
    if RadixLoads.possible(scheduler, manager):
        manager.loads = RadixLoads(scheduler, manager)
        _parts.append(manager.loads)
        handlers.append((LoadStep, manager.loads.run))
    scheduler._request_dispatcher += TypeBasedDispatcher(handlers)
    poller = getattr(scheduler.idle_sleeper, "poller", None)
    if manager.leader and poller is not None:
        _wakers[:] = [Waker(poller)]
        manager.port.on_question(_wakers[0].wake)


def send_along(receiver: Any, received: list[Any] | None, *more: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """Add the next steps to what rank 0 has received, before it goes to all ranks."""
    if received is not None:
        for waker in _wakers:
            waker.clear()
        steps = (part.next_step() for part in _parts)
        received = [*received, *(step for step in steps if step is not None)]
    return (receiver, received, *more), named


def is_idle(idle: bool, _: Any, for_health_check: bool = False, **__: Any) -> bool:
    """Return whether SGLang may empty its cache: not while pages are held. A health check asks whether it computes."""
    return idle and (for_health_check or not any(part.holding for part in _parts))


def forget_adapter(_: Any, scheduler: Any, asked: Any, *__: Any, **___: Any) -> None:
    """Do not look up prompts of a LoRA adapter that was unloaded: another one may be loaded under its name, while the
    cache still has what the first has computed."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if queue is not None and queue.transfer_backend.value == BACKEND:
        queue.kv_manager.adapters.pop(asked.lora_name, None)


def _hooked(name: str) -> bool:
    """Return whether a hook is installed on a method; SGLang only logs if it is not."""
    owner, _, method = name.rpartition(".")
    return hasattr(getattr(pkgutil.resolve_name(owner), method, None), "__wrapped__")


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
