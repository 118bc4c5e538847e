"""A source's record of its publications, where a test of two lines says it better than the model check."""

from __future__ import annotations

import gc
import logging
import math
import time

import pytest

from kvferry._control.publications import Offers
from kvferry._prompt import Prompt
from kvferry._wire.authority import PublicationKeys, incarnation_of, new_session_secret
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.v1 import kv_transfer_pb2 as pb

SECRET = new_session_secret()
ENGINE = pb.EngineRef(engine_id="prefill", incarnation=incarnation_of(SECRET))


def test_a_prompt_that_grows_with_each_token_is_marked_at_its_ends() -> None:
    """At its own end, and at that of all that was published, however many steps there are."""
    offers, prompt = Offers(ENGINE, SECRET), Prompt(range(50))
    step = pb.Publish(request_id="r", groups=[pb.GroupBlocks(group="full", end_token=50)])
    number, steps = offers.publish("home:1", step, prompt=prompt).number, [step]
    for end in range(51, 251):
        prompt = prompt.followed_by([end])
        step = pb.Publish(groups=[pb.GroupBlocks(group="full", first_token=end - 1, end_token=end)], last=end == 250)
        offers.publish_more(number, step, prompt)
        steps.append(step)
    marks = [mark for step in steps for mark in step.marks]
    assert [mark.end for mark in marks] == [*range(50, 113), 250]
    assert marks[-1].digest == prompt.mark(PublicationKeys(SECRET).key(number), 250)


def held(count: int) -> Offers:
    """A source of so many publications, each with all the payload it may have."""
    offers = Offers(ENGINE, SECRET)
    offers.final = 10.0
    for _ in range(count):
        step = pb.Publish(request_id="r", last=True, payload=b"x" * 65_536)
        offers.publish("home:1", step)
        offers.sent(step.publication, 100.0)
    return offers


def test_a_snapshot_copies_nothing_while_the_source_waits() -> None:
    offers = held(1000)
    # This thread's own time, without the turns of others and without what other tests have left to collect.
    gc.disable()
    try:
        began = time.thread_time()
        snapshot = offers.snapshot()
        taken = time.thread_time()
        notifications = list(snapshot.notifications)
        copied = time.thread_time()
    finally:
        gc.enable()
    # The payloads are copied when they are told; the lock of `released` is held for the first part only.
    assert taken - began < (copied - taken) / 3
    assert [told.publish.publication for told in notifications[1:]] == list(range(1, 1001))
    assert (notifications[0].resync.phase, snapshot.end.resync.phase) == (1, 2)


def test_a_snapshot_holds_the_state_of_its_moment() -> None:
    offers = held(3)
    offers.abort(2)
    snapshot = offers.snapshot()
    offers.abort(1)
    offers.released(pb.Released(publication=3, outcome=pb.RELEASE_OUTCOME_READ))
    late = pb.Publish(request_id="late", last=True)
    offers.publish("home:1", late)
    assert [told.WhichOneof("kind") for told in snapshot.notifications] == ["resync", "publish", "abort", "publish"]
    assert snapshot.end.resync.high_water == 3


def test_each_final_deadline_is_kept_whatever_is_sent_meanwhile() -> None:
    offers = held(2)
    first = offers.next_deadline
    assert first < 120
    snapshot = offers.snapshot()
    # During a refill it is unknown until when the home may hold a lease on the publications.
    offers.advance(first + 1)
    assert not offers.take_released()
    offers.snapshot_sent(snapshot, 200.0)
    offers.advance(first + 2)
    assert not offers.take_released()
    assert offers.next_deadline > 200
    offers.advance(offers.next_deadline)
    assert [(release.publication, release.local) for release in offers.take_released()] == [(1, True), (2, True)]
    assert offers.next_deadline == math.inf


def test_an_unknown_outcome_frees_the_blocks_all_the_same() -> None:
    offers = held(1)
    offers.released(pb.Released(publication=1, outcome=99))  # type: ignore[arg-type]
    (release,) = offers.take_released()
    assert (release.publication, release.local) == (1, False)


@pytest.mark.parametrize("outcome", list(ReleaseOutcome))
def test_a_release_that_no_reader_has_caused_is_in_the_log(
    outcome: ReleaseOutcome, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    offers = held(1)
    offers.released(pb.Released(publication=1, outcome=pb.ReleaseOutcome.ValueType(outcome)))
    (record,) = [record for record in caplog.records if record.message.startswith("released: ")]
    expected = outcome in (ReleaseOutcome.READ, ReleaseOutcome.DECLINED)
    assert record.levelname == ("DEBUG" if expected else "INFO")
    assert f"outcome={outcome.name}" in record.message
