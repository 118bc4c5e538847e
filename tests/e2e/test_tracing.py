"""One request is one trace: of its router, two engines and their node server, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.instrumentation.grpc import GrpcInstrumentorClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry import Client, EngineSpec, Group
from kvferry._wire.channel import connect
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.integrations import otel
from kvferry.v1.kv_transfer_pb2 import NotifyRequest, WatchRequest
from tests.support.node_servers import Kvferryd, NodeServerProcess, environment, refused
from tests.support.raw_parties import Party
from tests.support.recorded_spans import Recorded
from tests.support.repository import ROOT
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until


@dataclass
class Seen:
    """A span that has arrived at the collector."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    attributes: dict[str, str] = field(repr=False)
    failed: bool


class Collector:
    """A stand-in for a collector of OpenTelemetry: takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.raw: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [
                    Seen(
                        named["service.name"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        {each.key: each.value.string_value or str(each.value.int_value) for each in span.attributes},
                        span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                    for span in scope.spans
                ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    yield Recorded()
    otel.stop()


class Program:
    """`traced.py` in a process of its own."""

    def __init__(self, role: str, address: str, endpoint: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.traced", role, address, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(OTEL_BSP_SCHEDULE_DELAY="100"),
        )

    def tell(self, **values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def moved(address: str, endpoint: str, traceparent: str) -> list[Any]:
    """Move a request between two engines as a router does. Returns what the programs had imported at the end."""
    with ExitStack() as stack:
        prefill, decode = Program("prefill", address, endpoint), Program("decode", address, endpoint)
        stack.callback(prefill.end)
        stack.callback(decode.end)
        assert prefill.hear() == decode.hear() == {"ready": True}
        prefill.tell(traceparent=traceparent)
        carried = prefill.hear()
        decode.tell(**carried)
        assert decode.hear() == {"error": "None", "right": True}
        return [carried, prefill.hear()["imported"], decode.hear()["imported"]]


def test_a_request_is_one_trace_from_the_router_to_its_release(collector: Collector, tmp_path: Path) -> None:
    router, own = TracerProvider(), InMemorySpanExporter()
    router.add_span_processor(SimpleSpanProcessor(own))
    carrier: dict[str, str] = {}
    with router.get_tracer("router").start_as_current_span("route"):
        TraceContextTextMapPropagator().inject(carrier)
    (root,) = own.get_finished_spans()
    assert root.context is not None
    with Kvferryd(
        "--listen", "127.0.0.1:0", "--unix", "", "--drain", "0", "--trace-endpoint", collector.endpoint
    ) as server:
        carried, *_ = moved(server.address, collector.endpoint, carrier["traceparent"])
    spans = collector.spans
    assert {span.trace_id for span in spans} == {f"{root.context.trace_id:032x}"}
    names = {span.span_id: f"{span.service}: {span.name}" for span in spans}
    names[f"{root.context.span_id:016x}"] = "router"
    found = {(names[span.parent], names[span.span_id]) for span in spans}
    call = "kvferryd: kvferry.v1.KVTransfer/"
    # A read of a hint takes a lease, too, if it has not ended after half a second.
    assert found - {("decode: kvferry.acquire", call + "ReadBlocks")} == {
        ("router", "prefill: kvferry.publish"),
        ("prefill: kvferry.publish", call + "Notify"),
        ("prefill: kvferry.publish", "decode: kvferry.read"),
        ("decode: kvferry.read", "decode: kvferry.acquire"),
        ("decode: kvferry.read", "decode: kvferry.handshake"),
        ("decode: kvferry.handshake", call + "Handshake"),
        ("decode: kvferry.read", "decode: kvferry.move"),
        ("decode: kvferry.read", "decode: kvferry.judge"),
        ("decode: kvferry.judge", call + "Notify"),
        ("prefill: kvferry.publish", "prefill: kvferry.release"),
    }
    assert not any(span.failed for span in spans)
    by_name = {span.name: span.attributes for span in spans}
    assert by_name["kvferry.publish"]["kvferry.request_id"] == "cmpl-1"
    assert by_name["kvferry.move"]["kvferry.bytes"] == str(2 * 2 * 2 * 4 * 8 * 2)
    assert by_name["kvferry.judge"]["kvferry.verdict"] == "valid"
    assert by_name["kvferry.release"]["kvferry.outcome"] == "read"
    # The reference is a capability; no part of it that a guess could begin with is in a trace.
    raw = b"".join(collector.raw)
    assert carried["reference"][5:40].encode() not in raw


@pytest.mark.slow
@pytest.mark.parametrize("relay_traces", [True, False])
def test_a_call_that_is_relayed_stays_in_its_trace(collector: Collector, relay_traces: bool) -> None:
    """Below the span of the server that sends it on, or below the caller's where that one does not trace."""
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced, short = ("--trace-endpoint", collector.endpoint), {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    flags = ("--listen", "127.0.0.1:0", "--unix", "", "--drain", "0", "--engine-ttl", "0.01")
    with (
        Kvferryd(*flags, *traced, env={**short, "OTEL_SERVICE_NAME": "home"}) as home,
        Kvferryd(*flags, *(traced if relay_traces else ()), env={**short, "OTEL_SERVICE_NAME": "relay"}) as relay,
        connect(home.address) as channel,
        connect(relay.address) as elsewhere,
    ):
        party = Party(channel, "engine")
        party.live()
        reference = parse_reference(party.reference())
        reference.home = home.advertise
        request = NotifyRequest()
        request.notifications.add().decline.reference = format_reference(reference)
        stub: Any = KVTransferStub(elsewhere)
        metadata = (("traceparent", f"00-{trace_id}-{caller}-01"),)
        (result,) = stub.Notify(request, timeout=30, metadata=metadata).results
        assert result.HasField("done")
        until(lambda: len(collector.spans) == 1 + relay_traces)
        party.close()
    spans = {span.service: span for span in collector.spans}
    assert {span.trace_id for span in spans.values()} == {trace_id}
    if relay_traces:
        assert spans["relay"].parent == caller
        assert spans["home"].parent == spans["relay"].span_id
    else:
        assert spans["home"].parent == caller


@pytest.mark.slow
def test_tracing_imports_and_sends_nothing_unless_configured(collector: Collector, tmp_path: Path) -> None:
    """A trace that others have begun passes through, so that it does not break here."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with NodeServerProcess(tmp_path, tcp=True, drain=0) as server:
        carried, *imported = moved(server.address, "", traceparent)
    assert carried["traceparent"] == traceparent
    assert imported == [[], []]
    assert collector.spans == []
    code = (
        "import sys, kvferry_server.node.main, kvferry_server.node.server, kvferry._cli; kvferry_server.node.main;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_engines_that_instrument_all_of_grpc_still_read(recorded: Recorded, tmp_path: Path) -> None:
    """OpenTelemetry's instrumentation hides the `cancel` of streams, and would show each Watch as a span of hours."""
    made: Any = GrpcInstrumentorClient
    instrumentor = made()
    instrumentor.instrument(tracer_provider=recorded.provider)
    try:
        assert hasattr(grpc.insecure_channel, "__wrapped__")
        with NodeServerProcess(tmp_path, drain=0) as server, connect(server.address) as channel:
            with Client(server.address) as client:
                client.open_engine(EngineSpec("e", (Group("full", block_tokens=4, num_blocks=4),))).close()
            assert KVTransferStub(channel).Watch(WatchRequest(), timeout=5).cancel() is not None
        assert not recorded.of("/kvferry.v1.KVTransfer/Watch")
    finally:
        instrumentor.uninstrument()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:4318",
        "ftp://a/b",
        "http://",
        "http://user:secret@host/v1/traces",
        "http://[a",
        "http://host/v1/traces?api-key=secret",
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused_and_shows_no_password(url: str) -> None:
    done = refused("--trace-endpoint", url)
    assert done.returncode == 2
    assert "trace_endpoint" in done.stderr
    assert "secret" not in done.stderr


def test_a_token_that_opentelemetry_cannot_parse_is_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colon instead of an equals sign, as in HTTP: OpenTelemetry's own warning shows the whole header."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization: Bearer secret")
    flags = ["--trace-endpoint", "http://127.0.0.1:9/v1/traces", "--drain", "0"]
    with Kvferryd("--unix", str(tmp_path / "node.sock"), "--listen", "", *flags) as server:
        server.signal()
        assert server.wait() == 0
        assert "OTEL_EXPORTER_OTLP_HEADERS is not NAME=VALUE" in server.log
        assert "secret" not in server.log


def test_contradicting_variables_of_opentelemetry_are_named_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    done = refused("--trace-endpoint", "http://127.0.0.1:9/v1/traces")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "max_queue_size" in done.stderr


@pytest.mark.slow
def test_server_without_its_collector_serves_and_stops_in_time(tmp_path: Path) -> None:
    endpoint = "http://127.0.0.1:9/v1/traces"
    with NodeServerProcess(tmp_path, drain=0, trace_endpoint=endpoint) as server, connect(server.address) as channel:
        metadata = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
        for _ in range(100):
            KVTransferStub(channel).Notify(NotifyRequest(), timeout=5, metadata=metadata)
