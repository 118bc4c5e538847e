"""What the connector does in steps in which vLLM computes nothing, and when vLLM needs none: it does not spin.

vLLM runs such steps in a loop for as long as it has requests, because that is how it learns of transfers. The loop
holds Python's lock nearly all of the time, and every thread that moves a read forward would wait for the switch
interval of 5 ms, or for the next pause of the loop.

vLLM runs no steps at all, and waits for its next request, if it has none and the connector has no work. To hold
publications that nobody has read is none: a loop for that would take more than half a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.engine import SchedulerPort

PATIENCE = 0.001
"""Most seconds of waiting in a step: so much later vLLM sees a new request. Its own loop sleeps as long in a server
(``vllm/v1/engine/core.py``, ``_process_engine_step``)."""

YIELD = 0.0001
"""Seconds of sleep in an idle step that must not wait: other threads get Python's lock."""

AWAKE = 1.0
"""Seconds for which vLLM goes on with its steps after the last one that did something, if publications are held. Most
are read in that time. vLLM then frees their blocks at once, and its metrics say so."""

ASLEEP = 0.02
"""Seconds of waiting in a step of an engine that drains and only holds publications; so much later it sees a request.
Shortest seconds, too, between two questions of vLLM after which it has waited for input in between."""


class Rest:
    """When vLLM may rest although publications are held: it runs no steps until its next request comes.

    What is released meanwhile is freed when vLLM asks whether it may rest on, which it does for every input, and when a
    request comes, before vLLM looks for blocks for it.

    An input that is no request ends the rest until nothing is held. It may tell vLLM to pause: vLLM does so when it has
    no work, and resets its prefix cache, which is an error while blocks are held.

    Args:
        drains: vLLM waits for its work when it is told to end. Then it never rests: nothing tells the connector of the
            end, and vLLM would not wait for the readers of what is held.
        now: the clock, in seconds.
    """

    def __init__(self, *, drains: bool, now: Callable[[], float]) -> None:
        self._drains = drains
        self._now = now
        self._until = 0.0
        self._rested: float | None = None
        """When vLLM was last told that it may rest; None: something has come since."""
        self._woken = False

    def did_something(self) -> None:
        """Note that a request has come or ended, or that a step computes something or has freed blocks."""
        self._until = self._now() + AWAKE
        self._rested = None

    def may_rest(self, *, holding: bool) -> bool:
        """Whether vLLM may rest now, if it has no requests; `holding`: publications are held."""
        now = self._now()
        self._woken = holding and (self._woken or (self._rested is not None and now - self._rested >= ASLEEP))
        rests = not holding or not (self._drains or self._woken or now < self._until)
        self._rested = now if rests and holding else None
        return rests

    @property
    def denied(self) -> bool:
        """Whether vLLM could rest now if it did not drain."""
        return self._drains and self._now() >= self._until


class IdleSteps:
    """The idle steps of vLLM's scheduler.

    Args:
        port: the engine's port.
        depth: how many steps vLLM has under way at once. The connector waits in the last of so many idle steps in a
            row: nothing is computed then, and no result waits for it. None: it never waits, because other engines run
            their steps together with those of this one.
    """

    def __init__(self, port: SchedulerPort, depth: int | None) -> None:
        self._port = port
        self._depth = depth
        self._streak = 0

    def begin(self, *, idle: bool, reads: bool, publishes: bool, ready: bool, holds: bool = False) -> bool:
        """Begin a step, and wait in it if that helps.

        Args:
            idle: nothing is computed in this step.
            reads: there are reads that have not ended.
            publishes: there are publications that wait for a device, of which nothing wakes the scheduler.
            ready: there is something to tell the workers in it.
            holds: the engine runs steps for publications that it holds, see `Rest.denied`.

        Returns:
            Whether the workers may wait for reads in this step.
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
            # The workers see an end before the scheduler does.
            return True
        if not ready:
            self._port.wait_news(PATIENCE)
        return False
