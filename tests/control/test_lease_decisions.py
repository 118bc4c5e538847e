"""Decisions of the reader's lease at their very moment (R1)."""

from __future__ import annotations

import pytest

from kvferry._control.reader_lease import ReaderLease, ReaderVerdict, deadline_after, verdict_of
from kvferry.v1 import kv_transfer_pb2 as pb

SENT, REMAINING = 100.0, 10.0
DEADLINE = deadline_after(SENT, REMAINING)


def lease() -> ReaderLease:
    return ReaderLease(b"1" * 16, SENT, REMAINING, renew_every=3.0)


@pytest.mark.parametrize(("late", "goes_on"), [(-0.001, True), (0.0, False), (1.0, False)])
def test_a_grant_acquired_again_revives_nothing(late: float, goes_on: bool) -> None:
    held = lease()
    assert held.acquired_again(b"2" * 16, DEADLINE - 1, DEADLINE + late, REMAINING) is goes_on
    assert held.deadline == (deadline_after(DEADLINE - 1, REMAINING) if goes_on else DEADLINE)
    assert held.lease_id == (b"2" if goes_on else b"1") * 16


@pytest.mark.parametrize(("late", "extended"), [(-0.001, True), (0.0, False), (1.0, False)])
def test_a_renewal_that_is_acknowledged_late_revives_nothing(late: float, extended: bool) -> None:
    held = lease()
    held.renewed(DEADLINE - 1, DEADLINE + late, REMAINING, more=True)
    assert held.deadline == (deadline_after(DEADLINE - 1, REMAINING) if extended else DEADLINE)


def test_neither_an_older_renewal_nor_a_shorter_grant_shortens() -> None:
    held = lease()
    held.renewed(SENT - 5, SENT + 1, REMAINING, more=True)
    held.acquired_again(b"2" * 16, SENT + 1, SENT + 2, 1.0)
    assert held.deadline == DEADLINE


def test_a_read_that_is_over_acquires_nothing() -> None:
    held = lease()
    held.end()
    assert not held.acquired_again(b"2" * 16, SENT + 1, SENT + 2, REMAINING)


def test_next_renewal_by_what_remains_of_the_lease() -> None:
    held = lease()
    assert held.next_renewal == SENT + 3
    held.renewing(SENT + 3)
    assert held.next_renewal == SENT + 6
    held.renewed(SENT + 3, SENT + 4, REMAINING, more=False)
    assert held.next_renewal is None
    held.acquired_again(b"2" * 16, SENT + 7, SENT + 8, REMAINING)
    assert held.next_renewal == SENT + 10
    held.renewed(SENT + 8, SENT + 8, 0.0, more=True)
    assert held.next_renewal is None


@pytest.mark.parametrize(
    ("late", "verdict", "expected"),
    [
        (-0.001, pb.VERDICT_VALID, ReaderVerdict.CONFIRMED),
        (-0.001, pb.VERDICT_UNKNOWN, ReaderVerdict.TRUSTED),
        (-0.001, None, ReaderVerdict.TRUSTED),
        (-0.001, pb.VERDICT_EXPIRED, ReaderVerdict.EXPIRED),
        (0.0, pb.VERDICT_VALID, ReaderVerdict.EXPIRED),
        (1.0, None, ReaderVerdict.EXPIRED),
    ],
)
def test_the_verdict_needs_the_readers_clock_and_the_home(
    late: float, verdict: pb.Verdict.ValueType | None, expected: ReaderVerdict
) -> None:
    assert verdict_of(DEADLINE + late, DEADLINE, verdict) is expected


def test_a_renewal_without_an_answer_is_repeated_sooner_and_never_later() -> None:
    held = lease()
    held.renewing(SENT + 1)
    held.not_renewed(SENT + 2)
    assert held.next_renewal == SENT + 2
    held.not_renewed(SENT + 9)
    assert held.next_renewal == SENT + 2


def test_a_lease_of_less_than_a_second_is_still_renewed() -> None:
    held = lease()
    held.renewed(SENT + 1, SENT + 1, 0.5, more=True)
    assert held.next_renewal == SENT + 3


def test_the_shorter_a_lease_is_extended_the_sooner_it_is_renewed() -> None:
    """The home has lost the source, say: a few renewals more may find it back before the end."""
    held, now = lease(), DEADLINE - 1.5
    held.renewing(now)
    held.renewed(now, now, 0.1, more=True)
    assert held.next_renewal == pytest.approx(now + 0.5)
