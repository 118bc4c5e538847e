"""Budgets and limits of a home: a flood by some engines leaves room for the others."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import KvferryError, LimitReached, PublicationReleased, PublicationStale
from kvferry.geometry.blocks import BlockRuns
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Engine, Process, Role
from kvferry_server.domain.limits import Budget, Limits, MemoryBudget
from kvferry_server.domain.publications import Lease, PublicationRecord
from kvferry_server.domain.records import Records
from kvferry_server.domain.registry import Registry
from kvferry_server.domain.sources import Sources
from kvferry_server.domain.values import EngineRef
from kvferry_server.home.home import Home
from tests.support.parties import (
    GROUPS,
    SECRETS,
    TIMES,
    D,
    FakeClock,
    P,
    Scene,
    ask,
    done,
    key,
    offer,
    registration,
    start,
)

FLOOD = [start(f"flood-{letter}", letter) for letter in "abc"]


def refused(call: Callable[[], object]) -> str:
    """Return the limit at which a call is refused."""
    with pytest.raises(LimitReached) as caught:
        call()
    assert caught.value.retry_after
    return caught.value.values["limit"]


def flood(call: Callable[[int], object], most: int = 100_000) -> int:
    """Repeat a call until it is refused; return how often it succeeded."""
    for count in range(most):
        try:
            call(count + 1)
        except LimitReached:
            return count
    raise AssertionError("never refused")


def opened(sources: Sources, engine: EngineRef) -> None:
    sources._records.open(engine, SECRETS[engine]).groups = {group.name: group for group in GROUPS}
    sources.begin_snapshot(engine)
    sources.end_snapshot(engine, 0)


def test_budget_gives_one_holder_half_and_keeps_a_share_free_from_many() -> None:
    budget = Budget(1000, 0)
    while budget.fits("a"):
        budget.take("a")
    assert budget.held("a") == 500
    for holder in "bc":
        while budget.fits(holder):
            budget.take(holder)
    assert budget.fits("victim", 50)
    budget.give("a", 500)
    assert budget.held("a") == 0
    assert budget.fits("b", 100)


def test_memory_flooded_by_three_engines_has_room_for_a_fourth() -> None:
    budget = 4 << 20
    scene = Scene(limits=Limits(memory=budget, engine_memory=64 << 10))
    for engine in FLOOD:
        opened(scene.sources, engine)

        def publish(number: int, engine: EngineRef = engine) -> None:
            scene.sources.publish(engine, offer(number, payload=b"x" * 4096))

        assert flood(publish) > 0
        assert refused(partial(publish, 10_000)) == "memory"
    for number in range(1, 50):
        scene.publish(number)
        scene.report(scene.grant(number), 0)
        scene.sources.acknowledge(P, [number])


def test_memory_floor_of_an_engine_is_granted_beyond_a_used_up_budget() -> None:
    scene = Scene(limits=Limits(memory=1 << 20, engine_memory=64 << 10))
    for letter in "abcdefghijklmnopqrstuvwxyz":
        engine = start(f"flood-{letter}", letter)
        opened(scene.sources, engine)

        def publish(number: int, engine: EngineRef = engine) -> None:
            scene.sources.publish(engine, offer(number, payload=b"x" * 4096))

        flood(publish)
    for number in range(1, 8):
        scene.publish(number, payload=b"x" * 4096)


def test_engines_that_come_and_go_do_not_each_leave_a_floor_behind() -> None:
    """The leases on the publications of a stopped engine keep what it had, for a ttl each."""
    limits = Limits(engines=4, memory=1 << 20, engine_memory=64 << 10)
    scene, refusals = Scene(limits=limits), 0
    sources = [start(f"passing-{number}", chr(256 + number)) for number in range(100)]
    for source in sources:
        scene.registry.open_engine(source, SECRETS[source], "192.0.2.1")
        opened(scene.sources, source)
        for each in range(1, 15):
            try:
                scene.publish(each, source=source, payload=b"x" * 4096)
                scene.lessor.grant(ask(each, source=source))
            except LimitReached as error:
                refusals += error.values["limit"] == "memory"
        scene.registry.retire(source)
        assert scene.records.memory.used <= limits.memory + limits.engines * limits.engine_memory
    assert refusals
    for number in range(1, 8):
        scene.publish(number, payload=b"x" * 4096)
    scene.wait(1000.0)
    assert not any(map(scene.records.memory.held, sources))
    assert not scene.records.memory._host_of


def test_engines_of_one_host_share_the_memory_of_one_engine() -> None:
    memory = MemoryBudget(1000, 10, 4, retry_after=1)
    for engine in FLOOD[:2]:
        memory.comes_from(engine, "192.0.2.1")
        while True:
            try:
                memory.check(engine, 1)
            except LimitReached:
                break
            memory.take(engine, 1)
    assert 490 <= memory.used <= 520
    memory.comes_from(P, "192.0.2.2")
    memory.check(P, 200)
    # The bytes counted for a host move with its engine, and are freed with the engine's bytes.
    memory.comes_from(FLOOD[0], "192.0.2.3")
    memory.give(FLOOD[0], memory.held(FLOOD[0]))
    memory.give(FLOOD[1], memory.held(FLOOD[1]))
    assert memory.used == 0
    memory.check(FLOOD[1], 400)


def test_untaken_answers_count_against_their_reader_and_not_the_engine_asked() -> None:
    memory = MemoryBudget(1 << 20, 0, 4, retry_after=1)
    memory.take(P, 1 << 16)
    with ExitStack() as stack:
        # The reader uses the engine_id of its victim.
        assert flood(lambda _: stack.enter_context(memory.hold(P, "", 4096))) < 150
        assert memory.held(P) == 1 << 16
        memory.check(P, 1 << 17)
        for number in range(100):
            # Callers that cannot be told apart share one budget, but for a floor.
            stack.enter_context(memory.hold(f"reader {number}", "", 1000))
        assert refused(lambda: stack.enter_context(memory.hold("many", "", 1 << 19))) == "memory"
    assert memory.used == 1 << 16
    with memory.hold("many", "", 1 << 18):
        pass


def test_budget_floor_is_granted_down_to_the_last_of_the_capacity() -> None:
    shares = Budget(4, 4)
    assert flood_of(shares, "a") == 4
    assert Budget(4).floor == 1
    assert Budget(512).floor == 2
    # Beyond the floor a holder takes no more than stays free.
    shares = Budget(10, 2)
    shares.take("b", 4)
    assert flood_of(shares, "a") == 3
    assert not Budget(4, 4).fits("a", 5)


def flood_of(shares: Budget, holder: str) -> int:
    """Return how much a holder can take, one at a time."""
    count = 0
    while shares.fits(holder):
        shares.take(holder)
        count += 1
    return count


def test_readers_of_one_host_share_the_answers_of_one_reader() -> None:
    size = 1 << 17
    memory = MemoryBudget(8 * size, 0, 4, retry_after=1)
    with ExitStack() as stack:

        def ask_one(number: int, peer: str = "192.0.2.1") -> None:
            stack.enter_context(memory.hold(f"{peer} {number}", peer, size))

        assert flood(ask_one) == 4
        ask_one(1, "192.0.2.2")
    assert memory.used == 0
    with ExitStack() as stack:
        assert flood(ask_one) == 4


def test_host_opens_at_most_half_of_the_engines() -> None:
    registry = Registry(Records(FakeClock(), TIMES, Limits(engines=8)))

    def open_one(number: int, host: str = "192.0.2.1") -> None:
        ref = start(f"{host} {number}", chr(96 + number))
        registry.open_engine(ref, SECRETS[ref], host)

    assert flood(open_one) == 4
    open_one(1, "192.0.2.2")


def test_memory_that_was_taken_is_all_given_back() -> None:
    clock = FakeClock()
    home = Home(clock, TIMES, "home:1")
    scheduler = Process(P, Role.SCHEDULER)
    with home.turn():
        home.open_watch(scheduler, SECRETS[P])
        home.open_watch(Process(P, Role.RANK, 0), SECRETS[P])
        home.engines.register(registration(), SECRETS[P])
        lessor, sources = home.lessor, home.sources
        sources.begin_snapshot(P)
        sources.publish(P, offer(1))
        sources.abort(P, 1)
        clock.pass_by(TIMES.max_ttl)
        sources.acknowledge(P, [1])
        sources.end_snapshot(P, 1)
        sources.publish(P, offer(5, payload=b"x" * 100))  # Skips numbers 2 to 4.
        lease = lessor.grant(ask(5, parties=2))
        lessor.report(lease.lease_id, D, done(0))
        lessor.grant(ask(9))
        lessor.decline(P, 10, key(10))
        sources.abort(P, 11)
        assert home.memory.held(P) > 0
        home.close_watch(scheduler)
    for _ in range(20):
        clock.pass_by(100)
        with home.turn():
            pass
    assert home.memory.used == 0


def test_what_is_forgotten_is_not_kept_until_its_deadline() -> None:
    """A thousand requests a second would take a gigabyte in the time of a hold, which no budget counts."""
    scene = Scene()
    before = alive()
    for number in range(1, 101):
        ref = start(f"engine-{number}", chr(200 + number))
        scene.open(ref)
        scene.lose(ref)
        scene.registry.evict(ref)
        scene.publish(number)
        scene.sources.abort(P, number)
        scene.sources.acknowledge(P, [number])
    scene.told()
    scene.woken.clear()
    scene.feed.acknowledged(range(101))
    assert alive() == before


def alive() -> int:
    """Return how many publications and engines are in memory."""
    gc.collect()
    return sum(isinstance(one, PublicationRecord | Engine) for one in gc.get_objects())


def test_many_deadlines_that_move_earlier_take_little_memory() -> None:
    scene = Scene()
    for number in range(1, 10_001):
        scene.publish(number)
        scene.sources.abort(P, number)
        scene.sources.acknowledge(P, [number])
    assert len(scene.records.deadlines._heap) < 2000


def test_lease_has_the_memory_of_all_its_reports_from_the_start() -> None:
    """Otherwise the holder of one reference could fill the home's memory far beyond its budget."""
    scene, leases = Scene(limits=Limits(memory=4 << 20, engine_memory=64 << 10)), list[Lease]()
    scene.publish(1)
    flood(lambda number: leases.append(scene.grant(1, name=str(number), parties=4096)))
    for lease in leases:
        assert scene.report(lease, *range(4095)).verdict == pb.VERDICT_VALID
    assert scene.records.memory.used <= 4 << 20


