"""Traces the SDK in this process with OpenTelemetry. Needs opentelemetry-api (``kvferry[otel]``).

    from kvferry.integrations import otel

    otel.trace()  # once, after the application has set its tracer provider

The application owns the SDK of OpenTelemetry: sampling, processors and exporters. Spans end on threads that other reads
need, so an exporter must not block: use a ``BatchSpanProcessor``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import kvferry
from kvferry import _tracing
from kvferry._threads import guarded
from kvferry._tracing import Attributes, calling_under

_propagator = TraceContextTextMapPropagator()

_KINDS = {"kvferry.publish": SpanKind.PRODUCER, "kvferry.read": SpanKind.CONSUMER}
"""The two ends of a reference's way through a router; all other spans are internal."""


def trace(provider: TracerProvider | None = None) -> None:
    """Record the SDK's spans from now on, in this process.

    Args:
        provider: makes the tracer; None: the global one, also if the application sets it later.
    """
    tracer = otel_trace.get_tracer("kvferry", kvferry.__version__, provider)

    def start(name: str, parent: str, attributes: Attributes) -> _tracing.Span:
        return _RecordedSpan(tracer, name, parent, attributes)

    _tracing.use(start)


def stop() -> None:
    """Record no more spans."""
    _tracing.use(None)


class _RecordedSpan(_tracing.Span):
    """A span of OpenTelemetry."""

    __slots__ = ("_span",)

    def __init__(self, tracer: Tracer, name: str, parent: str, attributes: Attributes) -> None:
        context = _propagator.extract({"traceparent": parent}, Context()) if parent else None
        self._span = tracer.start_span(
            name,
            context,
            _KINDS.get(name, SpanKind.INTERNAL),
            {f"kvferry.{key}": attributes[key] for key in attributes},
        )
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, otel_trace.set_span_in_context(self._span, Context()))
        # Without a provider and a parent there is no traceparent.
        super().__init__(carrier.get("traceparent", ""))

    @contextmanager
    def calling(self) -> Generator[None]:
        # Also the current span of OpenTelemetry: its instrumentation of gRPC then makes its spans below this span.
        with (
            otel_trace.use_span(self._span, record_exception=False, set_status_on_exception=False),
            calling_under(self.traceparent),
        ):
            yield

    def end(self, error: BaseException | None = None, **attributes: str | int) -> None:
        # An error of the application's processor must not end a read or a release half way.
        guarded(partial(self._end, error, attributes), "ending a span")

    def _end(self, error: BaseException | None, attributes: Attributes) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes({f"kvferry.{key}": attributes[key] for key in attributes})
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._span.end()
