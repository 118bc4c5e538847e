"""A read waits for its publication without a thread, whatever its home answers, and its end comes once."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group
from kvferry._clock import now, to_duration
from kvferry._control import acquisition
from kvferry._control.backoff import BACKOFF_FIRST
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedSteps
from kvferry._wire.reference import format_reference, parse_reference, router_reference
from kvferry._wire.status import to_notification_error
from kvferry.errors import (
    BadReference,
    Closed,
    HomeRecovering,
    InternalError,
    InvalidField,
    KvferryError,
    LeaseEnded,
    PublicationAborted,
    PublicationTimeout,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import reference
from tests.control.polling import FIRST, SECOND, Reading, accepted, acquired, reading, step
from tests.control.scripted import polled
from tests.support.blocking_control import BlockingControl, on_loop
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import until


def recorded_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of acquisitions from now on."""
    pauses = list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(seconds)

    patched = SimpleNamespace(sleep=sleep, wait=asyncio.wait, CancelledError=asyncio.CancelledError)
    monkeypatch.setattr(acquisition, "asyncio", patched)
    return pauses


def test_each_call_names_the_steps_received_and_follows_news_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_pauses(monkeypatch)

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=accepted())
        number = request.next_step
        last = number == 2
        return polled(blocks=[step(number)], complete=pb.Complete(payload=b"token", steps=3) if last else None)

    with reading(tmp_path, poll) as (server, read):
        read.start()
        got = acquired(read.outcome())
        assert got.lease.lease_id == FIRST
        assert (got.request_id, got.part.told.payload) == ("told", b"token")
        assert got.part.blocks["full"].ids.tolist() == [1, 2, 3]
        assert [(asked.lease_id, asked.next_step) for asked in server.asked] == [
            (b"", 0),
            (FIRST, 0),
            (FIRST, 1),
            (FIRST, 2),
        ]
        assert len({asked.read_id for asked in server.asked}) == 1
        assert all(asked.HasField("wait") for asked in server.asked)
        assert got.lease in read.renewals._kept
        assert not read.given_back
        assert pauses == []


def test_a_read_with_a_routers_reference_goes_on_with_the_publications_own(tmp_path: Path) -> None:
    own = reference("home:1")

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if request.lease_id:
            return polled(blocks=[step(0)], complete=pb.Complete(steps=1))
        told = accepted()
        told.reference, told.publication = own, 1
        told.source.engine_id, told.source.incarnation = "source", b"i" * 16
        return polled(accepted=told)

    with reading(tmp_path, poll) as (server, read):
        given = router_reference("home:1", "source")
        read.start(text=given)
        acquired(read.outcome())
        assert [asked.reference for asked in server.asked] == [given, own]


def test_a_lease_that_came_after_a_long_wait_is_asked_for_again(tmp_path: Path) -> None:
    """A home grants a read under a router's key when its publication comes, which may be later than a lease lasts, and
    the reader counts the lease's time from its question. The first answer says that there is a lease, the second how
    much is left of it."""
    own = reference("home:1")

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        told = accepted()
        told.reference, told.publication = own, 1
        told.source.engine_id, told.source.incarnation = "source", b"i" * 16
        if request.reference != own:
            told.remaining.CopyFrom(to_duration(0.2))
            told.renew_every.CopyFrom(to_duration(0.1))
            threading.Event().wait(0.3)
        return polled(accepted=told, blocks=[step(0)], complete=pb.Complete(steps=1))

    with reading(tmp_path, poll) as (server, read):
        given = router_reference("home:1", "source")
        read.start(text=given)
        got = acquired(read.outcome())
        assert got.lease.live(now())
        assert got.part.blocks["full"].ids.tolist() == [1]
        assert got.lease in read.renewals._kept
        assert [(asked.reference, asked.lease_id) for asked in server.asked] == [(given, b""), (own, b"")]
        assert not read.given_back


def test_a_lease_whose_first_answer_was_late_is_asked_for_again_once(tmp_path: Path) -> None:
    """The home stood still, or could not be reached, while it was asked. It has granted a whole lease since."""

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        told = accepted()
        told.remaining.CopyFrom(to_duration(0.2))
        told.renew_every.CopyFrom(to_duration(0.1))
        if len(server.asked) == 1:
            threading.Event().wait(0.3)
        elif len(server.asked) == 2:
            told.remaining.CopyFrom(to_duration(60))
        return polled(accepted=told, blocks=[step(0)], complete=pb.Complete(steps=1))

    with reading(tmp_path, poll) as (server, read):
        read.start()
        got = acquired(read.outcome())
        assert got.lease.live(now())
        assert got.part.blocks["full"].ids.tolist() == [1]
        assert got.lease in read.renewals._kept
        assert [asked.lease_id for asked in server.asked] == [b"", b""]
        assert not read.given_back