@pytest.mark.parametrize("kind", ["publications", "runs", "waiting reads", "leases", "reports", "aborted", "read"])
def test_memory_accounted_is_about_the_memory_used(kind: str) -> None:
    scene = Scene(limits=Limits(reads=10**6))
    memory = scene.records.memory
    scene.publish(1)
    before = memory.held(P)
    tracemalloc.start()
    try:
        if kind == "publications":
            for number in range(2, 1000):
                scene.publish(number)
        elif kind == "runs":
            starts = tuple(2 * (index % 400) + 1 for index in range(20_000))
            groups = (BlockRuns("full", 0, 16 * 20_000, 0, starts, tuple([1] * 20_000)),)
            scene.publish(2, groups=groups)
        elif kind == "waiting reads":
            for number in range(2, 1000):
                scene.grant(number, name=str(number))
        elif kind == "leases":
            for number in range(1000):
                scene.grant(1, name=str(number))
        elif kind == "reports":
            lease = scene.grant(1, name="wide", parties=4096)
            for rank in range(4000):
                scene.report(lease, rank)
        elif kind == "read":
            for number in range(2, 1000):
                scene.publish(number)
                scene.report(scene.grant(number), 0)
                scene.sources.acknowledge(P, [number])
            scene.told()
            scene.woken.clear()
        else:
            for number in range(2, 1000):
                scene.sources.abort(P, number)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= 1.2 * (memory.held(P) - before)
    assert memory.held(P) - before <= 4 * taken


