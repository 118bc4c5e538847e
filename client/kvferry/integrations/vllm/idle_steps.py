"""What the connector does in steps in which vLLM computes nothing: it waits for reads instead of spinning.

vLLM runs such steps in a loop for as long as it has requests, because that is how it learns of transfers. The loop
holds Python's lock nearly all of the time, and every thread that moves a read forward would wait for the switch
interval of 5 ms, or for the next pause of the loop.
"""

from __future__ import annotations

import time

from kvferry.engine import SchedulerPort

PATIENCE = 0.001
"""Most seconds of waiting in a step: so much later vLLM sees a new request. Its own loop sleeps as long in a server
(``vllm/v1/engine/core.py``, ``_process_engine_step``)."""

YIELD = 0.0001
"""Seconds of sleep in an idle step that must not wait: other threads get Python's lock."""


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

    def begin(self, *, idle: bool, reads: bool, publishes: bool, ready: bool) -> bool:
        """Begin a step, and wait in it if that helps.

        Args:
            idle: nothing is computed in this step.
            reads: there are reads that have not ended.
            publishes: there are publications that wait for a device, of which nothing wakes the scheduler.
            ready: there is something to tell the workers in it.

        Returns:
            Whether the workers may wait for reads in this step.
        """
        self._streak = self._streak + 1 if idle else 0
        if not (idle and (reads or publishes)):
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
