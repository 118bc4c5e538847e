"""Ends calls before the interpreter does. At its end Python freezes daemon threads wherever they are, also while they
hold the lock of a call of gRPC; the call's finaliser then waits for that lock for ever."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Protocol

from kvferry._threads import guarded

PATIENCE = 2.0
"""Seconds for all calls and threads to end."""

POLL = 0.005
"""Seconds between two checks."""


class Ending(Protocol):
    """Has calls, or a thread that uses them."""

    def end_calls(self) -> None:
        """Make the calls end soon. Does not wait."""

    def calls(self) -> Iterable[object]:
        """Return the calls that are referenced, and the thread that uses one. Takes none of their locks."""


_living: weakref.WeakKeyDictionary[Ending, None] = weakref.WeakKeyDictionary()


def ends_at_exit(ending: Ending) -> None:
    """End the calls of this object, if it is still alive, before the interpreter ends. In a child process, leave them
    alone."""
    _living[ending] = None


def _all() -> list[Ending]:
    # The references first, which takes one step: other threads may add some at any time.
    return [ending for reference in _living.keyrefs() if (ending := reference()) is not None]


def _end_all() -> None:
    until = time.monotonic() + PATIENCE
    for ending in (mine := _all()):
        guarded(ending.end_calls, "the end of calls")
    for ending in mine:
        while any(map(_goes_on, ending.calls())) and time.monotonic() < until:
            time.sleep(POLL)


def _goes_on(call: object) -> bool:
    return call.is_alive() if isinstance(call, threading.Thread) else bool(getattr(call, "is_active", bool)())


def _leave_all() -> None:
    """Keep the parent's calls for ever, in a child: the threads that held their locks do not exist there."""
    for ending in _all():
        for call in ending.calls():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))
    _living.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_leave_all)
