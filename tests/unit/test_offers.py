"""A source's record of its publications, where a test of two lines says it better than the model check."""

from __future__ import annotations

import pytest

from kvferry.authority import incarnation_of, new_session_secret
from kvferry.offers import Offers
from kvferry.v1 import kv_transfer_pb2 as pb

SECRET = new_session_secret()
ENGINE = pb.EngineRef(engine_id="prefill", incarnation=incarnation_of(SECRET))


@pytest.mark.parametrize("answered", [True, False])
def test_a_refused_step_is_given_back_only_if_no_home_can_have_taken_it(answered: bool) -> None:
    offers, step = Offers(ENGINE, SECRET), pb.Publish(request_id="r", last=True)
    publication = offers.publish("home:1", step)
    if not answered:
        offers.unanswered(step)
    assert offers.refused(step) is answered
    assert (publication in offers.unreleased()) is not answered


def test_a_step_told_to_a_restarted_home_may_have_been_taken() -> None:
    offers, step = Offers(ENGINE, SECRET), pb.Publish(request_id="r", last=True)
    offers.publish("home:1", step)
    offers.snapshot()
    assert not offers.refused(step)
