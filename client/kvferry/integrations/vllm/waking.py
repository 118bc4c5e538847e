"""Wakes vLLM's engine where it waits for input, so that it answers questions while it has no requests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

from vllm.v1.engine import EngineCoreRequestType


def waker() -> Callable[[], None] | None:
    """Return a function that wakes the engine that the callers of this function are making, from any thread; None: it
    runs steps only when it is told, as in the process of ``vllm.LLM``.

    An engine without work waits at its input queue. It ignores this entry, with which vLLM itself wakes it to end it
    (``EngineCoreProc.run_engine_core`` in vllm/v1/engine/core.py; 0.32.0). Connectors are not given the engine, but
    bound while it is made.
    """
    made = _engine()
    if made is None:
        return None
    known = ref(made)

    def wake() -> None:
        engine = known()
        if engine is not None:
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    return wake


def _engine() -> Any:
    """Return the engine with an input queue among the objects whose methods call this function; None: there is none."""
    from vllm.v1.engine.core import EngineCoreProc

    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, EngineCoreProc):
            return found
    return None
