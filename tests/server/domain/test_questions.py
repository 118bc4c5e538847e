"""PROTOCOL, Asking for a prefix: questions at the home of the engine that is asked, and how each ends."""

from __future__ import annotations

import logging
import math
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvferry._wire.authority import question_name
from kvferry._wire.outcomes import MissReason, ReleaseOutcome
from kvferry.errors import (
    EngineUnknown,
    HomeRecovering,
    LimitReached,
    PrefixMiss,
    PublicationReleased,
    RouterKeyUsed,
    ServerDraining,
    WrongKey,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_QUESTIONS, Limits
from kvferry_server.domain.publications import Lease, PublicationRecord
from kvferry_server.domain.router_keys import QUESTION_BYTES, Ask, Question, QuestionOutcome, WaitingRead
from kvferry_server.domain.routing import Routing
from kvferry_server.domain.times import ANSWER_HOLD, ENDED_KEPT, Times
from kvferry_server.domain.values import EngineRef, RouterKey
from tests.support.parties import P2, SECRETS, TIMES, D, E, P, Scene, arrived, ask, registration

WAIT = 0.25
MIB = 1 << 20


def key(name: str = "first") -> RouterKey:
    """The router key of a question that a test calls by a short name."""
    secret = name.encode().ljust(16, b".")
    return RouterKey(question_name(secret), secret)


def question(name: str = "first", asker: EngineRef = D, host: str = "", size: int = 100, wait: float = WAIT) -> Ask:
    return Ask(key(name), f"reference of {name}", b"t" * size, 0, wait, asker, host)


class Asked:
    """A home's records with a source whose scheduler and ranks are there, and readers that ask it."""

    def __init__(self, times: Times = TIMES, limits: Limits | None = None, recovering: bool = False) -> None:
        self.scene = Scene(times, limits, recovering)
        self.scene.registry.register(registration(), SECRETS[P])
        self.records, self.routing = self.scene.records, Routing(self.scene.records)
        self._heard = self.scene.feed.sequence

    def ask(self, name: str = "first", source: EngineRef = P, **changes: object) -> None:
        self.routing.ask(source, question(name, **changes))  # type: ignore[arg-type]

    def heard(self) -> list[str | int]:
        """What the source's Watch has been told of questions since the last call: references, and numbers of ends."""
        told = [event for _, event in self.scene.feed.after(self._heard)]
        self._heard = self.scene.feed.sequence
        asked = [event.ask.reference for event in told if isinstance(event, Question) and event.open]
        return [*asked, *(event.number for event in told if isinstance(event, pb.QuestionEnded))]

    def wait_for(self, name: str = "first") -> WaitingRead:
        """Begin a read that waits for an answer."""
        return self.routing.wait([P], key(name), ask(name=name))

    def find(self, name: str = "first") -> PublicationRecord | None:
        return self.routing.find([P], key(name))

    def withdraw(self, name: str = "first", **changes: bool) -> None:
        self.routing.decline([P], key(name), D, **changes)

    def answer(self, name: str = "first", number: int = 1) -> PublicationRecord:
        return self.scene.publish(number, router_key=key(name))

    def outcomes(self) -> Counter[QuestionOutcome]:
        """Questions that have ended, without the outcomes that none had."""
        return +self.records.journal.questions


@pytest.fixture
def asked() -> Asked:
    return Asked()


def missed(call: Callable[[], object]) -> str:
    """Return why a call is answered with a miss."""
    with pytest.raises(PrefixMiss) as caught:
        call()
    assert caught.value.values["engine_id"] == P.engine_id
    assert not caught.value.retryable
    return caught.value.values["why"]


def refused(call: Callable[[], object]) -> str:
    """Return the limit at which a call is refused."""
    with pytest.raises(LimitReached) as caught:
        call()
    assert caught.value.retry_after
    return caught.value.values["limit"]


def test_question_reaches_the_source_and_its_publication_the_asker(asked: Asked) -> None:
    asked.ask()
    assert asked.heard() == ["reference of first"]
    waiting = asked.wait_for()
    assert asked.find() is None
    asked.scene.woken.clear()
    publication = asked.answer()
    assert waiting.router_key.name in asked.scene.woken
    assert asked.find() is publication
    assert asked.heard() == [1]
    assert asked.outcomes() == {QuestionOutcome.ANSWERED: 1}
    # The asker reads it like any publication, after the question's time as well.
    asked.scene.wait(WAIT)
    lease = asked.scene.grant()
    asked.scene.report(lease, 0)
    assert asked.scene.told() == [(1, ReleaseOutcome.READ)]


@pytest.mark.parametrize("reason", [MissReason.NOT_CACHED, MissReason.BUSY, MissReason.UNSUPPORTED])
def test_question_that_is_missed_ends_the_reads_that_wait(asked: Asked, reason: MissReason) -> None:
    asked.ask()
    waiting = asked.wait_for()
    asked.scene.woken.clear()
    for _ in range(2):
        asked.scene.sources.miss(P, 1, reason)
    assert waiting.router_key.name in asked.scene.woken
    assert missed(asked.find) == reason.name
    assert missed(asked.ask) == reason.name
    assert asked.heard()[-1:] == [1]
    assert asked.outcomes() == {QuestionOutcome.MISSED: 1}
    # A miss with a number of no question, or of another engine's, ends nothing.
    asked.ask("second")
    asked.scene.sources.miss(P, 7, reason)
    asked.scene.open(E)
    asked.scene.sources.miss(E, 2, reason)
    assert asked.find("second") is None


def test_question_without_an_answer_in_time_is_a_miss(asked: Asked) -> None:
    asked.ask()
    waiting = asked.wait_for()
    asked.scene.wait(WAIT / 2)
    assert asked.find() is None
    asked.scene.woken.clear()
    asked.scene.wait(WAIT / 2)
    assert waiting.router_key.name in asked.scene.woken
    assert missed(asked.find) == "NO_ANSWER"
    assert asked.outcomes() == {QuestionOutcome.UNANSWERED: 1}
    asked.scene.sources.miss(P, 1, MissReason.BUSY)
    assert missed(asked.find) == "NO_ANSWER"


@pytest.mark.parametrize("late", [0.0, ENDED_KEPT, 1000.0])
def test_publication_after_the_end_of_its_question_is_released_at_once(asked: Asked, late: float) -> None:
    """However much later: the home needs no record of the question."""
    asked.ask()
    asked.scene.wait(WAIT + late)
    asked.answer()
    assert asked.scene.told() == [(1, ReleaseOutcome.DECLINED)]
    with pytest.raises(PublicationReleased):
        asked.scene.grant()
    assert asked.outcomes() == {QuestionOutcome.UNANSWERED: 1}


def test_asker_that_comes_after_a_late_answer_is_told_of_the_miss(asked: Asked) -> None:
    """Not of the release of a publication that it never had."""
    asked.ask()
    asked.scene.wait(WAIT)
    asked.answer()
    assert missed(asked.find) == "NO_ANSWER"
    assert missed(asked.ask) == "NO_ANSWER"
    asked.withdraw()
    assert asked.scene.told() == [(1, ReleaseOutcome.DECLINED)]
    asked.ask("second")
    asked.scene.sources.miss(P, 2, MissReason.BUSY)
    asked.answer("second", 2)
    assert missed(lambda: asked.find("second")) == "BUSY"


def test_publication_for_a_question_that_was_never_asked_is_released_at_once(asked: Asked) -> None:
    asked.answer()
    assert asked.scene.told() == [(1, ReleaseOutcome.DECLINED)]


def test_publication_under_a_routers_key_is_held_as_ever(asked: Asked) -> None:
    asked.scene.publish(router_key=RouterKey("room-7", b"k" * 16))
    asked.scene.wait(TIMES.hold - 1)
    assert not asked.scene.told()


@pytest.mark.parametrize(("hold", "held"), [(120.0, ANSWER_HOLD), (3.0, 3.0)])
def test_answer_is_held_for_a_short_time(hold: float, held: float) -> None:
    asked = Asked(Times(hold=hold))
    asked.ask()
    asked.answer()
    asked.scene.wait(held - 0.25)
    assert not asked.scene.told()
    lease = asked.scene.grant()
    asked.scene.wait(1)
    asked.scene.cancel(lease)
    asked.scene.wait(held - 0.25)
    assert not asked.scene.told()
    asked.scene.wait(0.25)
    assert asked.scene.told() == [(1, ReleaseOutcome.UNREAD)]


def test_answer_that_arrives_twice_counts_once(asked: Asked) -> None:
    asked.ask()
    publication = asked.answer()
    assert asked.answer() is publication
    assert not asked.scene.told()
    # Neither is the next question answered by it, nor may another publication have its key.
    asked.ask("second")
    with pytest.raises(RouterKeyUsed):
        asked.answer("first", number=2)
    assert asked.find("second") is None
    assert asked.outcomes() == {QuestionOutcome.ANSWERED: 1}


def test_answer_with_the_key_of_another_question_leaves_the_own_question_open(asked: Asked) -> None:
    """The reader compares the marks, which are of another prompt; the home knows no tokens."""
    asked.ask("first")
    asked.ask("second", asker=E)
    publication = asked.answer("second")
    assert asked.find("second") is publication
    assert asked.find("first") is None
    asked.scene.wait(WAIT)
    assert missed(lambda: asked.find("first")) == "NO_ANSWER"


def test_question_asked_again_is_the_same_with_the_time_that_it_had(asked: Asked) -> None:
    asked.ask()
    asked.scene.wait(WAIT / 2)
    asked.ask(size=200, wait=2.0)
    asked.ask(asker=E)
    assert asked.heard() == ["reference of first"]
    asked.scene.wait(WAIT / 2)
    assert missed(asked.find) == "NO_ANSWER"
    assert sum(asked.outcomes().values()) == 1


def test_question_asked_again_after_its_answer_asks_nothing(asked: Asked) -> None:
    asked.ask()
    asked.answer()
    asked.heard()
    asked.ask()
    assert not asked.heard()
    asked.withdraw()
    asked.scene.sources.acknowledge(P, [1])
    with pytest.raises(PublicationReleased):
        asked.ask()
    assert asked.outcomes() == {QuestionOutcome.ANSWERED: 1}


def test_withdrawn_question_ends_and_does_not_begin_again(asked: Asked) -> None:
    asked.ask()
    asked.withdraw()
    asked.withdraw()
    assert asked.heard() == [1]
    assert missed(asked.ask) == "NO_ANSWER"
    assert asked.outcomes() == {QuestionOutcome.WITHDRAWN: 1}
    asked.answer()
    assert asked.scene.told() == [(1, ReleaseOutcome.DECLINED)]
    # A decline that overtakes its question, too.
    asked.withdraw("second")
    with pytest.raises(PublicationReleased):
        asked.ask("second")
    assert asked.heard() == []


def test_question_whose_publication_the_source_gives_up_is_a_miss(asked: Asked) -> None:
    """Its client withdraws a router's reference when the home has refused the publication."""
    asked.ask()
    asked.withdraw(not_published=True)
    assert missed(asked.find) == "NO_ANSWER"
    assert asked.outcomes() == {QuestionOutcome.UNANSWERED: 1}


def test_name_of_a_question_is_derived_from_its_key() -> None:
    """So nobody can make a source publish under a name that a router, or another asker, uses."""
    assert key("first").of_question
    assert not RouterKey(key("first").name, key("second").key).of_question
    assert not RouterKey("room-7", b"k" * 16).of_question


def test_name_of_a_question_with_another_key_gives_nothing_away(asked: Asked) -> None:
    asked.ask()
    stranger = RouterKey(key().name, b"?" * 16)
    assert asked.routing.find([P], stranger) is None
    asked.routing.decline([P], stranger, E)
    asked.answer()
    with pytest.raises(WrongKey):
        asked.routing.find([P], stranger)
    assert asked.find() is not None


def test_asker_takes_at_most_half_of_the_questions(asked: Asked) -> None:
    for number in range(MAX_QUESTIONS // 2):
        asked.ask(f"{number}", host="192.0.2.1")
    assert refused(lambda: asked.ask("more", host="192.0.2.1", asker=E)) == "questions"
    # Answers and misses make room at once.
    asked.scene.sources.miss(P, 1, MissReason.NOT_CACHED)
    asked.ask("more", host="192.0.2.1")
    asked.answer("more")
    asked.ask("still more", host="192.0.2.1")
    for number in range(MAX_QUESTIONS // 4):
        asked.ask(f"other {number}", host="192.0.2.2")
    assert refused(lambda: asked.ask("other more", host="192.0.2.2")) == "questions"
    asked.ask("of a third")


@pytest.mark.parametrize("end", ["withdrawn", "unanswered"])
def test_question_that_the_source_did_not_answer_keeps_its_place_for_a_while(asked: Asked, end: str) -> None:
    """Otherwise an asker that withdraws, or waits for a moment only, could send a source questions without end."""
    for number in range(MAX_QUESTIONS // 2):
        asked.ask(f"{number}", wait=0.001)
        if end == "withdrawn":
            asked.withdraw(f"{number}")
    asked.scene.wait(ENDED_KEPT - 0.25)
    assert refused(lambda: asked.ask("more")) == "questions"
    asked.scene.wait(0.5)
    asked.ask("more")


def test_end_of_a_question_is_remembered_for_a_while(asked: Asked) -> None:
    asked.ask()
    asked.scene.sources.miss(P, 1, MissReason.NOT_CACHED)
    asked.scene.wait(ENDED_KEPT - 0.25)
    assert missed(asked.find) == "NOT_CACHED"
    asked.scene.wait(0.25)
    assert asked.find() is None
    assert asked.records.deadlines.next_deadline() == math.inf


def test_flood_of_misses_fills_neither_the_feed_nor_the_memory_of_the_source() -> None:
    asked = Asked(limits=Limits(memory=8 * MIB, engine_memory=64 << 10))
    held = asked.records.memory.held(P)

    def miss_all() -> None:
        for number in range(1, 100_000):
            asked.ask(f"{number}")
            asked.scene.sources.miss(P, number, MissReason.NOT_CACHED)

    assert refused(miss_all) == "memory"
    assert asked.records.memory.held(P) == held
    assert len(asked.scene.feed.after(0)) <= MAX_QUESTIONS
    assert missed(lambda: asked.find("1")) == "NOT_CACHED"
    asked.ask("from elsewhere", asker=E, host="192.0.2.9")
    asked.scene.wait(ENDED_KEPT)
    asked.ask("more")


@pytest.mark.parametrize("ended", [True, False])
def test_memory_accounted_for_questions_is_about_the_memory_used(asked: Asked, ended: bool) -> None:
    before = asked.records.memory.used
    tracemalloc.start()
    try:
        for number in range(1, 1001 if ended else MAX_QUESTIONS // 2):
            asked.ask(f"{number}", size=10_000)
            if ended:
                asked.scene.sources.miss(P, number, MissReason.BUSY)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    accounted = asked.records.memory.used - before
    assert taken <= 1.2 * accounted
    assert accounted <= 4 * taken


def test_prompts_count_against_the_asker_and_leave_the_source_its_memory() -> None:
    asked = Asked(limits=Limits(memory=8 * MIB, engine_memory=64 << 10))
    used = asked.records.memory.used
    for name in ("1", "2", "3"):
        asked.ask(name, host="192.0.2.1", size=MIB)
    assert refused(lambda: asked.ask("4", host="192.0.2.1", size=2 * MIB)) == "memory"
    # Another host, and the source itself, have room left.
    asked.ask("5", host="192.0.2.2", size=MIB)
    asked.scene.publish(9, payload=b"x" * 1000)
    assert asked.records.memory.used - used > 4 * MIB
    asked.scene.wait(WAIT)
    assert asked.records.memory.used - used < 64 << 10


def test_prompt_of_an_ended_question_is_kept_nowhere(asked: Asked) -> None:
    ends: dict[str, Callable[[], object]] = {
        "1": lambda: asked.withdraw("1"),
        "2": lambda: asked.answer("2", 2),
        "3": lambda: asked.scene.sources.miss(P, 3, MissReason.BUSY),
        "4": lambda: asked.scene.wait(WAIT),
    }
    for name, end in ends.items():
        prompt = bytes(1000)
        before = sys.getrefcount(prompt)
        asked.routing.ask(P, Ask(key(name), "reference", prompt, 0, WAIT, D))
        assert sys.getrefcount(prompt) > before
        end()
        assert sys.getrefcount(prompt) == before, name


@pytest.mark.parametrize("how", ["replaced", "retired", "evicted"])
def test_questions_end_with_their_engine(asked: Asked, how: str) -> None:
    asked.ask(wait=2.0)
    waiting = asked.wait_for()
    asked.scene.woken.clear()
    if how == "retired":
        asked.scene.registry.retire(P)
    elif how == "evicted":
        asked.scene.registry.evict(P)
    else:
        asked.scene.lose()
        asked.scene.open(P2)
    assert waiting.router_key.name in asked.scene.woken
    assert asked.outcomes() == {QuestionOutcome.UNANSWERED: 1}
    with pytest.raises(EngineUnknown):
        asked.ask("second")
    asked.routing.end_wait(waiting)
    # Neither the deadline of its question nor its memory is left.
    asked.scene.wait(5)
    assert asked.records.memory.used == 0


@pytest.mark.parametrize("how", ["retired", "evicted"])
def test_questions_end_with_an_engine_whose_last_publication_is_due_at_that_moment(asked: Asked, how: str) -> None:
    """The home forgets such an engine at once, and must not keep its questions: their deadlines would stop it."""
    asked.scene.publish()
    asked.scene.wait(TIMES.hold - 0.125)
    asked.ask(wait=2.0)
    waiting = asked.wait_for()
    asked.scene.woken.clear()
    # The timers are late, as they always are by some microseconds.
    asked.scene.clock.pass_by(0.25)
    if how == "retired":
        asked.scene.registry.retire(P)
    else:
        asked.scene.registry.evict(P)
    assert asked.outcomes() == {QuestionOutcome.UNANSWERED: 1}
    assert waiting.router_key.name in asked.scene.woken
    asked.routing.end_wait(waiting)
    asked.scene.wait(5)
    assert asked.records.memory.used == 0


def test_question_to_one_incarnation_is_not_answered_by_the_next(asked: Asked) -> None:
    asked.ask()
    asked.scene.lose()
    asked.scene.open(P2)
    asked.scene.sources.begin_snapshot(P2)
    asked.scene.sources.end_snapshot(P2, 0)
    asked.scene.registry.register(registration(P2), SECRETS[P2])
    asked.scene.publish(1, source=P2, router_key=key())
    asked.ask(source=P2)
    (publication,) = arrived(asked.records)
    assert publication.outcome is ReleaseOutcome.DECLINED


def test_engine_that_nobody_can_ask_or_read_from_now_is_a_miss(asked: Asked) -> None:
    asked.scene.registry.close_engine(P)
    assert missed(asked.ask) == "NO_ANSWER"
    asked.scene.open(P)
    asked.scene.registry.open_rank(P, SECRETS[P], 0)
    asked.scene.registry.close_rank(P, 0)
    asked.scene.wait(TIMES.engine_ttl)
    assert missed(asked.ask) == "NO_ANSWER"
    assert not asked.outcomes()
    # Nothing is remembered of it: the same question may be asked again.
    asked.scene.registry.register(registration(), SECRETS[P])
    asked.ask()
    assert asked.find() is None


def test_draining_home_and_recovering_engine_are_asked_again_later() -> None:
    asked = Asked(recovering=True)
    with pytest.raises(HomeRecovering):
        asked.ask()
    asked = Asked()
    asked.ask("before")
    asked.records.draining = True
    with pytest.raises(ServerDraining):
        asked.ask()
    # The answers that come while it drains are misses, as publications are refused.
    asked.ask("before")
    asked.scene.sources.miss(P, 1, MissReason.BUSY)
    assert missed(lambda: asked.find("before")) == "BUSY"


def test_answer_in_the_snapshot_of_a_restarted_home_is_held_for_its_reader() -> None:
    asked = Asked(recovering=True)
    asked.scene.sources.begin_snapshot(P)
    publication = asked.answer()
    asked.scene.sources.end_snapshot(P, 1)
    assert publication.grantable
    asked.scene.grant()
    assert asked.find() is publication


def test_ended_questions_are_told_to_a_resumed_watch_and_open_ones_are_state(asked: Asked) -> None:
    asked.ask("1")
    asked.ask("2")
    seen = asked.scene.feed.sequence
    asked.withdraw("1")
    asked.ask("3")
    told = [event for _, event in asked.scene.feed.after(seen)]
    assert [event.number for event in told if isinstance(event, Question | pb.QuestionEnded)] == [1, 3]
    assert [each.number for each in asked.records.of_engine(P).router_keys.open_questions.values()] == [2, 3]
    # A Watch from before does not hear of what has begun and ended meanwhile.
    events = [event for _, event in asked.scene.feed.after(0)]
    assert [event.number for event in events if isinstance(event, Question)] == [2, 3]
    assert asked.scene.feed.dropped_after(0) == 0


def test_question_is_logged_without_its_tokens_and_keys(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvferry_server.events")
    asked.ask()
    asked.scene.sources.miss(P, 1, MissReason.NOT_CACHED)
    (record,) = [each for each in caplog.records if getattr(each, "event", "") == "question_ended"]
    fields = vars(record)
    assert (fields["engine_id"], fields["reader_id"], fields["question"]) == (P.engine_id, D.engine_id, 1)
    assert (fields["outcome"], fields["reason"]) == ("MISSED", "NOT_CACHED")
    assert "reference of" not in record.getMessage()
    assert key().name not in record.getMessage()


def test_memory_of_a_question_is_all_given_back(asked: Asked) -> None:
    memory = asked.records.memory
    before, held = memory.used, memory.held(P)
    asked.ask("1")
    asked.ask("2")
    assert memory.used - before > 2 * QUESTION_BYTES + 200
    asked.scene.sources.miss(P, 1, MissReason.NOT_CACHED)
    asked.withdraw("2")
    asked.ask("3")
    asked.answer("3")
    asked.scene.wait(ENDED_KEPT)
    assert memory.used - before == memory.held(P) - held


def test_a_decline_that_may_be_meant_for_another_home_does_not_look_at_all_leases() -> None:
    """Any node server may be sent a thousand of them in a call, and a home has a quarter of a million leases."""
    asked, looked = Asked(), False

    class Leases(dict[EngineRef, dict[int, Lease | WaitingRead]]):
        def values(self) -> Any:
            nonlocal looked
            looked = True
            return super().values()

    asked.records.reads_by_source = Leases(asked.records.reads_by_source)
    assert not asked.routing.decline([P], key("unknown"), D, elsewhere=True)
    asked.wait_for()
    assert asked.routing.decline([P], key("first"), D, elsewhere=True)
    assert not looked
