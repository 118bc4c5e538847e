"""Keeps vLLM from spinning: waits in idle steps, in which vLLM computes nothing, and decides when vLLM may rest.

While vLLM has requests, it runs idle steps in a loop, because steps report transfers. The loop holds Python's lock
nearly all of the time, and every thread that moves a read forward would wait for the switch interval of 5 ms, or for
the next pause of the loop.

vLLM rests, which means that it runs no steps until its next request, if it has no requests and the connector has no
work. Holding unread publications is not work: a loop for that would take more than half a core.

`Engine` wakes vLLM where it waits for input, so that it answers questions while it has no requests.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any
from weakref import ref

from kvferry.engine import SchedulerPort

PATIENCE = 0.001
"""Most seconds of waiting in a step, which delay a new request. vLLM's own loop sleeps as long in a server
(``vllm/v1/engine/core.py``, ``_process_engine_step``)."""

YIELD = 0.0001
"""Seconds of sleep in an idle step that must not wait: other threads get Python's lock."""

AWAKE = 1.0
"""Seconds for which vLLM goes on with its steps after the last useful step, if publications are held. Most are read in
that time: vLLM frees their blocks at once, and its metrics show the reads."""

ASLEEP = 0.02
"""Seconds of waiting in a step of an engine that drains and only holds publications, which delay a new request."""


class Rest:
    """Decides when vLLM may rest although publications are held. Their releases are taken when vLLM asks whether it may
    rest on, which happens for every input, and when a request comes, before vLLM looks for the request's blocks.

    An engine that `drains`, which means that vLLM finishes its work before it ends, never rests: the connector is not
    informed of the end, and vLLM would not wait for the readers of held publications.
    """

    def __init__(self, *, drains: bool, now: Callable[[], float]) -> None:
        self._drains = drains
        self._now = now
        self._until = 0.0

    def did_something(self) -> None:
        """Record an event: a request has come or ended, or a step computes something or has freed blocks."""
        self._until = self._now() + AWAKE

    def may_rest(self, *, holding: bool) -> bool:
        """Return whether vLLM may rest now, if it has no requests; `holding`: publications are held."""
        return not holding or not (self._drains or self._now() < self._until)

    @property
    def denied(self) -> bool:
        """Whether only draining keeps vLLM from resting now."""
        return self._drains and self._now() >= self._until


class IdleSteps:
    """The idle steps of vLLM's scheduler, which has up to `depth` steps under way at once.

    The connector waits in the last of so many idle steps in a row: then the device computes nothing, and no result is
    delayed. None: never wait, because other engines run their steps together with those of this one.
    """

    def __init__(self, port: SchedulerPort, depth: int | None) -> None:
        self._port = port
        self._depth = depth
        self._streak = 0

    def begin(self, *, idle: bool, reads: bool, publishes: bool, ready: bool, holds: bool = False) -> bool:
        """Begin a step, and wait in it if that helps; return whether the workers may wait for reads in this step.

        `idle`: nothing is computed in it; `reads`: there are reads that have not ended; `publishes`: there are
        publications that wait for a device, whose progress does not wake the scheduler; `ready`: the step has a message
        for the workers; `holds`: the engine runs steps only because it holds publications, see `Rest.denied`.
        """
        self._streak = self._streak + 1 if idle else 0
        if not (idle and (reads or publishes)):
            if idle and holds and not ready and self._depth is not None:
                time.sleep(ASLEEP)
            return False
        if publishes or self._depth is None or self._streak < self._depth:
            if not ready:
                time.sleep(YIELD)
            return False
        if self._port.stats().reading:
            # The workers see the end of a read before the scheduler does.
            return True
        if not ready:
            self._port.wait_news(PATIENCE)
        return False


class Engine:
    """vLLM's engine. Connectors are not given it, but bound while it is made."""

    def __init__(self, made: Any) -> None:
        self._made = ref(made)

    def wake(self) -> None:
        """Wake the engine, from any thread. Without work it waits at its input queue, and ignores this entry, with
        which vLLM itself wakes it to end it (``EngineCoreProc.run_engine_core`` in vllm/v1/engine/core.py; 0.32.0)."""
        from vllm.v1.engine import EngineCoreRequestType

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
