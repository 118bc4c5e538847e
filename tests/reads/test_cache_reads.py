"""The reads behind `Cache.read`, moment by moment: what is read, who is told what, and what a close waits for (R1, R4).

The home, sources and the transport do as a test says, since real ones do not fail at a moment that a test names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry._clock import now
from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.reader_lease import ReaderLease
from kvferry._memory.rank_memory import Tails
from kvferry._reads.cache_reads import CacheReads, OwnRead, Read, ReadResult, ReadState
from kvferry._reads.meters import ReadMeter
from kvferry._reads.rank_read import Wanted
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._transport.transfer import Transfer, TransferState
from kvferry._wire.publication import Told
from kvferry.errors import (
    Closed,
    EngineUnknown,
    KvferryError,
    PeerRestarted,
    PublicationAborted,
    TransferCancelled,
    TransferError,
    TransferExpired,
    TransferFailed,
    TransferStuck,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.reads.played_rank import BLOCKS, GRANTED, LONG, SOURCE, PlayedRank
from tests.support.played_home import PlayedHome

WANTED = Wanted(BLOCKS, (3, 5), frozenset({"layers.0"}))
LEASE_SECONDS = 60.0
RANK = 4


class Reading(PlayedRank):
    """The reads of one rank, its sources, and their home."""

    def __init__(self) -> None:
        super().__init__()
        self.home = PlayedHome(self.loop)
        self.layers: list[object] = []
        self.gone_sources: list[tuple[object, ...]] = []
        self.known_sources[SOURCE] = self.peer()
        self.lease = ReaderLease(b"l" * 16, now(), LEASE_SECONDS, 20.0)
        self.meter = ReadMeter()
        self.cache = CacheReads(
            self.loop,
            RANK,
            cast(LeaseHolder, self.home),
            cast(SourceEngines, self),
            self.reads,
            self.meter,
        )

    def peer(self) -> SourceEngine:
        peer = super().peer()

        def plan_of(layers: object) -> object:
            self.layers.append(layers)
            return peer.plan_of(cast(Any, None))

        return cast(SourceEngine, SimpleNamespace(plan_of=plan_of, agents=peer.agents))

    def gone(self, source: tuple[object, ...]) -> None:
        with self.changed:
            self.gone_sources.append(source)
            self.changed.notify_all()

    def read(self, reference: str = "a", within: float = LONG) -> OwnRead:
        home = Control(SOURCE[0], None, self.loop)
        parsed = pb.Reference(home=SOURCE[0], engine_id=SOURCE[1], incarnation=SOURCE[2], publication=7)
        request = AcquireRequest(home, parsed, reference, f"read-{reference}", 1, 0, self.loop.now() + within)
        return self.cache.begin_read(request, WANTED)

    def grant(self, reference: str = "a", answer: Exception | None = None) -> None:
        source = pb.EngineRef(engine_id=SOURCE[1], incarnation=SOURCE[2])
        part = GrantedPart(GRANTED, Told(payload=b"payload"))
        self.home.answer(reference, answer or Acquired(self.lease, source, "theirs", part))

    def reading(self, within: float = LONG) -> OwnRead:
        handle = self.read(within=within)
        self.grant()
        self.until(lambda: self.transfers)
        return handle

    def judged(self, verdict: pb.Verdict.ValueType | None, *said: str) -> None:
        assert self.home.heard("report", *said)
        self.home.judge(verdict)

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.cancel()
            if not transfer.quiet:
                transfer.fenced()
        self.cache.close(self.loop.now() + 20)
        super().close()


def error_of(task: OwnRead) -> KvferryError | None:
    """Wait for the end of a read; its error."""
    return Read(task).exception(30)


@pytest.fixture
def make() -> Iterator[Callable[..., Reading]]:
    made: list[Reading] = []

    def reading(**options: Any) -> Reading:
        made.append(Reading(**options))
        return made[-1]

    yield reading
    for one in made:
        one.close()


@pytest.fixture
def world(make: Callable[..., Reading]) -> Reading:
    return make()


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_successful_read_returns_its_bytes_and_whether_its_home_confirmed_it(world: Reading, confirmed: bool) -> None:
    plain = world.expand

    def expand(*wanted: object) -> object:
        found = cast(Any, plain(*wanted))
        staged = [cast(Any, SimpleNamespace(total_bytes=size)) for size in (4, 2)]
        sources = tuple(replace(source, staged=tuple(staged)) for source in found.sources)
        return SimpleNamespace(sources=sources, descriptors=3, pieces=8)

    world.expand = expand  # type: ignore[method-assign]
    handle = world.reading()
    assert Read(handle).state is ReadState.READING
    world.transfers[0].landed(10)
    world.judged(pb.VERDICT_VALID if confirmed else None)
    assert error_of(handle) is None
    assert Read(handle).result(0) == ReadResult(
        request_id="theirs",
        payload=b"payload",
        bytes=10,
        staged_bytes=6,
        descriptors=3,
        pieces=8,
        source_ranks=(1,),
        end_token=5,
        confirmed=confirmed,
    )
    assert handle.quiet
    ((report,),) = world.home.reports
    assert (report.rank, report.outcome, report.bytes) == (RANK, pb.RANK_OUTCOME_DONE, 10)
    # Nothing is kept of what has ended.
    assert not world.cache._running
    assert not world.meter._under_way


def test_a_read_that_outlasts_its_lease_fails(world: Reading) -> None:
    handle = world.reading()
    world.lease.deadline = now()
    world.transfers[0].landed(10)
    assert isinstance(error_of(handle), TransferExpired)


def test_an_answer_that_comes_too_late_is_an_error_in_the_log(world: Reading, caplog: pytest.LogCaptureFixture) -> None:
    handle = world.reading()
    world.transfers[0].landed(10)
    world.judged(None)
    assert error_of(handle) is None
    world.home.judge(pb.VERDICT_EXPIRED)
    assert (Read(handle).state, Read(handle).result(0).confirmed) == (ReadState.DONE, False)
    (alarm,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "its bytes may be wrong" in alarm.getMessage()


def test_a_share_is_started_as_requested_and_ends_with_its_lease(world: Reading) -> None:
    handle = world.reading()
    assert handle.share is not None
    order = handle.share.order
    assert (order.read_id, order.request_id, order.reference, order.publication) == ("read-a", "theirs", "a", 7)
    assert (order.source, order.lease, order.wanted.tails) == (SOURCE, world.lease, Tails.KEEP)
    assert world.expanded == [(GRANTED, BLOCKS, (3, 5))]
    assert set(world.layers) == {frozenset({"layers.0"})}
    assert world.transfers[0].deadline == world.lease.deadline


def test_a_read_ends_if_its_home_had_lost_the_source_before_the_grant(world: Reading) -> None:
    handle = world.read()
    # By a renewal, which was the last one.
    world.lease.renewed(now(), now(), LEASE_SECONDS, more=False, source_lost=True)
    world.grant()
    error = error_of(handle)
    assert isinstance(error, TransferFailed)
    assert "its home has lost it" in error.message
    assert error.quiet
    assert world.home.heard("drop", "report")


def test_a_read_ends_if_its_home_loses_the_source(world: Reading) -> None:
    handle = world.reading()
    world.lease.renewed(now(), now(), LEASE_SECONDS, more=False, source_lost=True)
    error = error_of(handle)
    assert isinstance(error, TransferFailed)
    assert "its home has lost it" in error.message
    assert world.transfers[0].state is TransferState.CANCELLED


def test_a_renewal_moves_the_end_of_the_transfer(world: Reading) -> None:
    waiting = world.read("waiting")
    world.reading()
    before = world.lease.deadline
    assert world.transfers[0].deadline == before
    world.lease.renewed(now() + 30, now(), LEASE_SECONDS, more=True)
    assert world.transfers[0].deadline == world.lease.deadline > before
    assert Read(waiting).state is ReadState.WAITING


def test_a_renewal_while_the_transfer_begins_moves_its_end(world: Reading) -> None:
    begin = world.transfer

    def renewed_meanwhile(*parts: Any, **how: Any) -> Transfer:
        world.lease.renewed(now() + 30, now(), LEASE_SECONDS, more=True)
        return begin(*parts, **how)

    world.transfer = renewed_meanwhile  # type: ignore[method-assign]
    handle = world.reading()
    world.transfers[0].landed(10)
    world.judged(pb.VERDICT_VALID)
    error_of(handle)
    assert world.transfers[0].deadline == world.lease.deadline


@pytest.mark.parametrize(
    ("error", "gone"),
    [(PeerRestarted("anew"), True), (EngineUnknown("who"), True), (PublicationAborted("no"), False)],
    ids=["restarted", "unknown", "aborted"],
)
def test_a_source_that_its_home_no_longer_knows_gets_another_handshake(
    world: Reading, error: KvferryError, *, gone: bool
) -> None:
    handle = world.read()
    world.grant(answer=error)
    found = error_of(handle)
    assert (found, handle.quiet, handle.share) == (error, True, None)
    world.worked()
    assert world.gone_sources == ([SOURCE] if gone else [])
    assert world.home.said == []


def test_a_share_that_cannot_begin_ends_its_read_at_the_home_too(world: Reading) -> None:
    handle = world.read()
    world.reads.close(world.loop.now() + 20)
    world.grant()
    error = error_of(handle)
    assert isinstance(error, Closed)
    assert handle.quiet
    assert world.home.heard("report", "drop")
    ((report,),) = world.home.reports
    assert (report.rank, report.outcome, report.bytes) == (RANK, pb.RANK_OUTCOME_FAILED, 0)
    assert handle.share is not None
    assert now() - 60 < handle.share.ended_at <= now()


def test_a_failed_read_ends_at_once_and_is_quiet_later(world: Reading) -> None:
    handle = world.reading()
    world.transfers[0].fail(TransferFailed("the peer died"))
    error = error_of(handle)
    assert isinstance(error, TransferFailed)
    assert (handle.quiet, error.quiet) == (False, False)
    assert not Read(handle).wait_quiet(0)
    # The coroutine that has told the end goes on to ask when it is quiet.
    world.worked()
    world.transfers[0].fenced()
    assert Read(handle).wait_quiet(30)
    assert error.quiet
    # Nothing is kept of what has ended.
    assert not world.cache._running
    assert not world.meter._under_way


def test_a_cancelled_read_stops_its_transfer(world: Reading) -> None:
    handle = world.reading()
    assert not handle.cancel()
    error = error_of(handle)
    assert isinstance(error, TransferCancelled)
    assert Read(handle).state is ReadState.CANCELLED
    assert world.transfers[0].state is TransferState.CANCELLED
    assert world.home.heard("report", "drop")
    assert [report.outcome for report in world.home.reports[0]] == [pb.RANK_OUTCOME_CANCELLED]


@pytest.mark.parametrize(
    ("within", "later", "kind"),
    [(LONG, LEASE_SECONDS, TransferExpired), (30.0, 31.0, TransferStuck)],
    ids=["lease", "time"],
)
def test_a_read_that_cannot_succeed_any_more_is_stopped(
    world: Reading, within: float, later: float, kind: type[KvferryError]
) -> None:
    handle = world.reading(within)
    world.loop.pass_time(later)
    error = error_of(handle)
    assert isinstance(error, kind)
    assert error.values["read_id"] == "read-a"
    assert world.transfers[0].state is TransferState.CANCELLED
    assert isinstance(error, TransferError)
    assert (handle.quiet, error.quiet) == (False, False)
    world.transfers[0].fenced()
    world.worked()
    # Also the error, which is none of the transfer's own, says so now.
    assert (handle.quiet, error.quiet) == (True, True)


def test_a_closed_cache_starts_nothing_and_cancels_all_reads(world: Reading) -> None:
    waiting, reading = world.read("waiting"), world.reading()
    threading.Thread(target=world.cache.close, args=(now() + 60,), daemon=True).start()
    for handle in (waiting, reading):
        error = error_of(handle)
        assert isinstance(error, TransferCancelled)
    with pytest.raises(Closed):
        world.read("late")
    world.transfers[0].fenced()


def test_a_close_waits_until_nothing_writes_any_more(world: Reading) -> None:
    handle, order = world.reading(), list[str]()

    def close() -> None:
        world.cache.close(now() + 60)
        order.append("closed")

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    error_of(handle)
    # One that does not wait has ended by now.
    closing.join(0.2)
    order.append("quiet")
    world.transfers[0].fenced()
    closing.join(30)
    assert order == ["quiet", "closed"]


def test_a_close_without_a_timeout_does_not_wait(world: Reading) -> None:
    handle = world.reading()
    # The read is not quiet until its agent is fenced.
    world.cache.close(0)
    error_of(handle)
    assert not handle.quiet


def test_a_close_waits_for_the_reports_of_the_end(world: Reading) -> None:
    """An accepted lease pins its source until the home receives its end."""
    handles = [world.read("a"), world.read("b")]
    world.worked()
    world.cache.close(now() + 30)
    assert world.home.said == ["gave up", "gave up"]
    assert all(handle.ended.done() for handle in handles)


@pytest.mark.parametrize("where", ["waiting", "reading", "judging"])
def test_a_read_whose_client_ends_first_gets_an_end(world: Reading, where: str) -> None:
    """A caller that waits for the result would wait for ever."""
    handle = world.read() if where == "waiting" else world.reading()
    if where == "judging":
        world.transfers[0].landed(10)
        assert world.home.heard("report")
    world.cache.close(0)
    world.loop.close()
    error = error_of(handle)
    # All has arrived in time, and no home has said that it did not.
    assert isinstance(error, TransferCancelled) is (where != "judging")
    assert (error is None) is (where == "judging")


def test_a_grant_whose_blocks_cannot_be_taken_ends_its_read(world: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvferry._reads.cache_reads.taken_end", fails)
    handle = world.read()
    world.grant()
    error = error_of(handle)
    assert isinstance(error, TransferFailed)
    assert "a bug" in error.message
    assert world.home.heard("drop", "cancel")
