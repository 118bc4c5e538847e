"""What a home and a hint tell of the same publication."""

from __future__ import annotations

from kvferry._control.granted_steps import GrantedSteps
from kvferry._reads.cache_reads import ReadResult
from kvferry._wire.publication import Told, blocks_of, granted_by, hint_of, told_fields
from kvferry.engine import Grant, Offer, ReadEnd
from kvferry.v1 import kv_transfer_pb2 as pb

STEP = pb.Publish(
    publication=7,
    request_id="r",
    groups=[pb.GroupBlocks(group="full", end_token=32, run_starts=[5], run_counts=[2])],
    last=True,
    payload=b"first token",
    marks=[pb.PromptMark(end=32, digest=b"m" * 16)],
)


def test_hint_tells_what_the_home_tells_with_a_lease() -> None:
    """A field that one of the two leaves out would reach some readers only."""
    hint = hint_of(STEP)
    assert {field.name for field, _ in hint.ListFields()} == set(pb.Hint.DESCRIPTOR.fields_by_name)
    told = (blocks_of(STEP), pb.Complete(payload=STEP.payload, steps=1)), granted_by(hint)
    leased, hinted = GrantedSteps(), GrantedSteps()
    for steps, (blocks, complete) in zip((leased, hinted), told, strict=True):
        steps.add([blocks], complete)
    one, other = leased.take(), hinted.take()
    assert leased.marks == hinted.marks == {32: b"m" * 16}
    assert (one.blocks, one.told, one.complete) == (other.blocks, other.told, other.complete)
    assert one.complete
    # The test's own publication says something in each field.
    assert all(value != getattr(Told(), name) for name, value in told_fields(one.told).items())


def test_what_is_told_is_in_each_value_that_an_engine_gets() -> None:
    for value in (Offer, Grant, ReadResult, ReadEnd):
        assert issubclass(value, Told)
