"""R1: the reader's deadline is always earlier than the home's end, and only moves forward while it has not passed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry._control.reader_lease import ReaderLease, deadline_after

seconds = st.floats(min_value=0.0, max_value=1e4)


@given(sent_at=seconds, travel=seconds, remaining=seconds)
def test_deadline_is_earlier_than_the_homes_end(sent_at: float, travel: float, remaining: float) -> None:
    # The home said "remaining" at some moment after the request was sent; its end, on the reader's clock, is at the
    # earliest:
    homes_end = sent_at + travel + remaining
    assert deadline_after(sent_at, remaining) <= homes_end - 0.009


@pytest.mark.parametrize(("remaining", "margin"), [(0.5, 0.010), (1.0, 0.010), (30.0, 0.300)])
def test_margin_is_ten_milliseconds_or_one_percent(remaining: float, margin: float) -> None:
    assert deadline_after(100.0, remaining) == pytest.approx(100.0 + remaining - margin)


def lease(sent_at: float = 100.0, remaining: float = 30.0) -> ReaderLease:
    return ReaderLease(b"\0" * 16, sent_at, remaining, 10.0)


def test_acknowledged_renewal_extends_from_its_sending() -> None:
    held = lease()
    held.renewed(110.0, 125.0, 30.0, more=True)
    assert held.deadline == pytest.approx(110.0 + 30.0 - 0.3)


def test_renewal_never_shortens() -> None:
    held = lease()
    before = held.deadline
    held.renewed(100.5, 101.0, 1.0, more=True)
    assert held.deadline == before


def test_renewal_that_is_acknowledged_after_the_deadline_revives_nothing() -> None:
    held = lease()
    before = held.deadline
    held.renewed(129.0, before + 0.001, 30.0, more=True)
    assert held.deadline == before
    assert not held.live(before)


def test_read_that_ends_at_the_deadline_does_not_count() -> None:
    held = lease()
    assert held.live(held.deadline - 1e-6)
    assert not held.live(held.deadline)


def test_next_renewal_follows_the_last_attempt_whether_it_succeeds_or_not() -> None:
    held = lease()
    assert held.next_renewal == 110.0
    held.renewing(111.0)
    assert held.next_renewal == 121.0


def test_home_that_renews_no_more_is_not_asked_again() -> None:
    held = lease()
    held.renewed(110.0, 110.1, 5.0, more=False)
    assert held.next_renewal is None


def test_a_grant_that_came_again_before_the_deadline_goes_on() -> None:
    held = lease()
    assert held.acquired_again(b"\1" * 16, 120.0, 125.0, 30.0)
    assert held.lease_id == b"\1" * 16
    assert held.deadline == pytest.approx(120.0 + 30.0 - 0.3)


@pytest.mark.parametrize("late", [0.0, 0.001, 1.0])
def test_a_grant_that_came_again_at_the_deadline_or_later_revives_nothing(late: float) -> None:
    # It was asked for before the deadline; what counts is when it was had: in between the source may have changed its
    # blocks.
    held = lease()
    before = held.deadline
    assert not held.acquired_again(b"\1" * 16, before - 1.0, before + late, 30.0)
    assert held.deadline == before
    assert held.lease_id == b"\0" * 16
    assert not held.live(before + late)


def test_a_grant_that_came_again_after_the_end_of_its_read_is_refused() -> None:
    held = lease()
    held.end()
    assert not held.acquired_again(b"\1" * 16, 110.0, 111.0, 30.0)
    assert held.lease_id == b"\0" * 16
