"""Counts of a node server's gRPC calls: rate, errors by reason and duration, by method.

Methods come from the contract and reasons from `ErrorReason`, so the number of both is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from kvferry.stats import Distribution, counter, histogram
from kvferry_server.domain.event_log import EventLog

TAKING = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds, in seconds, of how long calls take."""

OK = "OK"
INTERNAL = "INTERNAL"  # The reason of a call that failed because of a bug
LEFT = "CANCELLED"  # The result of a call whose client has left
ABORTED = "ABORTED"  # Of a call that its handler aborted without a reason, as those of health and reflection do

_refused: ContextVar[str] = ContextVar("kvferry_refused", default=LEFT)
"""The result of the current call if it gets no answer."""


@dataclass(slots=True, eq=False)
class CallCounts:
    """Counts calls, and writes refusals to `events`. Belongs to the event loop that serves the calls."""

    events: EventLog | None = None
    results: Counter[tuple[str, str]] = counter(
        "kvferry_calls",
        "Calls that ended. The result is OK, the reason of the error, CANCELLED if the client left, or ABORTED for an "
        "error without a reason. Other results than OK and INTERNAL begin with the first such call.",
        method=(),
        result=(),
    )
    taken: dict[str, Distribution] = histogram(
        "kvferry_call_seconds", "How long calls take that do not wait for news.", TAKING, method=()
    )

    def counted(
        self, method: str, behaviour: Callable[[Any, Any], Awaitable[Any]], *, timed: bool
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Wrap a handler so that its calls are counted. `method` is a path, or the name of unknown methods in messages.
        `timed`: the calls do not wait for news, so that their duration says something."""
        name = method.removeprefix("/") if method.startswith("/") else "unknown"
        # Both from the start, because a rate needs a first value.
        self.results[name, OK] += 0
        self.results[name, INTERNAL] += 0
        distribution = self.taken.setdefault(name, Distribution(TAKING)) if timed else None

        async def call(request: Any, context: Any) -> Any:
            began, result = perf_counter(), ""
            try:
                answer = await behaviour(request, context)
                result = OK
                return answer
            finally:
                # Each call has its own task, so no other call sees this variable.
                self.results[name, result or _refused.get()] += 1
                if distribution is not None:
                    distribution.add(perf_counter() - began)

        return call

    def refused(self, method: str, peer: str, reason: str, values: dict[str, str]) -> None:
        """Record that the current call ends with an error; `reason` may be empty."""
        _refused.set(reason or ABORTED)
        if self.events is not None and reason:
            name = method.rpartition("/")[2]
            self.events.refusal(name, reason, values, {"peer": peer.rstrip(":")})
