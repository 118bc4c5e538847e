"""Hooks in SGLang's loop, by which prefill answers questions: what rank 0 decides goes to all ranks with SGLang's
requests, and pages that are held for answers keep SGLang from emptying its cache."""

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
"""SGLang's methods that are hooked."""

_answering: list[Any] = []
"""The `Answers` of this process: one, once its scheduler is made, if it is one of prefill with the backend."""
_wakers: list[Waker] = []
"""On rank 0, if its scheduler sleeps."""


def answer_questions(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    """Make a scheduler of prefill answer questions, if all hooks are installed."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if queue is None or queue.transfer_backend.value != BACKEND or not all(map(_hooked, (SENDS_TO_RANKS, IS_IDLE))):
        return
    from sglang.utils import TypeBasedDispatcher

    from kvferry.integrations.sglang.answers import Answers, Step

    answers = Answers(scheduler, queue.kv_manager)
    scheduler._request_dispatcher += TypeBasedDispatcher([(Step, answers.run)])
    _answering[:] = [answers]
    poller = getattr(scheduler.idle_sleeper, "poller", None)
    if queue.kv_manager.leader and poller is not None:
        _wakers[:] = [Waker(poller)]
        queue.kv_manager.port.on_question(_wakers[0].wake)


def send_along(receiver: Any, received: list[Any] | None, *more: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """Add the next step to what rank 0 has received, before it goes to all ranks."""
    if _answering and received is not None:
        for waker in _wakers:
            waker.clear()
        step = _answering[0].next_step()
        received = received if step is None else [*received, step]
    return (receiver, received, *more), named


def is_idle(idle: bool, _: Any, for_health_check: bool = False, **__: Any) -> bool:
    """Return whether SGLang may empty its cache: not while pages are held. A health check asks whether it computes."""
    return idle and (for_health_check or not (_answering and _answering[0].holding))


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
