"""Spans of a trace, without a tracing library: `kvferry.integrations.otel` sets how this process makes spans.

Until then, a span is a `Span`, which only passes its traceparent on: an engine without tracing between two engines that
trace leaves the trace whole.

A traceparent is that of W3C Trace Context, ``00-<trace id>-<span id>-<flags>``. It names only the trace, and is neither
a secret nor a capability.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from kvferry._threads import guarded

Attributes: TypeAlias = Mapping[str, "str | int"]

FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,400})?")
"""Form of a traceparent: later versions may go on after the 55 characters of version 00."""

_calling: ContextVar[str] = ContextVar("kvferry-traceparent", default="")


class Span:
    """A span that is not recorded, and the base of recorded spans. `traceparent` is the parent of the spans below this
    one; empty: there is no trace."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    @contextmanager
    def calling(self) -> Generator[None]:
        """Make calls within the ``with`` block part of this span, if the span is recorded."""
        yield

    def end(self, error: BaseException | None = None, **attributes: str | int) -> None:
        """End the span. Idempotent. Never raises: tracing must not fail a read. Of `error` only the class is recorded,
        because messages may contain secrets."""


NO_SPAN = Span()

Start: TypeAlias = Callable[[str, str, Attributes], Span]
"""Starts a span from its name, the traceparent of its parent (empty: that of the thread, if any), and attributes."""

_start: Start | None = None


def use(start: Start | None) -> None:
    """Start the spans of this process with this function from now on; None: record no spans."""
    global _start
    _start = start


def start_span(name: str, parent: str = "", **attributes: str | int) -> Span:
    """Start a span, e.g. ``kvferry.publish``. Never raises: tracing must not fail a read. A malformed traceparent as
    `parent` is ignored, as W3C demands. `attributes` must not contain secrets."""
    known = parent if FORM.fullmatch(parent) else ""
    start = _start
    if start is not None:
        started: list[Span] = []
        if guarded(lambda: started.append(start(name, known, attributes)), f"starting the span {name}"):
            return started[0]
    return Span(known) if known else NO_SPAN


@contextmanager
def calling_under(traceparent: str) -> Generator[None]:
    """Send this traceparent with the calls within the ``with`` block."""
    token = _calling.set(traceparent)
    try:
        yield
    finally:
        _calling.reset(token)


def passed_on(traceparent: str) -> str:
    """Return the traceparent for calls that another call causes: that of the span around this code, or else
    `traceparent`, which came with the other call, unless it is malformed."""
    return _calling.get() or (traceparent if FORM.fullmatch(traceparent) else "")


def call_metadata() -> tuple[tuple[str, str], ...] | None:
    """Return the gRPC metadata of a call that is started now; None: there is no trace."""
    traceparent = _calling.get()
    return (("traceparent", traceparent),) if traceparent else None
