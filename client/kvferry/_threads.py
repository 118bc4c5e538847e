"""Starts threads; if the system refuses one, raises a typed error."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.errors import LimitReached

RETRY_AFTER = 1.0
"""Seconds after which the system may have threads again."""


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread.

    Raises:
        LimitReached: the system refused another thread.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise no_thread(f"thread {name!r}") from None
    return thread


def no_thread(what: str) -> LimitReached:
    """Make the error for a thread that the system refused.

    Args:
        what: name of what could not be started.
    """
    running = threading.active_count()
    message = f"the system refused {what}; {running} threads of this process are running"
    return LimitReached(message, retry_after=RETRY_AFTER, limit="threads", value=running)
