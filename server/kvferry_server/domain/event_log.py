"""The event log: one structured line for each thing that happens to an engine, rank, publication or lease.

An event has a name and fields. Any handler of Python's `logging` writes ``name key=value ...``; formatters for programs
find the fields as attributes of the record, the name as `event`. Names of events and fields are fixed; values may come
from strangers and are quoted, so that no value can forge a line or a field.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from enum import Enum

from kvferry_server.domain.times import Clock

# In so many seconds an event is written at most so many times; the next one written has the number left out.
WINDOW, MOST_IN_WINDOW = 10.0, 20
MAX_KEYS = 1024  # Kinds of events that are told apart. This code names far fewer.

OUTCOMES = ("outcome", "verdict", "state", "reason")
"""Fields, the first of which tells events of one name apart."""

NAMING = (
    *("engine_id", "identity", "incarnation", "lease_number", "limit", "missing_ranks", "nodes", "publication", "rank"),
    *("request_id", "role"),
)
"""Values of an error that are ids; listings show them too."""

ALARMING = {
    *("BAD_AGENT_METADATA", "ENGINE_ID_IN_USE", "INTERNAL", "LIMIT", "NOT_ALLOWED", "WRONG_IDENTITY", "WRONG_KEY"),
    "WRONG_SESSION",
}
"""Reasons of refusals that an operator should look at."""

ROUTINE = {"PREFIX_MISS", "PUBLICATION_TIMEOUT"}
"""Reasons of refusals that are normal answers: the reader computes the prompt, or asks again."""

logger = logging.getLogger("kvferry_server.events")

_BARE = re.compile(r"[\w.:/@+\-\[\],]+", re.ASCII)


class EventLog:
    """Writes events, each kind at a bounded rate. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By kind: start of its window, number of events written in it, number left out.
        self._windows: dict[str, tuple[float, int, int]] = {}

    def writes(self, level: int) -> bool:
        """Whether events of a level are written; to be asked before fields are put together."""
        return logger.isEnabledFor(level)

    def write(self, level: int, name: str, fields: Mapping[str, object], *, kind: str = "") -> None:
        """Write an event, without fields whose value is None. Only events from INFO on are limited in rate, all events
        of one `kind` (empty: the name with the outcome) together."""
        if not self.writes(level):
            return
        outcome = next((fields[field] for field in OUTCOMES if fields.get(field) is not None), "")
        left_out = self._left_out(kind or f"{name} {outcome}") if level >= logging.INFO else 0
        if left_out is None:
            return
        named = {key: value.name if isinstance(value, Enum) else value for key, value in fields.items()}
        given = {key: value for key, value in named.items() if value is not None}
        if left_out:
            given["left_out"] = left_out
        text = "".join(f" {key}={quoted(value)}" for key, value in given.items())
        logger.log(level, "%s%s", name, text, extra={"event": name, **given})

    def refusal(self, method: str, reason: str, values: Mapping[str, str], more: Mapping[str, object]) -> None:
        """Log that a call was refused, at a level that depends on the reason. Of the error's `values` only those in
        `NAMING` are written: others may hold what the caller sent."""
        level = logging.WARNING if reason in ALARMING else logging.DEBUG if reason in ROUTINE else logging.INFO
        named = {name: value for name, value in values.items() if name in NAMING}
        if "incarnation" in named:
            named["incarnation"] = named["incarnation"][:8]
        fields = {"method": method, "reason": reason, **named, **more}
        self.write(level, "refused", fields, kind=f"refused {method} {reason}")

    def _left_out(self, kind: str) -> int | None:
        """Return how many events of a kind were left out since the last written one; None: leave this one out too."""
        now = self._clock.now()
        if len(self._windows) >= MAX_KEYS:
            self._windows.clear()
        began, written, left_out = self._windows.get(kind, (now, 0, 0))
        if now - began >= WINDOW:
            began, written = now, 0
        if written >= MOST_IN_WINDOW:
            self._windows[kind] = began, written, left_out + 1
            return None
        self._windows[kind] = began, written + 1, 0
        return left_out


def short(incarnation: bytes) -> str:
    """Return the first digits of an incarnation, enough to tell two starts of one engine apart."""
    return incarnation.hex()[:8]


def quoted(value: object) -> str:
    """Return a value as text without blanks, line ends or quotes of its own."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
