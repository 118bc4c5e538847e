"""Threads, and guards for code of the application that runs on them: callbacks, watches, hooks, logging handlers. Any
exception of such code is logged, and ends no thread of kvferry's: also a `BaseException`, such as
`asyncio.CancelledError` and `SystemExit`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from kvferry._logs import Log
from kvferry.errors import LimitReached

logger = Log(__name__)

Result = TypeVar("Result")

RETRY_AFTER = 1.0
"""Seconds after which the system may have threads again."""


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread. An exception of `run` is logged. Raises `LimitReached`: the system refused a thread."""
    thread = threading.Thread(target=guarded, args=(run, f"thread {name}"), name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise no_thread(f"thread {name!r}") from None
    return thread


def guarded(work: Callable[[], object], what: str) -> bool:
    """Run work that is, or may call, code of the application; return whether it has ended without an exception. Any
    exception is logged under the name `what`; on the main thread `KeyboardInterrupt` and `SystemExit` are raised: there
    they are the application's own."""
    try:
        work()
    except BaseException as error:
        mine = isinstance(error, (KeyboardInterrupt, SystemExit))
        if mine and threading.current_thread() is threading.main_thread():
            raise
        # Logging handlers belong to the application, too.
        with suppress(BaseException):
            logger.exception("%s failed", what)
        return False
    return True


def settle(future: Future[Result], result: Result | BaseException) -> None:
    """End a future with a result or an error. Its callbacks belong to the application, and are guarded."""
    end: Callable[[Any], None] = future.set_exception if isinstance(result, BaseException) else future.set_result
    guarded(lambda: end(result), "a callback of a future")


def no_thread(what: str) -> LimitReached:
    """Make the error for a thread that the system refused; `what` could not be started."""
    running = threading.active_count()
    message = f"the system refused {what}; {running} threads of this process are running"
    return LimitReached(message, retry_after=RETRY_AFTER, limit="threads", value=running)
