"""Spans of a node server's calls, in the traces that their callers name (``traceparent`` in the metadata).

OpenTelemetry's own instrumentation of gRPC wraps ``grpc.aio.server()``, but this node server accepts its calls itself.
So the spans are made here, around each guarded handler; calls without a traceparent have none. Spans wait in a bounded
queue, and a background thread sends them: neither a slow collector nor a flood of traced calls holds up the event loop.
Only this file imports OpenTelemetry, and only if `trace_endpoint` is set.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import kvferry
from kvferry._tracing import calling_under
from kvferry.errors import InvalidField
from kvferry_server.servicers.callers import Context, traceparent_of

Behaviour: TypeAlias = Callable[[Any, Any], Any]
Traced: TypeAlias = Callable[[str, Behaviour], Behaviour]  # Wraps the handler of a method, given its path

CLOSE_TIMEOUT = 2.0  # Seconds for sending the last spans when the server stops


def _without_headers(record: logging.LogRecord) -> bool:
    """OpenTelemetry's warning about a header that it cannot parse shows the header, which mostly is a token."""
    record.msg, record.args = "a header in OTEL_EXPORTER_OTLP_HEADERS is not NAME=VALUE, and is not sent", ()
    return True


class Tracing:
    """Records the calls of a node server and sends them to an OpenTelemetry collector (OTLP over HTTP). Headers,
    sampling and the service's name come from the environment, as OpenTelemetry defines (``OTEL_…``). Raises
    `InvalidField` if a package is missing, or if these variables contradict each other."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            needed = f"the package of {error.name}, from: pip install 'kvferry[otel-server]'"
            raise InvalidField("trace_endpoint", endpoint, needed) from None
        logging.getLogger("opentelemetry.util.re").addFilter(_without_headers)
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "kvferryd"}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        try:
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        except ValueError as error:
            needed = f"variables OTEL_... that fit each other ({error})"
            raise InvalidField("trace_endpoint", endpoint, needed) from None
        self._tracer = self._provider.get_tracer("kvferryd", kvferry.__version__)

    def traced(self, method: str, behaviour: Behaviour) -> Behaviour:
        """Wrap a guarded handler: each call that names a trace gets a span."""
        from opentelemetry.context import Context as TraceContext
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        service, _, name = method.removeprefix("/").rpartition("/")
        known = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}

        async def run(requests: Any, context: Context) -> Any:
            parent = traceparent_of(context)
            if not parent:
                return await behaviour(requests, context)
            within = propagator.extract({"traceparent": parent}, TraceContext())
            span = self._tracer.start_span(f"{service}/{name}", within, SpanKind.SERVER, known)
            below: dict[str, str] = {}
            propagator.inject(below, set_span_in_context(span, TraceContext()))
            try:
                with calling_under(below.get("traceparent", "")):
                    return await behaviour(requests, context)
            finally:
                status: Any = context.code()
                code = int(status.value[0] if hasattr(status, "value") else status or 0)
                span.set_attribute("rpc.grpc.status_code", code)
                if code:
                    span.set_status(Status(StatusCode.ERROR))
                span.end()

        return run

    def close(self) -> None:
        """Send the last spans, for at most `CLOSE_TIMEOUT`: without a collector OpenTelemetry tries for longer."""
        closing = threading.Thread(target=self._provider.shutdown, name="kvferryd-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT)


def untraced(_: str, behaviour: Behaviour) -> Behaviour:
    """Return the handler as it is."""
    return behaviour
