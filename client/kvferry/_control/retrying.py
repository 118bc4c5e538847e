"""Repeats calls to node servers, and says what is waited for."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.connection import CALL_TIMEOUT, SILENCE
from kvferry.errors import KvferryError, Unreachable

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def retrying(
    call: Callable[[float], Answer],
    deadline: float,
    wait: Callable[[float], object] = time.sleep,
    most: float = CALL_TIMEOUT,
    *,
    what: str = "",
) -> Answer:
    """Repeat a call while its error is retryable.

    Args:
        call: called with the seconds that it may take.
        deadline: time on `kvferry._clock` after which the last error is raised.
        wait: waits between attempts, e.g. an event's `wait`.
        most: most seconds for one call.
        what: what is being waited for. If given, one warning names it when it takes longer than `SILENCE`. If not, one
            warning is logged for an error that persists after `SILENCE`; `Control` itself warns of an unreachable node
            server.
    """
    backoff = Backoff(jitter=0.5)
    silent_until = now() + SILENCE
    with announced(what) as waiting:
        while True:
            left = deadline - now()
            try:
                return call(max(0.001, min(most, left)))
            except KvferryError as error:
                pause = backoff.next(error.retry_after)
                if not error.retryable or now() + pause >= deadline:
                    raise
                waiting.reason = error.message
                if not what and not isinstance(error, Unreachable) and now() >= silent_until:
                    logger.warning("still failing after %.0f s: %s", SILENCE, error.message)
                    silent_until = math.inf
            wait(pause)


class _Waiting:
    """A wait, and the warning about it.

    Attributes:
        reason: message of the last error; empty: there was no answer yet.
    """

    def __init__(self, what: str) -> None:
        self.reason = ""
        self._what = what

    def warn(self) -> None:
        """Log the warning."""
        logger.warning("still waiting for %s: %s", self._what, self.reason or "there is no answer yet")


@contextmanager
def announced(what: str) -> Iterator[_Waiting]:
    """Warn once if the ``with`` block takes longer than `SILENCE`; never if `what` is empty."""
    waiting = _Waiting(what)
    timer = threading.Timer(SILENCE, waiting.warn)
    timer.daemon = True
    if what:
        # Without a thread for the timer there is no warning; that is no reason to fail.
        with suppress(RuntimeError):
            timer.start()
    try:
        yield waiting
    finally:
        timer.cancel()
