"""Sources that decode sees for the first time."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from kvferry._wire.reference import format_reference
from kvferry.errors import EngineUnknown
from kvferry.integrations.remembered import MOST
from kvferry.integrations.vllm.loads import NewSources
from kvferry.integrations.vllm.values import StepMetadata
from kvferry.integrations.vllm.worker import MAX_WARMING, WARM_TIMEOUT, ConnectorWorker
from kvferry.v1 import kv_transfer_pb2 as pb


def reference(engine: str = "prefill", incarnation: bytes = b"i" * 16, publication: int = 1, router: str = "") -> str:
    named = {"router_key": router} if router else {"incarnation": incarnation, "publication": publication}
    return format_reference(pb.Reference(home="home:1", engine_id=engine, key=b"k" * 16, **named))


def test_source_is_new_once_and_again_after_its_restart() -> None:
    found = NewSources()
    for number in range(3):
        found.see(reference(publication=number + 1))
    assert found.take() == [reference(publication=1)]
    assert found.take() == []
    found.see(reference(publication=4))
    found.see(reference(incarnation=b"j" * 16))
    found.see(reference("other"))
    assert found.take() == [reference(incarnation=b"j" * 16), reference("other")]


def test_reference_without_a_source_is_left_to_the_read() -> None:
    found = NewSources()
    for text in ("", "kvf1.x", "kvf1e.x", reference(router="key")):
        found.see(text)
    assert found.take() == []


def test_sources_that_are_remembered_are_bounded() -> None:
    found = NewSources()
    for number in range(MOST + 2):
        found.see(reference(f"prefill-{number}"))
    assert len(found._seen) == MOST
    found.take()
    found.see(reference(f"prefill-{MOST}"))
    assert found.take() == []
    found.see(reference("prefill-0"))
    assert found.take() == [reference("prefill-0")]


def test_a_step_that_names_a_new_source_shows_no_reference() -> None:
    step = StepMetadata(warms=[reference()])
    assert reference() not in repr(step)


def test_a_worker_connects_to_few_sources_at_once() -> None:
    """Each takes a thread, and anybody may make up references."""
    under_way: list[Future[tuple[int, ...]]] = []

    def warm(_: str, *, timeout: float) -> Future[tuple[int, ...]]:
        assert timeout <= WARM_TIMEOUT
        under_way.append(Future())
        return under_way[-1]

    made: Any = ConnectorWorker.__new__(ConnectorWorker)
    made._port, made._warming = SimpleNamespace(warm=warm), set()
    made._do(StepMetadata(warms=[reference(f"prefill-{number}") for number in range(100)]))
    assert len(under_way) == MAX_WARMING
    under_way[0].set_exception(EngineUnknown("no such engine"))
    under_way[1].set_result((0,))
    made._do(StepMetadata(warms=[reference(f"other-{number}") for number in range(100)]))
    assert len(under_way) == MAX_WARMING + 2
