"""Sources that decode sees for the first time."""

from __future__ import annotations

from kvferry._wire.reference import format_reference
from kvferry.integrations.vllm import sources
from kvferry.integrations.vllm.sources import NewSources
from kvferry.integrations.vllm.values import StepMetadata
from kvferry.v1 import kv_transfer_pb2 as pb


def reference(engine: str = "prefill", incarnation: bytes = b"i" * 16, publication: int = 1, router: str = "") -> str:
    named = {"router_key": router} if router else {"incarnation": incarnation, "publication": publication}
    return format_reference(pb.Reference(home="home:1", engine_id=engine, key=b"k" * 16, **named))


def test_each_source_is_new_once_and_again_after_its_restart() -> None:
    found = NewSources()
    for number in range(3):
        found.see(reference(publication=number + 1))
    assert found.take() == [reference(publication=1)]
    assert found.take() == []
    found.see(reference(publication=4))
    found.see(reference(incarnation=b"j" * 16))
    found.see(reference("other"))
    assert found.take() == [reference(incarnation=b"j" * 16), reference("other")]


def test_what_names_no_source_yet_is_left_to_the_read() -> None:
    found = NewSources()
    for text in ("", "kvf1.x", "kvf1e.x", reference(router="key")):
        found.see(text)
    assert found.take() == []


def test_a_fleet_of_sources_does_not_fill_the_memory() -> None:
    found = NewSources()
    for number in range(sources.MOST + 2):
        found.see(reference(f"prefill-{number}"))
    assert len(found._seen) == sources.MOST
    found.take()
    found.see(reference(f"prefill-{sources.MOST}"))
    assert found.take() == []
    found.see(reference("prefill-0"))
    assert found.take() == [reference("prefill-0")]


def test_a_step_that_names_a_new_source_shows_no_reference() -> None:
    step = StepMetadata(warms=[reference()])
    assert step
    assert reference() not in repr(step)
