"""Repeats calls to node servers, and logs long waits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvferry._control.backoff import Backoff
from kvferry._control.connection import CALL_TIMEOUT, SILENCE
from kvferry._logs import Log
from kvferry.errors import KvferryError, Unreachable

logger = Log(__name__)

Answer = TypeVar("Answer")


async def retrying(
    call: Callable[[float], Awaitable[Answer]], deadline: float, most: float = CALL_TIMEOUT, *, what: str = ""
) -> Answer:
    """Repeat a call, which gets the seconds that it may take, at most `most`, while its error is retryable. After the
    `deadline` on the loop's clock, the last error is raised.

    `what` is the subject of one warning if the wait is longer than `SILENCE`. If it is empty, one warning is logged for
    an error that persists after `SILENCE`; `Control` itself warns of an unreachable node server.
    """
    loop = asyncio.get_running_loop()
    backoff, reason = Backoff(jitter=0.5), "there is no answer yet"
    silent_until = loop.time() + SILENCE
    warning = loop.call_later(SILENCE, lambda: logger.warning("still waiting for %s: %s", what, reason))
    if not what:
        warning.cancel()
    try:
        while True:
            left = deadline - loop.time()
            try:
                return await call(max(0.001, min(most, left)))
            except KvferryError as error:
                pause = backoff.next(error.retry_after)
                if not error.retryable or loop.time() + pause >= deadline:
                    raise
                reason = error.message
                if not what and not isinstance(error, Unreachable) and loop.time() >= silent_until:
                    logger.warning("still failing after %.0f s: %s", SILENCE, error.message)
                    silent_until = math.inf
            await asyncio.sleep(pause)
    finally:
        warning.cancel()