def test_aborts_of_publications_that_never_arrived_are_limited() -> None:
    scene = Scene(limits=Limits(publications=100))
    assert flood(lambda number: scene.sources.abort(P, number)) == 100
    # Aborts of publications that arrived are not limited: the source must be able to stop.
    scene.sources.acknowledge(P, [1])
    scene.publish(500)
    scene.sources.abort(P, 500)


def test_abort_refused_for_lack_of_room_may_be_repeated() -> None:
    scene = Scene(limits=Limits(publications=1))
    scene.sources.abort(P, 1)
    assert refused(lambda: scene.sources.abort(P, 2)) == "publications"
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]
    scene.sources.acknowledge(P, [1])
    scene.sources.abort(P, 2)
    assert scene.told() == [(2, ReleaseOutcome.ABORTED)]


def test_publications_that_have_not_arrived_are_limited() -> None:
    scene = Scene(limits=Limits(publications=4))
    for number in (1, 2):
        scene.lessor.decline(P, number, key(number))
        scene.grant(10 + number)
    assert refused(lambda: scene.grant(13)) == "publications"
    assert refused(lambda: scene.lessor.decline(P, 3, key(3))) == "publications"
    assert refused(lambda: scene.publish(14)) == "publications"
    # Those that are waited for, and have a place, arrive.
    scene.publish(11)
    scene.wait(TIMES.max_wait)
    scene.publish(14)


