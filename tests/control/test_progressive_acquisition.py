"""An acquisition that tells of each step, and goes on under one lease whatever becomes of its home."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvferry._clock import now, to_duration
from kvferry._control.acquire_request import Acquired
from kvferry._control.granted_steps import GrantedPart
from kvferry.errors import (
    HomeRecovering,
    InvalidField,
    LeaseEnded,
    PublicationAborted,
    PublicationTimeout,
    TransferExpired,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.polling import FIRST, SECOND, Poll, Reading, accepted, reading, step
from tests.control.scripted import polled
from tests.support.waiting import until

COMPLETE = pb.Complete(payload=b"token", steps=2)


def first(read: Reading, ids: list[int]) -> Acquired:
    """The lease, with blocks that are not all."""
    told = read.told()
    assert isinstance(told, Acquired), told
    part = told.part
    assert (part.complete, part.told.payload, part.blocks["full"].ids.tolist()) == (False, b"", ids)
    return told


def rest(read: Reading, ids: list[int]) -> None:
    """The last blocks."""
    told = read.outcome_of(GrantedPart)
    assert (told.complete, told.told.payload, told.blocks["full"].ids.tolist()) == (True, b"token", ids)


def scripted_steps(*answers: pb.ReadBlocksResponse | Exception) -> Poll:
    """These answers, one after the other; the last again and again."""
    left = list(answers)

    def poll(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return poll


def test_each_step_with_blocks_is_returned_and_the_payload_with_the_last(tmp_path: Path) -> None:
    poll = scripted_steps(
        polled(accepted=accepted(), blocks=[pb.Blocks(step=0)]),
        polled(blocks=[step(1)]),
        polled(blocks=[step(2)]),
        polled(complete=pb.Complete(payload=b"token", steps=3)),
    )
    with reading(tmp_path, poll) as (server, read):
        read.start(progressive=True)
        told = first(read, [2])
        assert (told.lease.lease_id, told.request_id) == (FIRST, "told")
        more = read.told()
        assert isinstance(more, GrantedPart)
        assert (more.complete, more.told.payload, more.blocks["full"].ids.tolist()) == (False, b"", [3])
        last = read.outcome_of(GrantedPart)
        assert (last.complete, last.told.payload, last.blocks) == (True, b"token", {})
        assert [asked.next_step for asked in server.asked] == [0, 1, 2, 3]
        assert told.lease in read.renewals._kept
        assert not read.given_back


def test_a_restarted_home_sends_all_steps_again_and_only_new_ones_are_returned(tmp_path: Path) -> None:
    poll = scripted_steps(
        polled(accepted=accepted(), blocks=[step(0)]),
        HomeRecovering("just started"),
        polled(accepted=accepted(SECOND)),
        polled(blocks=[step(0)]),
        polled(blocks=[step(1)], complete=COMPLETE),
    )
    with reading(tmp_path, poll) as (server, read):
        read.start(progressive=True)
        lease = first(read, [1]).lease
        rest(read, [2])
        # It is the same lease, by another name.
        assert lease.lease_id == SECOND
        assert lease in read.renewals._kept
        told_under = [(asked.lease_id, asked.next_step) for asked in server.asked]
        assert told_under == [(b"", 0), (FIRST, 1), (FIRST, 1), (SECOND, 0), (SECOND, 1)]
        assert not read.given_back


def test_a_restarted_home_that_sends_other_blocks_is_refused(tmp_path: Path) -> None:
    other = step(0)
    other.groups[0].run_starts[0] = 7
    poll = scripted_steps(
        polled(accepted=accepted(), blocks=[step(0)]),
        polled(accepted=accepted(SECOND), blocks=[other]),
    )
    with reading(tmp_path, poll) as (_, read):
        read.start(progressive=True)
        first(read, [1])
        assert "before its home restarted" in str(read.outcome_of(InvalidField))


@pytest.mark.parametrize("ended", [False, True])
def test_a_lease_that_is_granted_again_too_late_ends_the_read_and_is_given_back(tmp_path: Path, ended: bool) -> None:
    short = accepted()
    short.remaining.CopyFrom(to_duration(60 if ended else 0.05))

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=short, blocks=[step(0)])
        until(lambda: bool(told) and (told[0].lease.ended or not told[0].lease.live(now())))
        return polled(accepted=accepted(SECOND), blocks=[step(0)])

    told: list[Acquired] = []
    with reading(tmp_path, poll) as (_, read):
        read.start(progressive=True)
        told.append(first(read, [1]))
        if ended:
            read.drop(told[0])
        read.outcome_of(TransferExpired)
        assert read.given_back == [(SECOND, pb.RANK_OUTCOME_CANCELLED)]
        assert told[0].lease.lease_id == FIRST


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (LeaseEnded("it is over"), TransferExpired),
        (polled(revoked=pb.Revoked(reason=pb.REVOKE_REASON_SOURCE_LOST)), PublicationAborted),
        (polled(blocks=[step(2)]), InvalidField),
        (polled(blocks=[step(1)], complete=pb.Complete(steps=7)), InvalidField),
    ],
)
def test_errors_after_the_grant_leave_the_lease_to_the_read(
    tmp_path: Path, answer: pb.ReadBlocksResponse | Exception, error: type[Exception]
) -> None:
    with reading(tmp_path, scripted_steps(polled(accepted=accepted(), blocks=[step(0)]), answer)) as (_, read):
        read.start(progressive=True)
        lease = first(read, [1]).lease
        read.outcome_of(error)
        # The owner of the lease reports the end of the read.
        assert not read.given_back
        assert lease in read.renewals._kept


def test_a_source_that_stops_publishing_ends_the_acquisition_in_time(tmp_path: Path) -> None:
    steps = scripted_steps(polled(accepted=accepted(), blocks=[step(0)]), polled())

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            read.ends_in(0.3)
        return steps(request)

    with reading(tmp_path, poll) as (_, read):
        read.start(progressive=True)
        first(read, [1])
        read.outcome_of(PublicationTimeout)


def test_an_acquisition_cancelled_between_steps_keeps_its_lease(tmp_path: Path) -> None:
    with reading(tmp_path, scripted_steps(polled(accepted=accepted(), blocks=[step(0)]), polled())) as (_, read):
        read.start(progressive=True)
        first(read, [1])
        read.cancel()
        read.outcome_of(asyncio.CancelledError)
        assert not read.given_back


def test_a_read_receives_the_deadline_of_a_lease_that_was_granted_again(tmp_path: Path) -> None:
    short, long = accepted(), accepted(SECOND)
    short.remaining.CopyFrom(to_duration(20))
    short.renew_every.CopyFrom(to_duration(5))
    poll = scripted_steps(
        polled(accepted=short, blocks=[step(0)]),
        polled(accepted=long, blocks=[step(0)], complete=pb.Complete(steps=1)),
    )
    with reading(tmp_path, poll) as (_, read):
        read.start(progressive=True)
        lease = first(read, [1]).lease
        assert read.outcome_of(GrantedPart).complete
        assert read.changes == 1
        assert lease.deadline > now() + 30