def test_a_home_that_is_always_late_is_not_asked_for_ever(tmp_path: Path) -> None:
    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        told = pb.Accepted(lease_id=FIRST, remaining=to_duration(0.001), renew_every=to_duration(20))
        return polled(accepted=told, blocks=[step(0)], complete=pb.Complete(steps=1))

    with reading(tmp_path, poll) as (server, read):
        read.start()
        # Its judge finds that the lease is over.
        assert not acquired(read.outcome()).lease.live(now())
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    "told",
    ["", reference("home:1").replace("kvf1.", "kvf1.AA"), router_reference("home:1", "source"), "another's"],
    ids=["nothing", "damaged", "a router's", "another's"],
)
@pytest.mark.parametrize(("publication", "incarnation"), [(1, b"i" * 16), (0, b"")])
def test_a_home_must_name_the_publication_of_a_routers_key(
    tmp_path: Path, told: str, publication: int, incarnation: bytes
) -> None:
    """Handshake and replays go by that name, and a wrong one would be another publication's."""
    if told == "another's":
        parsed = parse_reference(reference("home:1"))
        parsed.publication = 2
        told = format_reference(parsed)

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        answer = accepted()
        answer.reference, answer.publication = told, publication
        answer.source.engine_id, answer.source.incarnation = "source", incarnation
        return polled(accepted=answer, blocks=[step(0)], complete=pb.Complete(steps=1))

    with reading(tmp_path, poll) as (_, read):
        read.start(text=router_reference("home:1", "source"))
        assert isinstance(read.outcome(), (InvalidField, BadReference))
        # It has a lease, which is of no use.
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_FAILED)]


def test_a_home_that_answers_at_once_without_blocks_is_not_asked_all_the_time(tmp_path: Path) -> None:
    with reading(tmp_path, lambda request: polled(accepted=None if request.lease_id else accepted())) as (server, read):
        read.start()
        server.until(lambda: len(server.asked) >= 5)
        threading.Event().wait(1.0)
        assert len(server.asked) < 50
        read.cancel()
        assert isinstance(read.outcome(), asyncio.CancelledError)
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_CANCELLED)]


def test_a_home_that_answers_at_once_with_few_blocks_is_not_asked_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisition, "CALLS_AT_ONCE", 4)

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=accepted())
        return polled(blocks=[pb.Blocks(step=request.next_step)])

    with reading(tmp_path, poll) as (server, read):
        read.start()
        server.until(lambda: len(server.asked) >= 5)
        threading.Event().wait(1.0)
        assert len(server.asked) < 100
        read.cancel()
        assert isinstance(read.outcome(), asyncio.CancelledError)