def test_leases_on_one_engine_leave_room_for_those_on_others() -> None:
    scene = Scene(limits=Limits(leases=100))
    opened(scene.sources, FLOOD[0])
    scene.sources.publish(FLOOD[0], offer(1))
    assert flood(lambda number: scene.lessor.grant(ask(1, name=str(number), source=FLOOD[0]))) == 50
    scene.publish(1)
    scene.grant(1)
    scene.wait(TIMES.ttl + TIMES.keep_outcome)
    assert flood(lambda number: scene.lessor.grant(ask(1, name=f"b{number}", source=FLOOD[0]))) == 50


def test_expected_reads_are_raised_by_a_reader_to_a_bound_and_by_a_source_beyond() -> None:
    scene = Scene(limits=Limits(raised_reads=3))
    scene.grant(1, expected_reads=2**32 - 1)
    publication = scene.publish(1)
    assert publication.expected_reads == 3
    scene.grant(1, expected_reads=2**32 - 1)
    assert publication.expected_reads == 3
    assert scene.publish(2, expected_reads=1000).expected_reads == 1000
    assert scene.grant(2, expected_reads=2).publication.expected_reads == 1000


# Restarts, and jumps of the clock.


def test_decline_is_kept_for_its_publication_during_recovery() -> None:
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    # A new request overtakes the snapshot by more than MAX_SKIPPED numbers.
    scene.publish(5000)
    scene.lessor.decline(P, 7, key(7))
    assert scene.publish(7).outcome is ReleaseOutcome.DECLINED
    scene.sources.end_snapshot(P, 5000)
    scene.wait(TIMES.max_ttl)
    assert scene.told() == [(7, ReleaseOutcome.DECLINED)]


def test_snapshot_overtaken_by_a_new_publication_is_complete() -> None:
    scene = Scene(recovering=True)
    scene.publish(5000)
    scene.sources.begin_snapshot(P)
    for number in (1, 2, 4999):
        scene.publish(number)
    scene.sources.end_snapshot(P, 4999)
    assert [scene.grant(number).live for number in (1, 2, 4999, 5000)] == [True] * 4


def test_snapshot_without_an_end_remembers_only_present_publications() -> None:
    scene = Scene()
    scene.sources.begin_snapshot(P)
    for number in range(1, 100):
        scene.publish(number)
        scene.sources.abort(P, number)
        scene.sources.acknowledge(P, [number])
    scene.publish(100)
    assert scene.records.of_engine(P).snapshot == {100}
    scene.sources.end_snapshot(P, 100)
    assert scene.grant(100).live


def test_publication_whose_release_is_acknowledged_does_not_arrive_again_during_recovery() -> None:
    scene = Scene(recovering=True)
    scene.publish(1)
    scene.sources.abort(P, 1)
    scene.wait(TIMES.max_ttl)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]
    scene.sources.acknowledge(P, [1])
    with pytest.raises(KvferryError):
        scene.grant(1)
    with pytest.raises(PublicationReleased):
        scene.publish(1)
    scene.sources.abort(P, 1)
    scene.wait(3 * TIMES.max_ttl)
    assert not scene.told()
    assert not scene.records.released(P)
    scene.sources.begin_snapshot(P)
    scene.sources.end_snapshot(P, 1)
    assert not scene.records.of_engine(P).publications
    with pytest.raises(PublicationStale):
        scene.publish(1)


@pytest.mark.parametrize("early", [1.0, 0.5, 0.001])
@pytest.mark.parametrize("end", ["abort", "decline", "last lease"])
def test_release_after_a_restart_waits_for_the_whole_max_ttl(early: float, end: str) -> None:
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    scene.publish(1)
    scene.sources.end_snapshot(P, 1)
    lease = scene.grant(1) if end == "last lease" else None
    scene.clock.pass_by(TIMES.ttl - 1)
    if lease is not None:
        scene.renew(lease)
    scene.clock.pass_by(TIMES.max_ttl - (TIMES.ttl - 1) - early)
    if lease is not None:
        scene.report(lease, 0)
    elif end == "abort":
        scene.sources.abort(P, 1)
    else:
        scene.lessor.decline(P, 1, key(1))
    assert not scene.told()
    scene.clock.pass_by(early)
    scene.records.advance()
    assert len(scene.told()) == 1


def test_overdue_leases_and_publications_end_before_a_grant() -> None:
    scene = Scene()
    publication = scene.publish(1)
    lease = scene.grant(1)
    # No timer has fired, and no call was made.
    scene.clock.pass_by(TIMES.final)
    with pytest.raises(KvferryError):
        scene.grant(1, name="late")
    assert scene.report(lease, 0).verdict != pb.VERDICT_VALID
    # The hold was over before the final deadline.
    assert publication.outcome is ReleaseOutcome.UNREAD
    assert scene.told() == [(1, ReleaseOutcome.UNREAD)]
