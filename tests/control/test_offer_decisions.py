"""Decisions about what a source has published: which steps belong to it, and when it may be freed (R2, R3)."""

from __future__ import annotations

import math

import pytest

from kvferry import Prompt
from kvferry._control.publications import LOCAL_RELEASE_MARGIN, LOCAL_RELEASE_SHARE, Offers, leaves_open
from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry.errors import (
    EngineUnknown,
    InternalError,
    KvferryError,
    LimitReached,
    Unavailable,
    Unreachable,
    WrongState,
)
from kvferry.v1 import kv_transfer_pb2 as pb

SECRET = new_session_secret()
ENGINE = pb.EngineRef(engine_id="prefill", incarnation=incarnation_of(SECRET))
FINAL = 600.0
AFTER = FINAL * (1 + LOCAL_RELEASE_SHARE) + LOCAL_RELEASE_MARGIN
"""From the last word to a home until no home can hold a lease."""


@pytest.fixture
def offers() -> Offers:
    made = Offers(ENGINE, SECRET)
    made.final = FINAL
    return made


def publish(offers: Offers, *, last: bool = True, sent_at: float | None = None) -> int:
    number = offers.publish("home:1", pb.Publish(request_id=f"r{len(offers.unreleased())}", last=last)).number
    if sent_at is not None:
        offers.sent(number, sent_at)
    return number


def released(offers: Offers, now: float) -> list[int]:
    offers.advance(now)
    return [release.publication for release in offers.take_released()]


def told(offers: Offers) -> list[pb.Publish]:
    return [one.publish for one in offers.snapshot().notifications if one.HasField("publish")]


def test_steps_of_a_publication_are_numbered_in_order(offers: Offers) -> None:
    number = publish(offers, last=False)
    more = [pb.Publish(last=False), pb.Publish(last=True)]
    for step in more:
        offers.publish_more(number, step)
    assert [(step.publication, step.step, step.request_id) for step in more] == [(number, 1, "r0"), (number, 2, "r0")]
    assert [(step.step, step.last) for step in told(offers)] == [(0, False), (1, False), (2, True)]


def test_a_complete_or_released_publication_takes_no_step(offers: Offers) -> None:
    number = publish(offers, last=False)
    offers.publish_more(number, pb.Publish(last=True))
    with pytest.raises(WrongState, match="is complete"):
        offers.publish_more(number, pb.Publish(last=True))
    offers.released(pb.Released(publication=number, outcome=pb.RELEASE_OUTCOME_READ))
    with pytest.raises(WrongState, match="was released"):
        offers.publish_more(number, pb.Publish(last=True))
    with pytest.raises(WrongState, match="was released"):
        offers.publish_more(number + 1, pb.Publish(last=True))


def test_a_publication_is_not_released_while_any_of_its_steps_is_being_sent(offers: Offers) -> None:
    number = publish(offers, last=False, sent_at=0.0)
    offers.publish_more(number, pb.Publish(last=False))
    offers.publish_more(number, pb.Publish(last=True))
    offers.sent(number, 1.0)
    # The home may take the last step only now, and give a lease on it.
    assert released(offers, 10 * AFTER) == []
    assert offers.next_deadline == math.inf
    offers.sent(number, 10 * AFTER)
    assert offers.next_deadline == 11 * AFTER
    assert released(offers, 11 * AFTER - 0.001) == []
    assert released(offers, 11 * AFTER) == [number]


@pytest.mark.parametrize("final", [0.0, 1.0, 600.0])
def test_the_local_release_comes_after_every_home_has_ended_its_leases(offers: Offers, final: float) -> None:
    offers.final = final
    number = publish(offers, sent_at=100.0)
    # 5 s and 1 % later, for clocks of different rates.
    at = 100.0 + final * 1.01 + 5
    assert released(offers, at - 0.001) == []
    assert released(offers, at + 0.001) == [number]


def test_each_publication_is_released_at_its_own_time_and_once(offers: Offers) -> None:
    first, second, third = (publish(offers, sent_at=at) for at in (0.0, 1.0, 2.0))
    under_way = publish(offers)
    assert released(offers, AFTER) == [first]
    # The earliest of what is left, not the latest.
    assert offers.next_deadline == AFTER + 1
    assert not offers.take_released()
    assert released(offers, AFTER) == []
    assert released(offers, AFTER + 1) == [second]
    offers.released(pb.Released(publication=second, outcome=pb.RELEASE_OUTCOME_FINAL))
    assert released(offers, AFTER + 2) == [third]
    assert [held.number for held in offers.unreleased()] == [under_way]


def test_the_end_of_a_refused_step_leaves_the_earlier_ones_published(offers: Offers) -> None:
    number, refused = publish(offers, last=False), pb.Publish(last=True)
    offers.publish_more(number, refused)
    assert offers.refused(refused)
    assert [held.number for held in offers.unreleased()] == [number]
    assert [step.step for step in told(offers)] == [0]
    # The same step may be told anew.
    offers.publish_more(number, pb.Publish(last=True))
    assert [step.step for step in told(offers)] == [0, 1]


def test_a_refused_step_leaves_no_mark(offers: Offers) -> None:
    number, prompt = publish(offers, last=False), Prompt(range(40))
    kept, refused = (pb.Publish(groups=[pb.GroupBlocks(group="full", end_token=end)]) for end in (16, 32))
    offers.publish_more(number, kept)
    offers.publish_more(number, refused, prompt)
    assert offers.refused(refused)
    last = pb.Publish(last=True)
    offers.publish_more(number, last)
    assert [mark.end for mark in last.marks] == [16, 40]


def test_a_step_of_a_publication_released_meanwhile_counts_as_taken(offers: Offers) -> None:
    step = pb.Publish(request_id="r", last=True)
    number = offers.publish("home:1", step).number
    offers.released(pb.Released(publication=number, outcome=pb.RELEASE_OUTCOME_READ))
    assert not offers.refused(step)


@pytest.mark.parametrize(
    ("error", "is_open"),
    [
        (Unreachable("gone", address="home:1"), True),
        (InternalError("failed", error_id="1"), True),
        (KvferryError("no answer came in time"), True),
        # The home itself said that it did nothing.
        (LimitReached("full", retry_after=1.0), False),
        (Unavailable("draining"), not Unavailable.reason),
        (EngineUnknown("who?"), False),
    ],
)
def test_errors_that_leave_open_whether_a_home_took_a_step(error: KvferryError, *, is_open: bool) -> None:
    assert leaves_open(error) is is_open