def test_a_reader_that_waits_for_each_of_many_parts_does_not_pause_before_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source takes less to compute a part than the pause that it would make."""
    monkeypatch.setattr(acquisition, "CALLS_AT_ONCE", 8)
    pauses, computed = recorded_pauses(monkeypatch), 0.0

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        nonlocal computed
        if not request.lease_id:
            return polled(accepted=accepted())
        computed += BACKOFF_FIRST / 2
        last = pb.Complete(steps=13) if request.next_step == 12 else None
        return polled(blocks=[step(request.next_step)], complete=last)

    with reading(tmp_path, poll) as (_, read):
        monkeypatch.setattr(read.loop, "now", lambda: now() + computed)
        read.start()
        assert len(acquired(read.outcome()).part.blocks["full"].ids) == 13
        assert pauses == []


def test_a_lease_that_is_granted_anew_begins_with_the_first_step_again(tmp_path: Path) -> None:
    leases = iter([FIRST, SECOND, SECOND])

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=accepted(next(leases)), blocks=[step(0)])
        if request.lease_id == FIRST:
            # It has restarted: the blocks from before may be others'.
            return polled(accepted=accepted(next(leases)), blocks=[step(0), step(1)])
        return polled(blocks=[step(request.next_step)], complete=pb.Complete(steps=2))

    with reading(tmp_path, poll) as (server, read):
        read.start()
        got = acquired(read.outcome())
        assert got.lease.lease_id == SECOND
        assert got.part.blocks["full"].ids.tolist() == [1, 2]
        assert [asked.lease_id for asked in server.asked] == [b"", FIRST, b"", SECOND]
        assert list(read.renewals._kept) == [got.lease]


def test_steps_received_under_one_lease_are_not_counted_under_the_next(tmp_path: Path) -> None:
    """The lease is acquired again while no call of the read is under way: its home has restarted meanwhile, and was
    told the publication in other steps."""
    again = threading.Event()

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if request.lease_id == FIRST and not again.is_set():
            again.wait(30)
            return polled()
        if request.lease_id == SECOND:
            return polled(complete=pb.Complete(steps=1))
        if not again.is_set() and len(server.asked) == 1:
            lease = pb.Accepted(lease_id=FIRST, remaining=to_duration(60), renew_every=to_duration(0.05))
            return polled(accepted=lease, blocks=[step(0)])
        return polled(accepted=accepted(SECOND), blocks=[step(0, blocks=3)], complete=pb.Complete(steps=1))

    with reading(tmp_path, poll) as (server, read):
        lost = pb.NotificationResult(error=to_notification_error(LeaseEnded("no such lease")))
        server.notify = lambda request: [lost for _ in request.notifications]
        read.start()
        until(lambda: any(lease.lease_id == SECOND for lease in tuple(read.renewals._kept)))
        again.set()
        got = acquired(read.outcome())
        assert got.lease.lease_id == SECOND
        assert got.part.blocks["full"].ids.tolist() == [1, 2, 3]


def test_a_home_that_grants_anew_each_time_is_not_asked_all_the_time(tmp_path: Path) -> None:
    count = 0

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        nonlocal count
        count += 1
        return polled(accepted=accepted(count.to_bytes(16, "big")), blocks=[step(0)])

    with reading(tmp_path, poll) as (server, read):
        read.start(timeout=2.0)
        assert isinstance(read.outcome(), KvferryError)
        assert len(server.asked) < 50


@pytest.mark.parametrize("first", [False, True])
def test_blocks_without_a_lease_are_no_answer(tmp_path: Path, first: bool) -> None:
    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if first and len(server.asked) == 1:
            return polled(blocks=[step(0)], complete=pb.Complete(steps=1))
        return polled(accepted=accepted(), blocks=[step(0)], complete=pb.Complete(steps=1))

    with reading(tmp_path, poll) as (server, read):
        read.start()
        assert acquired(read.outcome()).part.blocks["full"].ids.tolist() == [1]
        assert len(server.asked) == 1 + first


LIES = {
    "a step left out": polled(accepted=accepted(), blocks=[step(1)], complete=pb.Complete(steps=1)),
    "a step missing at the end": polled(accepted=accepted(), blocks=[step(0)], complete=pb.Complete(steps=2)),
    "a step twice": polled(accepted=accepted(), blocks=[step(0), step(0)], complete=pb.Complete(steps=1)),
    "ids without end": polled(
        accepted=accepted(),
        blocks=[pb.Blocks(groups=[pb.GroupBlocks(group="full", run_starts=[1], run_counts=[2**32 - 1])])],
        complete=pb.Complete(steps=1),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_impossible_answer_is_refused_and_the_lease_given_back(tmp_path: Path, lie: str) -> None:
    with reading(tmp_path, lambda _: LIES[lie]) as (server, read):
        read.start()
        assert isinstance(read.outcome(), InvalidField)
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_FAILED)]
        assert len(server.asked) == 1


@pytest.mark.parametrize("size", [1, 15, 17, 1 << 20])
def test_a_lease_id_of_the_wrong_length_is_refused(tmp_path: Path, size: int) -> None:
    with reading(tmp_path, lambda _: polled(accepted=accepted(b"x" * size))) as (_, read):
        read.start()
        assert isinstance(read.outcome(), InvalidField)
        assert not read.given_back


def test_an_unexpected_exception_becomes_an_error_and_the_lease_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(GrantedSteps, "take", bug)
    with reading(tmp_path, lambda _: polled(accepted=accepted(), complete=pb.Complete())) as (_, read):
        read.start()
        assert isinstance(read.outcome(), InternalError)
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_FAILED)]


def test_a_call_that_cannot_be_made_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("the certificate is gone")

    with reading(tmp_path, lambda _: polled()) as (_, read):
        monkeypatch.setattr(Control, "read_blocks", refused)
        read.start()
        assert isinstance(read.outcome(), InternalError)


def test_a_revocation_ends_the_read_unless_the_publication_is_complete(tmp_path: Path) -> None:
    revoked = pb.Revoked(reason=pb.REVOKE_REASON_ABORTED)
    (tmp_path / "whole").mkdir()
    with reading(tmp_path, lambda _: polled(accepted=accepted(), revoked=revoked)) as (_, read):
        read.start()
        error = read.outcome()
        assert isinstance(error, PublicationAborted)
        assert "ABORTED" in error.message
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_FAILED)]
    whole = polled(accepted=accepted(), blocks=[step(0)], complete=pb.Complete(steps=1), revoked=revoked)
    with reading(tmp_path / "whole", lambda _: whole) as (_, read):
        read.start()
        acquired(read.outcome())


@pytest.mark.parametrize("error", [LeaseEnded("it has expired"), PublicationTimeout("it did not come")])
def test_a_wait_that_its_home_ends_is_a_timeout(tmp_path: Path, error: KvferryError) -> None:
    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=accepted())
        raise error

    with reading(tmp_path, poll) as (_, read):
        read.start()
        assert isinstance(read.outcome(), PublicationTimeout)
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_FAILED)]


def test_a_call_that_is_short_of_time_does_not_hide_why_the_read_failed(tmp_path: Path) -> None:
    """It would be said that the home may be overloaded, or that a firewall drops packets."""
    over, calls = threading.Event(), count(1)

    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if next(calls) == 1:
            read.ends_in(0.4)
            raise HomeRecovering("not yet")
        over.wait(30)
        return polled()

    with reading(tmp_path, poll) as (_, read):
        read.start()
        assert isinstance(read.outcome(), HomeRecovering)
        over.set()


@pytest.mark.parametrize("waits", [False, True])
def test_a_publication_that_is_not_complete_in_time(tmp_path: Path, waits: bool) -> None:
    over = threading.Event()

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            read.ends_in(1.0)
            return polled(accepted=accepted(), blocks=[step(0)])
        if waits:
            over.wait(30)
        return polled()

    with reading(tmp_path, poll) as (_, read):
        read.start()
        assert isinstance(read.outcome(), PublicationTimeout)
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_FAILED)]
        over.set()


def test_a_cancel_ends_a_call_that_waits(tmp_path: Path) -> None:
    over = threading.Event()

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=accepted())
        over.wait(30)
        return polled()

    with reading(tmp_path, poll) as (server, read):
        read.start()
        server.until(lambda: len(server.asked) >= 2)
        read.cancel()
        assert isinstance(read.outcome(), asyncio.CancelledError)
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_CANCELLED)]
        over.set()


@pytest.mark.parametrize("answers", [True, False])
def test_a_cancel_waits_a_moment_for_the_lease_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(acquisition, "ACCEPTED_PATIENCE", 30.0 if answers else 0.1)
    cancelled = threading.Event()

    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        cancelled.wait(30)
        return polled(accepted=accepted())

    with reading(tmp_path, poll) as (server, read):
        read.start()
        server.until(lambda: len(server.asked) >= 1)
        read.cancel()
        if answers:
            cancelled.set()
        assert isinstance(read.outcome(), asyncio.CancelledError)
        assert read.given_back == ([(FIRST, pb.RANK_OUTCOME_CANCELLED)] if answers else [])
        cancelled.set()


def test_a_lease_of_an_attempt_that_failed_is_given_back_with_the_read(tmp_path: Path) -> None:
    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if len(server.asked) == 1:
            return polled(accepted=accepted())
        raise HomeRecovering("not now", retry_after=50.0)

    with reading(tmp_path, poll) as (server, read):
        read.start()
        server.until(lambda: len(server.asked) >= 2)
        until(lambda: not read.renewals._kept)
        read.cancel()
        assert isinstance(read.outcome(), asyncio.CancelledError)
        assert read.given_back == [(FIRST, pb.RANK_OUTCOME_CANCELLED)]


@pytest.mark.parametrize("seen", [True, False])
def test_a_lease_that_a_restarted_home_has_granted_is_given_back_with_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    async def wait(calls: list[asyncio.Future[object]]) -> None:
        await asyncio.wait(calls)
        if len(server.asked) == 2 and not seen:
            # The read is cancelled in the moment in which the answer arrives.
            raise asyncio.CancelledError

    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if len(server.asked) > 2:
            raise HomeRecovering("not now", retry_after=50.0)
        return polled(accepted=accepted(FIRST if len(server.asked) == 1 else SECOND))

    patched = SimpleNamespace(sleep=asyncio.sleep, wait=wait, CancelledError=asyncio.CancelledError)
    monkeypatch.setattr(acquisition, "asyncio", patched)
    with reading(tmp_path, poll) as (server, read):
        read.start()
        if seen:
            server.until(lambda: len(server.asked) == 3)
            read.cancel()
        assert isinstance(read.outcome(), asyncio.CancelledError)
        assert (SECOND, pb.RANK_OUTCOME_CANCELLED) in read.given_back


def test_a_closed_connection_ends_the_wait(tmp_path: Path) -> None:
    over = threading.Event()

    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        over.wait(30)
        return polled()

    with reading(tmp_path, poll) as (server, read):
        read.start()
        server.until(lambda: len(server.asked) >= 1)
        on_loop(read.loop, read.home.close)
        assert isinstance(read.outcome(), Closed)
        over.set()


@pytest.mark.parametrize("progressive", [False, True])
def test_a_late_answer_about_a_lost_lease_does_not_end_the_lease_that_followed_it(
    tmp_path: Path, progressive: bool
) -> None:
    """A home has restarted while a read waits for its publication: the read asks again, and so does its lease."""
    late = threading.Event()

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if len(server.asked) == 1:
            lost = pb.Accepted(lease_id=FIRST, remaining=to_duration(60), renew_every=to_duration(0.05))
            return polled(accepted=lost)
        if not request.HasField("wait"):
            late.wait(30)
            return polled(accepted=accepted(SECOND))
        if request.lease_id:
            server.until(lambda: any(not asked.HasField("wait") for asked in server.asked))
            return polled(accepted=accepted(SECOND))
        complete = None if progressive else pb.Complete(steps=1)
        return polled(accepted=accepted(SECOND), blocks=[step(0)], complete=complete)

    with reading(tmp_path, poll) as (server, read):
        lost = pb.NotificationResult(error=to_notification_error(LeaseEnded("no such lease")))
        server.notify = lambda request: [lost] * len(request.notifications)
        read.start(progressive=progressive)
        got = acquired(read.told())
        assert got.lease.lease_id == SECOND
        late.set()
        asked_again = [task for task in read.loop._tasks if task.get_name().startswith("the read of")]
        until(lambda: all(task.done() for task in asked_again))
        assert (read.given_back, got.lease.ended) == ([], False)


@pytest.mark.parametrize("needed", [True, False])
def test_a_lease_that_is_lost_is_acquired_again_or_given_back(tmp_path: Path, needed: bool) -> None:
    answer = threading.Event()

    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if len(server.asked) == 1:
            lease = pb.Accepted(lease_id=FIRST, remaining=to_duration(60), renew_every=to_duration(0.05))
            return polled(accepted=lease, complete=pb.Complete())
        if len(server.asked) == 2:
            raise HomeRecovering("not now", retry_after=0.1)
        if len(server.asked) == 3:
            answer.wait(30)
        return polled(accepted=accepted(SECOND))

    with reading(tmp_path, poll) as (server, read):
        lost = pb.NotificationResult(error=to_notification_error(LeaseEnded("no such lease")))
        server.notify = lambda request: [lost for _ in request.notifications]
        read.start()
        got = acquired(read.told())
        server.until(lambda: len(server.asked) >= 3)
        if not needed:
            read.drop(got)
        answer.set()
        if needed:
            until(lambda: got.lease.lease_id == SECOND)
            assert not read.given_back
        else:
            until(lambda: bool(read.given_back))
            assert read.given_back == [(SECOND, pb.RANK_OUTCOME_CANCELLED)]


@pytest.mark.slow
def test_five_hundred_reads_that_wait_cost_no_thread(tmp_path: Path) -> None:
    with NodeServerProcess(tmp_path / "home") as server, Client(server.address) as client:
        spec = EngineSpec(unique_id("source"), (Group("full", block_tokens=16, num_blocks=8),))
        tensors = {"layers.0": np.zeros((2, 8, 1, 16, 8), np.uint8)}
        axes = ("kv", "block", "head", "token", "content")
        session = client.register_cache(spec, tensors=tensors, axes=axes, serve=False).session
        first = session.publish("waits", {"full": Blocks([1])}, last=False, expected_reads=500)
        home = BlockingControl(server.address)
        before, text = threading.active_count(), first.reference
        reads = [Reading(home.control) for _ in range(500)]
        for number, read in enumerate(reads):
            read.start(120, text, read_id=f"read {number}")
        # All have their leases, and the calls that wait were made.
        until(lambda: all(read.renewals._kept for read in reads))
        # Of the loop, and of gRPC's connection.
        assert threading.active_count() <= before + 2
        assert all(read.outcomes.empty() for read in reads)
        session.publish_more(first, {"full": Blocks([2], first_token=16)}, last=True)
        for read in reads:
            assert acquired(read.told()).part.blocks["full"].ids.tolist() == [1, 2]
        assert threading.active_count() <= before + 2
        for read in reads:
            read.close()
        home.close()
