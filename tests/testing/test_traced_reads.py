"""Spans of reads that go wrong: each ends, with the name of the error, and no read fails because it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import NoOpTracerProvider

from kvferry import Blocks, Prompt, _tracing, router_reference
from kvferry.errors import RouterKeyUsed
from kvferry.integrations import otel
from kvferry.testing import Fabric
from tests.support.recorded_spans import Recorded
from tests.support.waiting import until
from tests.testing.fabric_engines import SOON, Engine, kv

MALFORMED = ["", "x", "00-0-0-0", "00-" + "g" * 32 + "-" + "1" * 16 + "-01", "0" * 10_000, "\0é"]


@pytest.fixture(autouse=True)
def recorded() -> Iterator[Recorded]:
    yield Recorded()
    otel.stop()


def test_a_read_that_fails_ends_its_spans_with_the_name_of_the_error(fabric: Fabric, recorded: Recorded) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    publication = prefill.publish(kv(tokens=8), [3, 1])
    fabric.fail_reads()
    (read,) = decode.read(publication.reference, [5, 6], traceparent=publication.traceparent)
    assert read.exception(SOON) is not None
    until(lambda: bool(recorded.of("kvferry.judge")))
    for name in ("kvferry.read", "kvferry.move"):
        (span,) = recorded.of(name)
        assert (span.status.is_ok, span.attributes["error.type"]) == (False, "TransferFailed")
    (span,) = recorded.of("kvferry.read")
    assert span.attributes["kvferry.outcome"] == "failed"
    assert all("read" not in str(span.status.description) for span in recorded.of("kvferry.read"))


def test_reads_that_never_begin_end_their_spans(fabric: Fabric, recorded: Recorded) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    publication = prefill.session.publish("later", {}, last=False)
    (read,) = decode.read(publication.reference, [5, 6], timeout=0.2)
    assert read.exception(SOON) is not None
    (span,) = recorded.of("kvferry.acquire")
    assert span.attributes["error.type"] == type(read.exception()).__name__
    prefill.session.abort(publication)
    prefill.session.released(timeout=SOON)
    assert len(recorded.of("kvferry.publish")) == len(recorded.of("kvferry.release")) == 1


def test_the_span_of_a_publication_ends_when_its_home_has_all_of_it_or_refuses_it(
    fabric: Fabric, recorded: Recorded
) -> None:
    prefill, reference = Engine(fabric, "p"), router_reference(fabric.address, "p")
    publication = prefill.session.publish("request", {}, last=False, reference=reference)
    assert recorded.of("kvferry.publish") == []
    prefill.session.publish_more(publication, {"full": Blocks([3, 1], end_token=8)}, last=True)
    assert len(recorded.of("kvferry.publish")) == 1
    prefill.session.abort(publication)
    prefill.session.released(timeout=SOON)
    with pytest.raises(RouterKeyUsed):
        prefill.session.publish("again", {}, last=False, reference=reference)
    prefill.session.released(timeout=SOON)
    _, refused = recorded.of("kvferry.publish")
    assert refused.attributes["error.type"] == "RouterKeyUsed"


def test_the_span_of_a_read_has_the_result_of_its_prompt_check(fabric: Fabric, recorded: Recorded) -> None:
    """Metrics have no engines' names: this tells which source does not mark."""
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    for theirs in (Prompt(range(8)), Prompt.unknown):
        publication = prefill.session.publish("request", {"full": Blocks([3, 1], end_token=8)}, prompt=theirs)
        (read,) = decode.read(publication.reference, [5, 6], prompt=Prompt(range(8)))
        read.result(SOON)
        prefill.session.released(timeout=SOON)
    assert [span.attributes["kvferry.prompt"] for span in recorded.of("kvferry.read")] == ["matched", "unmarked"]


@pytest.mark.parametrize("wrong", MALFORMED)
def test_a_malformed_traceparent_begins_a_new_trace(fabric: Fabric, recorded: Recorded, wrong: str) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    publication = prefill.publish(kv(tokens=8), [3, 1])
    (read,) = decode.read(publication.reference, [5, 6], traceparent=wrong)
    assert read.result(SOON).bytes
    (span,) = recorded.of("kvferry.read")
    assert span.parent is None


@pytest.mark.parametrize("wrong", MALFORMED)
def test_a_malformed_traceparent_is_not_passed_on(fabric: Fabric, wrong: str) -> None:
    """gRPC would refuse to send some of them, and the read would fail."""
    prefill = Engine(fabric, "p")
    for turn_on in (otel.stop, lambda: otel.trace(NoOpTracerProvider())):
        turn_on()
        blocks = {"full": Blocks([3, 1], end_token=8)}
        publication = prefill.session.publish("request", blocks, traceparent=wrong)
        assert publication.traceparent == ""
        prefill.session.abort(publication)
        prefill.session.released(timeout=SOON)


def test_a_span_that_cannot_be_made_fails_no_read(fabric: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> _tracing.Span:
        raise RuntimeError("no spans today")

    _tracing.use(broken)
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    (read,) = decode.read(prefill.publish(kv(tokens=8), [3, 1]).reference, [5, 6])
    assert read.result(SOON).bytes
    assert "starting the span" in caplog.text


class Broken(SpanProcessor):
    """Fails with each span that ends, as an exporter with a bug does."""

    def on_end(self, span: ReadableSpan) -> None:
        raise ValueError(span.name)


def test_a_span_processor_that_fails_loses_no_read_and_no_release(fabric: Fabric, recorded: Recorded) -> None:
    recorded.provider.add_span_processor(Broken())
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    publication = prefill.publish(kv(tokens=8), [3, 1])
    (read,) = decode.read(publication.reference, [5, 6], traceparent=publication.traceparent)
    assert read.result(SOON).bytes
    assert [release.publication for release in prefill.session.released(timeout=SOON)] == [publication.number]
