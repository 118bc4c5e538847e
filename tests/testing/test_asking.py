"""Engines that ask each other for the KV of a prompt's beginning: the answer is read like any publication, a miss costs
nothing, and nothing stays pinned by an answer that nobody reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvferry import (
    Blocks,
    EngineSpec,
    Group,
    Listing,
    MissReason,
    Prompt,
    PromptInput,
    Publication,
    Question,
    Read,
    ReadResult,
    ReleaseOutcome,
)
from kvferry._control.questions import MAX_ASKED_TOKENS
from kvferry._wire.reference import format_reference, parse_engine_reference
from kvferry.aio import AsyncCache, AsyncSession
from kvferry.engine import Offer, ReadEnd, SchedulerPort, WorkerPort
from kvferry.errors import (
    BadReference,
    Closed,
    HomeNotAllowed,
    InvalidField,
    KvferryError,
    PeerRestarted,
    PrefixMiss,
    PromptMismatch,
    PromptUnmarked,
    WrongKey,
    WrongState,
)
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import SOON

AXES = ("kv", "block", "head", "token", "content")
BLOCK, BLOCKS = 4, 16
IDS = [100 + token for token in range(3 * BLOCK)]
PROMPT, ANOTHER = Prompt(IDS), Prompt([*IDS[:-1], 7])
UNTOUCHED = -1.0


class Engine:
    """An engine of one rank whose block n holds the value n, if it is a source."""

    def __init__(self, fabric: Fabric, name: str, *, source: bool) -> None:
        self.spec = EngineSpec(name, (Group("full", block_tokens=BLOCK, num_blocks=BLOCKS),))
        client = self.client = fabric.client()
        self.memory = np.full((2, BLOCKS, 1, BLOCK, 4), UNTOUCHED, np.float32)
        if source:
            self.memory[:] = np.arange(BLOCKS, dtype=np.float32)[None, :, None, None, None]
        self.port, self.worker = SchedulerPort(client, self.spec), WorkerPort(client, self.spec)
        self.worker.register({"layer": self.memory}, axes=AXES)

    # As the source.

    def question(self) -> Question:
        """The next question."""
        found: list[Question] = []
        until(lambda: found.extend(self.port.questions()) or bool(found))  # type: ignore[func-returns-value]
        (question,) = found
        return question

    def answer(
        self, question: Question, ids: list[int], first: int = 0, prompt: Prompt | None = None, **options: Any
    ) -> Publication:
        """Publish these blocks, which begin with this token."""
        blocks = {"full": Blocks(ids, first_token=first, end_token=first + BLOCK * len(ids))}
        given = question.prompt if prompt is None else prompt
        return self.port.publish("cached", blocks, reference=question.reference, prompt=given, **options)

    def outcome(self, publication: Publication) -> ReleaseOutcome:
        """How the only publication was released."""
        found: list[Any] = []
        until(lambda: found.extend(self.port.released()) or bool(found))  # type: ignore[func-returns-value]
        assert [release.publication for release in found] == [publication.number]
        outcome: ReleaseOutcome = found[0].outcome
        return outcome

    # As the asker.

    def ask(self, source: Engine, prompt: Prompt = PROMPT, request_id: str = "mine", **options: Any) -> None:
        self.port.ask(request_id, source.port.engine_reference, prompt, **{"wait": 2.0, **options})

    def offer(self, request_id: str = "mine") -> Offer:
        """The answer."""
        found: list[Offer | None] = []
        until(lambda: bool(found.append(self.port.granted(request_id)) or found[-1]))  # type: ignore[func-returns-value]
        assert found[-1] is not None
        return found[-1]

    def refusal(self, request_id: str = "mine") -> KvferryError:
        """Why there is no answer. The port has forgotten the request."""
        with pytest.raises(KvferryError) as found:
            self.offer(request_id)
        with pytest.raises(WrongState):
            self.port.granted(request_id)
        return found.value

    def read(self, ids: list[int], first: int = 0, request_id: str = "mine") -> ReadEnd:
        """Read what was offered into these blocks."""
        self.worker.start(self.port.attach(request_id, {"full": Blocks(ids, first_token=first)}))
        found: list[ReadEnd] = []

        def ended() -> bool:
            self.port.collect(self.worker.finished())
            found.extend(self.port.finished().reads)
            return bool(found)

        until(ended)
        return found[0]

    def holds(self, *blocks: float) -> bool:
        """Whether the first blocks hold these values, and no others were touched."""
        wanted = [*blocks, *[UNTOUCHED] * (BLOCKS - len(blocks))]
        return bool((self.memory == np.array(wanted, np.float32)[None, :, None, None, None]).all())


@pytest.fixture
def source(fabric: Fabric) -> Engine:
    return Engine(fabric, "p", source=True)


@pytest.fixture
def asker(fabric: Fabric) -> Iterator[Engine]:
    made = Engine(fabric, "d", source=False)
    yield made
    assert made.port.stats().waiting == 0


def ended(question: Question) -> bool:
    return not question.open


def outcomes(fabric: Fabric) -> dict[str, int]:
    """How the questions have ended that the home was asked."""
    questions = fabric._homes[fabric.address]._home.journal.questions
    return {outcome.name: count for outcome, count in questions.items() if count}


def test_an_engine_reads_what_another_one_has_cached_of_its_prompt(source: Engine, asker: Engine) -> None:
    prompt = Prompt(IDS, adapter="lora", inputs=[PromptInput(2, 3, "image")])
    asker.ask(source, prompt)
    question = source.question()
    assert (question.asker, question.first_token, question.prompt.token_ids.tolist()) == ("d", 0, IDS)
    assert question.prompt.digest(len(IDS)) == prompt.digest(len(IDS))
    publication = source.answer(question, [9, 5])
    offer = asker.offer()
    assert offer.blocks() == {"full": Blocks([9, 5], end_token=8)}
    assert (offer.engine_id, offer.publication, offer.source_request_id) == ("p", publication.number, "cached")
    assert asker.read([0, 1]).error is None
    assert asker.holds(9, 5)
    assert source.outcome(publication) is ReleaseOutcome.READ
    until(lambda: ended(question))
    assert source.port.questions() == []


def test_what_the_asker_has_itself_is_not_read(source: Engine, asker: Engine) -> None:
    asker.ask(source, first_token=BLOCK)
    question = source.question()
    assert question.first_token == BLOCK
    # The source may begin before.
    source.answer(question, [9, 5, 3])
    asker.offer()
    assert asker.read([0, 1], first=BLOCK).error is None
    assert asker.holds(5, 3)


@pytest.mark.parametrize("reason", [MissReason.NOT_CACHED, MissReason.BUSY, MissReason.UNSUPPORTED])
def test_a_miss_is_no_error_of_the_request(
    source: Engine, asker: Engine, reason: MissReason, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asker.ask(source)
    question = source.question()
    source.port.miss(question, reason)
    assert ended(question)
    found = asker.refusal()
    assert isinstance(found, PrefixMiss)
    assert (found.values["engine_id"], found.values["why"]) == ("p", reason.name)
    reads = asker.client.stats().reads
    assert (reads.outcomes["missed"], reads.outcomes["not_granted"], +reads.failures) == (1, 0, {})
    # The same request may be asked for again, and computed meanwhile.
    asker.ask(source)
    source.answer(source.question(), [9])
    asker.offer()
    assert "granted" not in caplog.text


def test_an_engine_that_does_not_answer_is_a_miss(fabric: Fabric, source: Engine, asker: Engine) -> None:
    asker.ask(source)
    question = source.question()
    assert asker.port.granted("mine") is None
    fabric.advance(2.5)
    found = asker.refusal()
    assert isinstance(found, PrefixMiss)
    assert found.values["why"] == "NO_ANSWER"
    until(lambda: ended(question))


def test_an_answer_that_comes_too_late_is_released_at_once(fabric: Fabric, source: Engine, asker: Engine) -> None:
    asker.ask(source)
    question = source.question()
    fabric.advance(2.5)
    asker.refusal()
    assert source.outcome(source.answer(question, [9])) is not ReleaseOutcome.READ
    assert asker.holds()


def test_a_question_that_is_cancelled_is_withdrawn(fabric: Fabric, source: Engine, asker: Engine) -> None:
    asker.ask(source)
    question = source.question()
    fabric.wait_until_waiting()
    assert asker.port.cancel("mine")
    until(lambda: ended(question))
    assert outcomes(fabric) == {"WITHDRAWN": 1}
    fabric.wait_until_waiting(0)
    # Its answer was on the way.
    assert source.outcome(source.answer(question, [9])) is ReleaseOutcome.DECLINED


def test_an_answer_that_is_not_read_is_given_back_at_once(source: Engine, asker: Engine) -> None:
    asker.ask(source)
    publication = source.answer(source.question(), [9])
    asker.offer()
    assert asker.port.cancel("mine")
    assert source.outcome(publication) is ReleaseOutcome.DECLINED


def test_an_answer_whose_read_fails_is_given_back_at_once(fabric: Fabric, source: Engine, asker: Engine) -> None:
    asker.ask(source)
    publication = source.answer(source.question(), [9])
    asker.offer()
    fabric.fail_reads()
    assert asker.read([0]).error is not None
    assert source.outcome(publication) is ReleaseOutcome.DECLINED


def test_an_answer_whose_asker_has_died_is_released_within_seconds(
    fabric: Fabric, source: Engine, asker: Engine
) -> None:
    asker.ask(source)
    question = source.question()
    fabric.wait_until_waiting()
    fabric.kill(asker.client)
    publication = source.answer(question, [9])
    until(lambda: ended(question))
    fabric.advance(12)
    assert source.outcome(publication) is not ReleaseOutcome.READ


@pytest.mark.parametrize(("ids", "first"), [([9], 0), ([9], 2 * BLOCK)], ids=["fewer tokens", "from behind"])
def test_an_answer_without_the_first_token_is_a_miss(source: Engine, asker: Engine, ids: list[int], first: int) -> None:
    asker.ask(source, first_token=BLOCK)
    publication = source.answer(source.question(), ids, first)
    found = asker.refusal()
    assert isinstance(found, PrefixMiss)
    assert (found.values["why"], f"[{first}, {first + BLOCK})" in str(found)) == ("NOT_CACHED", True)
    assert source.outcome(publication) is ReleaseOutcome.DECLINED


@pytest.mark.parametrize(
    ("prompt", "error"), [(ANOTHER, PromptMismatch), (Prompt.unknown, PromptUnmarked)], ids=["another", "unmarked"]
)
def test_an_answer_of_another_prompt_is_not_taken(
    source: Engine, asker: Engine, prompt: Prompt, error: type[KvferryError]
) -> None:
    asker.ask(source)
    publication = source.answer(source.question(), [9, 5, 3], prompt=prompt)
    assert isinstance(asker.refusal(), error)
    assert source.outcome(publication) is ReleaseOutcome.DECLINED
    assert asker.holds()


def test_an_answer_that_is_not_complete_in_time_is_a_miss(fabric: Fabric, source: Engine, asker: Engine) -> None:
    asker.ask(source)
    publication = source.answer(source.question(), [9], last=False)
    fabric.advance(5)
    found = asker.refusal()
    assert isinstance(found, PrefixMiss)
    assert found.values["why"] == "NO_ANSWER"
    assert source.outcome(publication) is ReleaseOutcome.DECLINED


def test_an_answer_may_come_in_steps(source: Engine, asker: Engine) -> None:
    asker.ask(source, progressive=True)
    publication = source.answer(source.question(), [9], last=False)
    assert not asker.offer().complete
    asker.worker.start(asker.port.attach("mine", {"full": Blocks([0, 1])}, (0, 2 * BLOCK)))
    source.port.publish_more(publication, {"full": Blocks([5], first_token=BLOCK, end_token=2 * BLOCK)}, last=True)

    def over() -> bool:
        for step in asker.port.grant_steps():
            asker.worker.add_step(step)
        asker.port.collect(asker.worker.finished())
        return bool(asker.port.finished().reads)

    until(over)
    assert asker.holds(9, 5)
    assert source.outcome(publication) is ReleaseOutcome.READ


def test_a_home_that_is_away_is_a_miss(
    fabric: Fabric, source: Engine, asker: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    fabric.stop_home()
    asker.ask(source)
    fabric.advance(3.5)
    found = asker.refusal()
    assert isinstance(found, PrefixMiss)
    assert found.values["why"] == "NO_ANSWER"
    # It has no question that could be withdrawn, and nothing is logged of each.
    fabric.advance(20)
    assert "notification" not in caplog.text


@pytest.mark.parametrize("restarts", [False, True], ids=["stays away", "restarts"])
def test_a_home_that_ends_during_a_question_is_a_miss(
    fabric: Fabric, source: Engine, asker: Engine, restarts: bool
) -> None:
    asker.ask(source)
    question = source.question()
    fabric.wait_until_waiting()
    fabric.stop_home()
    if restarts:
        fabric.start_home()
    fabric.advance(5)
    found = asker.refusal()
    assert isinstance(found, PrefixMiss)
    assert found.values["why"] == "NO_ANSWER"
    if not restarts:
        fabric.start_home()
    until(lambda: ended(question))
    # What is published all the same is released, after the leases that a home may have given before it restarted.
    publication = source.answer(question, [9])
    fabric.advance(40)
    assert source.outcome(publication) is not ReleaseOutcome.READ


@pytest.mark.parametrize("again", [False, True], ids=["stays away", "starts again"])
@pytest.mark.parametrize("named", [False, True], ids=["by reference", "by name"])
def test_an_engine_that_is_stopped_during_a_question_is_a_miss(
    fabric: Fabric, source: Engine, asker: Engine, named: bool, again: bool
) -> None:
    reference = source.port.engine_reference
    engine = Listing("p", parse_engine_reference(reference).home) if named else reference
    asker.port.ask("mine", engine, PROMPT, wait=2.0)
    source.question()
    fabric.wait_until_waiting()
    source.port.close()
    if again:
        # It was not asked.
        assert Engine(fabric, "p", source=True).port.questions() == []
    fabric.advance(0.5)
    found = asker.refusal()
    assert isinstance(found, PrefixMiss)
    assert found.values["why"] == "NO_ANSWER"
    assert outcomes(fabric) == {"UNANSWERED": 1}


def test_engines_ask_again_after_their_home_has_restarted(fabric: Fabric, source: Engine, asker: Engine) -> None:
    asker.ask(source)
    first = source.question()
    fabric.stop_home()
    fabric.start_home()
    asker.port.cancel("mine")
    until(lambda: ended(first))
    asker.ask(source, request_id="again")
    question = source.question()
    source.answer(question, [9])
    asker.offer("again")


def test_several_questions_have_their_own_answers(source: Engine, asker: Engine) -> None:
    for name in ("one", "two", "four"):
        asker.ask(source, Prompt([ord(name[0]), *IDS]), name)
    found: dict[int, Question] = {}

    def all_there() -> bool:
        found.update({int(question.prompt.token_ids[0]): question for question in source.port.questions()})
        return len(found) == 3

    until(all_there)
    assert len({question.number for question in found.values()}) == 3
    source.answer(found[ord("o")], [9])
    source.port.miss(found[ord("t")], MissReason.BUSY)
    source.answer(found[ord("f")], [5, 3])
    assert asker.offer("one").blocks() == {"full": Blocks([9], end_token=BLOCK)}
    assert isinstance(asker.refusal("two"), PrefixMiss)
    assert asker.offer("four").blocks() == {"full": Blocks([5, 3], end_token=2 * BLOCK)}


def test_an_engine_that_waits_for_news_is_woken_by_a_question(source: Engine, asker: Engine) -> None:
    asker.ask(source)
    until(lambda: source.port.wait_news(SOON) and bool(source.port.questions()))
    asker.port.cancel("mine")


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
def test_questions_are_told_whatever_a_function_that_hears_of_them_raises(
    source: Engine, asker: Engine, raised: type[BaseException]
) -> None:
    heard: list[str] = []

    def raises() -> None:
        raise raised("of the application")

    source.port.on_question(raises)
    source.port.on_question(lambda: heard.append("heard"))
    for number in (1, 2):
        asker.ask(source, request_id=f"request {number}")
        source.port.miss(source.question(), MissReason.NOT_CACHED)
        assert isinstance(asker.refusal(f"request {number}"), PrefixMiss)
        assert heard == ["heard"] * number


@pytest.mark.parametrize("restarted", [False, True], ids=["wrong key", "restarted"])
def test_the_engine_that_is_asked_is_the_one_of_the_reference(
    fabric: Fabric, source: Engine, asker: Engine, restarted: bool
) -> None:
    reference = source.port.engine_reference
    if restarted:
        source.port.close()
        Engine(fabric, "p", source=True)
    else:
        parsed = parse_engine_reference(reference)
        parsed.key = bytes(16)
        reference = format_reference(parsed)
    asker.port.ask("mine", reference, PROMPT, wait=2.0)
    assert isinstance(asker.refusal(), PeerRestarted if restarted else WrongKey)


def test_an_engine_is_asked_by_its_name_whatever_its_start(fabric: Fabric, source: Engine, asker: Engine) -> None:
    named = Listing("p", fabric.address)
    asker.port.ask("mine", named, PROMPT, wait=2.0)
    source.answer(source.question(), [9, 5])
    asker.offer()
    assert asker.read([0, 1]).error is None
    assert asker.holds(9, 5)
    source.port.close()
    restarted = Engine(fabric, "p", source=True)
    asker.port.ask("again", named, PROMPT, wait=2.0)
    restarted.answer(restarted.question(), [3])
    assert asker.offer("again").engine_id == "p"


def test_what_cannot_be_asked_is_refused_at_once(source: Engine, asker: Engine) -> None:
    wrong: list[dict[str, Any]] = [{"prompt": Prompt.unknown}, {"first_token": len(IDS)}, {"wait": 2.5}]
    for options in wrong:
        with pytest.raises(InvalidField):
            asker.ask(source, **options)
    with pytest.raises(BadReference):
        asker.port.ask("mine", "kvf1.nonsense", PROMPT)
    with pytest.raises(InvalidField):
        asker.port.ask("mine", ("p", "home:7423"), PROMPT)  # type: ignore[arg-type]
    with pytest.raises(HomeNotAllowed):
        asker.port.ask("mine", Listing("p", "home:7423"), PROMPT)
    asker.ask(source)
    with pytest.raises(WrongState):
        asker.ask(source)
    asker.port.cancel("mine")
    asker.port.close()
    with pytest.raises(Closed):
        asker.ask(source)
    assert asker.port.questions() == []


def test_a_closed_port_withdraws_what_it_has_asked(fabric: Fabric, source: Engine, asker: Engine) -> None:
    asker.ask(source)
    question = source.question()
    fabric.wait_until_waiting()
    asker.port.close()
    until(lambda: ended(question))
    assert outcomes(fabric) == {"WITHDRAWN": 1}


def test_a_prompt_of_two_hundred_thousand_tokens_is_asked_for(source: Engine, asker: Engine) -> None:
    prompt = Prompt(np.arange(200_000, dtype=np.uint32))
    asker.ask(source, prompt)
    question = source.question()
    assert question.prompt.digest(len(prompt)) == prompt.digest(len(prompt))
    source.answer(question, [9])
    asker.offer()
    assert asker.read([0]).error is None


def test_of_a_longer_prompt_its_beginning_is_asked_for(source: Engine, asker: Engine) -> None:
    prompt = Prompt(np.arange(300_000, dtype=np.uint32))
    asker.ask(source, prompt)
    question = source.question()
    assert len(question.prompt) == MAX_ASKED_TOKENS
    source.answer(question, [9])
    asker.offer()
    assert asker.read([0]).prompt == "matched"


# Without the ports.


class Fetcher:
    """A rank that asks by itself, and a source that answers through its session."""

    def __init__(self, fabric: Fabric) -> None:
        group = Group("full", block_tokens=BLOCK, num_blocks=BLOCKS)
        self.memory = np.full((2, BLOCKS, 1, BLOCK, 4), UNTOUCHED, np.float32)
        theirs = np.zeros_like(self.memory) + np.arange(BLOCKS, dtype=np.float32)[None, :, None, None, None]
        source = fabric.client()
        self.session = source.open_engine(EngineSpec("p", (group,)))
        source.register_cache(self.session.spec, tensors={"layer": theirs}, axes=AXES)
        self.cache = fabric.client().register_cache(
            EngineSpec("d", (group,)), tensors={"layer": self.memory}, axes=AXES
        )

    def fetch(self, prompt: Prompt = PROMPT, first: int = 0, ids: tuple[int, ...] = (0, 1, 2)) -> Read:
        blocks = {"full": Blocks(ids[first // BLOCK :], first_token=first)}
        return self.cache.fetch(self.session.engine_reference, prompt, blocks, wait=2.0)


@pytest.mark.parametrize("first", [0, BLOCK])
def test_a_rank_reads_what_there_is_and_says_where_it_ends(fabric: Fabric, first: int) -> None:
    made = Fetcher(fabric)
    read = made.fetch(first=first)
    (question,) = made.session.questions(SOON)
    assert question.first_token == first
    blocks = {"full": Blocks([9, 5], end_token=2 * BLOCK)}
    made.session.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    result = read.result(SOON)
    assert (result.end_token, result.prompt) == (2 * BLOCK, "matched")
    assert made.memory[0, :3, 0, 0, 0].tolist() == [9 if first == 0 else UNTOUCHED, 5, UNTOUCHED]


def test_a_rank_is_told_that_there_is_nothing(fabric: Fabric) -> None:
    made = Fetcher(fabric)
    read = made.fetch()
    (question,) = made.session.questions(SOON)
    made.session.miss(question, MissReason.NOT_CACHED)
    with pytest.raises(PrefixMiss):
        read.result(SOON)
    assert read.quiet
    # Its blocks are free.
    assert made.fetch().cancel()


def test_a_rank_that_gives_up_withdraws_its_question(fabric: Fabric) -> None:
    made = Fetcher(fabric)
    read = made.fetch()
    (question,) = made.session.questions(SOON)
    read.cancel()
    until(lambda: ended(question))
    assert outcomes(fabric) == {"WITHDRAWN": 1}


@pytest.mark.parametrize("by", ["reference", "name"])
def test_asyncio_programs_fetch_and_answer(fabric: Fabric, by: str) -> None:
    made = Fetcher(fabric)

    async def main() -> ReadResult:
        session, cache = AsyncSession(made.session), AsyncCache(made.cache)
        named = session.engine_reference if by == "reference" else Listing("p", fabric.address)
        read = cache.fetch(named, PROMPT, {"full": Blocks([0, 1, 2])}, wait=2.0)
        (question,) = await session.questions(SOON)
        blocks = {"full": Blocks([9], end_token=BLOCK)}
        await session.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
        return await read

    assert asyncio.run(main()).end_token == BLOCK
