"""Wakes vLLM's engine where it waits for input, so that it answers questions while it has no requests; and sees whether
it is paused."""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

from vllm.v1.engine import EngineCoreRequestType


class Engine:
    """vLLM's engine. Connectors are not given it, but bound while it is made."""

    def __init__(self, made: Any) -> None:
        self._made = ref(made)

    def wake(self) -> None:
        """Wake the engine, from any thread.

        An engine without work waits at its input queue. It ignores this entry, with which vLLM itself wakes it to end
        it (``EngineCoreProc.run_engine_core`` in vllm/v1/engine/core.py; 0.32.0).
        """
        engine = self._made()
        if engine is not None:
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def paused(self) -> bool:
        """Whether the engine is paused, or will be as soon as it has no work. It then resets its prefix cache, which is
        an error while blocks are held, and its weights may be changed."""
        engine = self._made()
        return engine is not None and bool(engine.is_scheduler_paused())


def engine_in_making() -> Engine | None:
    """Return the engine that the callers of this function are making; None: it has no input queue and runs steps only
    when it is told, as in the process of ``vllm.LLM``."""
    from vllm.v1.engine.core import EngineCoreProc

    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, EngineCoreProc):
            return Engine(found)
    return None
