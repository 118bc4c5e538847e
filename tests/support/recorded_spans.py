"""Spans that are recorded in this process. End it with `kvferry.integrations.otel.stop`."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.integrations import otel


class Recorded:
    """Records the spans of kvferry from now on."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        otel.trace(self.provider)

    def of(self, name: str) -> list[Any]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]
