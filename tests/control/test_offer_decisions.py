"""Decisions about what a source has published: which steps belong to it, and when it may be freed (R2, R3)."""

from __future__ import annotations

import math

import pytest

from kvferry._control.publications import LOCAL_RELEASE_MARGIN, LOCAL_RELEASE_SHARE, Offers
from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry.errors import (
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
