"""Threads that may not be to be had: what the system refuses is a typed error."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.errors import LimitReached

RETRY_AFTER = 1.0
"""Seconds after which it is worth asking the system again."""


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread.

    Raises:
        LimitReached: the system gives no more threads.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise no_thread(f"thread {name!r}") from None
    return thread


def no_thread(what: str) -> LimitReached:
    """The error for what could not be started."""
    running = threading.active_count()
    message = f"{what} could not be started beside {running} threads"
    return LimitReached(message, retry_after=RETRY_AFTER, limit="threads", value=running)
