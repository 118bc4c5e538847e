"""Spans of a trace, without a tracing library: `kvferry.integrations.otel` says how spans are made, for this process.

Until it does, spans are `Span`s, which do nothing but pass the traceparent on that they were given: an engine without
tracing between two that trace leaves the trace whole.

A traceparent is that of W3C Trace Context, ``00-<trace id>-<span id>-<flags>``. It names nothing but the trace: it is
no secret and no capability.
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
"""Of a traceparent: those of later versions may go on after the 55 characters of version 00."""

_calling: ContextVar[str] = ContextVar("kvferry-traceparent", default="")


class Span:
    """A span that is not recorded, and the base of those that are.

    Attributes:
        traceparent: what spans below it get as their parent; empty: there is no trace.
    """

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    @contextmanager
    def calling(self) -> Generator[None]:
        """Make calls within the ``with`` block part of this span. They are, if it is recorded."""
        yield

    def end(self, error: BaseException | None = None, **attributes: str | int) -> None:
        """End it. Idempotent. Never raises: no read fails because it is traced.

        Args:
            error: with what it failed. Only its class is recorded: messages may name what is secret.
            attributes: what is known by now.
        """


NO_SPAN = Span()

Start: TypeAlias = Callable[[str, str, Attributes], Span]
"""Starts a span: its name, the traceparent of its parent (empty: that of the thread, if it has one), and its
attributes."""

_start: Start | None = None


def use(start: Start | None) -> None:
    """Start the spans of this process in this way from now on; None: record none."""
    global _start
    _start = start


def start_span(name: str, parent: str = "", **attributes: str | int) -> Span:
    """Start a span. Never raises: no read fails because it is traced.

    Args:
        name: of the span, e.g. ``kvferry.publish``.
        parent: traceparent of the span above; one that is malformed is ignored, as W3C demands.
        attributes: what is known already. No secrets.
    """
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
    """Return the traceparent for calls that are made because of another one: of the span around this code if there is
    one, else what that call came with, unless it is malformed."""
    return _calling.get() or (traceparent if FORM.fullmatch(traceparent) else "")


def call_metadata() -> tuple[tuple[str, str], ...] | None:
    """Return the gRPC metadata of a call that is started now; None: there is nothing to say."""
    traceparent = _calling.get()
    return (("traceparent", traceparent),) if traceparent else None
