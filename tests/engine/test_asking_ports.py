"""A scheduler asks another one for a prefix, and all ranks read it, between real processes."""

from __future__ import annotations

from kvferry import Blocks, MissReason, Prompt, Question, ReleaseOutcome
from kvferry.errors import PrefixMiss
from tests.engine.port_engines import PortEngine
from tests.support.caches import expect, kv, write

THEIRS, OURS, TOKENS = [3, 4], [20, 7, 8], 40
PROMPT = Prompt(range(TOKENS))


def asked(source: PortEngine) -> Question:
    """The next question."""
    found: list[Question] = []
    source.until(lambda: found.extend(source.scheduler.questions()) or bool(found))  # type: ignore[func-returns-value]
    return found[0]


def test_what_an_engine_has_cached_is_read_by_the_ranks_of_one_that_asks(pair: tuple[PortEngine, PortEngine]) -> None:
    source, destination = pair
    values = kv(source.model, 3, 32)
    for memory in source.memories:
        write(memory, values, THEIRS)
    destination.scheduler.ask("mine", source.scheduler.engine_reference, PROMPT, wait=2.0)
    question = asked(source)
    blocks = {"full": Blocks(THEIRS, end_token=32)}
    publication = source.scheduler.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    assert destination.grant("mine").blocks() == blocks
    destination.start("mine", OURS, (0, 32))
    end = destination.end_of("mine")
    assert (end.error, end.ranks, end.confirmed, end.prompt) == (None, 3, True, "matched")
    for memory in destination.memories:
        assert (memory.cells == expect(memory, values, OURS, (0, 32))).all()
    assert source.release_of(publication).outcome is ReleaseOutcome.READ
    source.until(lambda: not question.open)


def test_an_engine_that_has_nothing_misses(pair: tuple[PortEngine, PortEngine]) -> None:
    source, destination = pair
    destination.scheduler.ask("mine", source.scheduler.engine_reference, Prompt([7]), wait=2.0)
    source.scheduler.miss(asked(source), MissReason.NOT_CACHED)
    refused: list[PrefixMiss] = []

    def over() -> bool:
        try:
            destination.scheduler.granted("mine")
        except PrefixMiss as miss:
            refused.append(miss)
        return bool(refused)

    destination.until(over)
    assert refused[0].values["why"] == "NOT_CACHED"
