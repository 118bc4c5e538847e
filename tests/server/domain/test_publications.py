"""PROTOCOL, Endings, Home restart, and the steps of publications: R3, and R7 at the home."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvferry._prompt import MAX_MARKS
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import (
    BadBlock,
    BadReference,
    EngineIncomplete,
    HomeRecovering,
    InvalidField,
    LimitReached,
    NotPublished,
    PublicationAborted,
    PublicationReleased,
    PublicationStale,
    WrongKey,
)
from kvferry.geometry.blocks import BlockRuns, Unfinished
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain import publications
from kvferry_server.domain.limits import MAX_SKIPPED, Limits
from kvferry_server.domain.publications import PUBLICATION_BYTES, PublicationStage
from tests.support.parties import (
    FULL,
    P2,
    SECRETS,
    TIMES,
    E,
    P,
    Scene,
    arrived,
    ask,
    blocks,
    done,
    key,
    offer,
    registration,
)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_unread_publication_is_released_after_the_hold(scene: Scene) -> None:
    scene.publish()
    scene.wait(TIMES.hold - 1)
    assert not scene.told()
    scene.wait(1)
    assert scene.told() == [(1, ReleaseOutcome.UNREAD)]


def test_hold_pauses_while_a_lease_is_live(scene: Scene) -> None:
    scene.publish()
    scene.wait(TIMES.hold - 1)
    lease = scene.grant()
    scene.wait(TIMES.ttl - 1)
    scene.renew(lease)
    scene.wait(TIMES.ttl + TIMES.hold - 1)
    assert not scene.told()
    scene.wait(1)
    assert scene.told() == [(1, ReleaseOutcome.UNREAD)]


def test_final_deadline_ends_a_publication_in_progress(scene: Scene) -> None:
    scene.publish(last=False)
    for step in range(1, 7):
        scene.wait(TIMES.hold - 20)
        if scene.clock.time < 1000 + TIMES.final:
            scene.publish(step=step, last=False)
    assert scene.told() == [(1, ReleaseOutcome.FINAL)]


def test_release_is_state_until_acknowledged(scene: Scene) -> None:
    publication = scene.publish()
    scene.report(scene.grant(), 0)
    assert scene.records.released(P) == [publication]
    assert scene.told() == [(1, ReleaseOutcome.READ)]
    # An acknowledgement may have been lost without the Watch being lost.
    scene.wait(TIMES.max_ttl)
    assert scene.told() == [(1, ReleaseOutcome.READ)]
    scene.sources.acknowledge(P, [1, 1, 7])
    scene.sources.acknowledge(P, [1])
    assert not scene.records.released(P)
    scene.wait(TIMES.final)
    assert not scene.told()


def test_acknowledgement_of_an_unreleased_publication_changes_nothing(scene: Scene) -> None:
    publication = scene.publish()
    scene.sources.acknowledge(P, [1])
    assert publication.stage is PublicationStage.PUBLISHED


def test_publication_outcome_is_the_first(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    scene.sources.abort(P, 1)
    scene.lessor.decline(P, 1, key(1))
    scene.report(lease, 0)
    scene.sources.abort(P, 1)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]


def test_decline_releases_at_once_or_with_the_last_live_lease(scene: Scene) -> None:
    scene.publish(1)
    scene.publish(2)
    scene.lessor.decline(P, 1, key(1))
    assert scene.told() == [(1, ReleaseOutcome.DECLINED)]
    lease = scene.grant(2)
    scene.lessor.decline(P, 2, key(2))
    with pytest.raises(PublicationReleased):
        scene.grant(2, reader=E)
    assert scene.renew(lease) == TIMES.ttl
    assert not scene.told()
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID
    assert scene.told() == [(2, ReleaseOutcome.DECLINED)]


def test_decline_needs_the_key_and_is_idempotent(scene: Scene) -> None:
    scene.publish()
    with pytest.raises(WrongKey):
        scene.lessor.decline(P, 1, b"x" * 16)
    scene.lessor.decline(P, 1, key(1))
    scene.lessor.decline(P, 1, key(1))
    assert scene.told() == [(1, ReleaseOutcome.DECLINED)]
    scene.sources.acknowledge(P, [1])
    scene.lessor.decline(P, 1, key(1))
    assert not scene.told()


def test_decline_before_its_publication_is_remembered(scene: Scene) -> None:
    with pytest.raises(WrongKey):
        scene.lessor.decline(P, 1, b"x" * 16)
    scene.publish(1)
    assert not scene.told()
    scene.lessor.decline(P, 2, key(2))
    scene.publish(2)
    assert scene.told() == [(2, ReleaseOutcome.DECLINED)]


def test_decline_of_a_publication_that_never_arrives_is_forgotten(scene: Scene) -> None:
    scene.lessor.decline(P, 1, key(1))
    scene.wait(TIMES.max_wait)
    scene.publish(1)
    assert not scene.told()


def test_abort_before_its_publication_is_released_and_final(scene: Scene) -> None:
    scene.sources.abort(P, 1)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]
    with pytest.raises(PublicationReleased):
        scene.publish(1)
    scene.sources.acknowledge(P, [1])
    with pytest.raises(PublicationStale):
        scene.publish(1)
    scene.sources.abort(P, 1)
    assert not scene.told()


def test_abort_of_an_awaited_publication_waits_for_the_lease(scene: Scene) -> None:
    lease = scene.grant()
    scene.sources.abort(P, 1)
    assert not scene.told()
    assert lease.revoked is not None
    with pytest.raises(PublicationAborted):
        scene.publish(1)
    scene.wait(TIMES.ttl)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]


def test_an_aborted_request_is_released_within_max_ttl(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    scene.wait(20)
    scene.renew(lease)
    scene.sources.abort(P, 1)
    scene.wait(TIMES.max_ttl)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]


# Steps.


def test_steps_are_idempotent(scene: Scene) -> None:
    publication = scene.publish(last=False)
    assert scene.publish(last=False) is publication
    scene.publish(step=1)
    scene.publish(step=1)
    assert len(publication.steps) == 2
    assert publication.blocks == 8


def test_a_repeated_step_is_answered_alike_after_its_publication_was_released(scene: Scene) -> None:
    publication = scene.publish()
    scene.report(scene.grant(), 0)
    assert scene.publish() is publication
    assert publication.stage is PublicationStage.RELEASED


@pytest.mark.parametrize(
    "changes",
    [
        {"last": True},
        {"groups": (blocks(count=5),)},
        {"request_id": "other"},
        {"expected_reads": 2},
        {"marks": [pb.PromptMark(end=64, digest=b"1" * 16)]},
    ],
)
def test_a_repeated_step_with_another_content_is_refused(scene: Scene, changes: dict[str, Any]) -> None:
    publication = scene.publish(last=False)
    with pytest.raises(InvalidField):
        scene.publish(**{"last": False, **changes})
    assert publication.steps == [offer(last=False)]


def test_steps_have_no_gaps_and_end_with_the_last(scene: Scene) -> None:
    with pytest.raises(InvalidField):
        scene.publish(step=1)
    scene.publish(last=False)
    with pytest.raises(InvalidField):
        scene.publish(step=2)
    scene.publish(step=1)
    with pytest.raises(InvalidField):
        scene.publish(step=2)


@pytest.mark.parametrize("changes", [{"request_id": "other"}, {"groups": (blocks(5, start=5),)}])
def test_step_begins_where_the_previous_step_ended(scene: Scene, changes: dict[str, Any]) -> None:
    publication = scene.publish(last=False)
    with pytest.raises(InvalidField):
        scene.publish(step=1, **changes)
    assert publication.step_count == 1


def test_a_group_may_begin_in_a_later_step(scene: Scene) -> None:
    scene.publish(last=False)
    window = BlockRuns("window", 40, 128, 0, (7,), (6,))
    state = BlockRuns("state", state_token=128, starts=(3,), counts=(1,))
    publication = scene.publish(step=1, groups=(blocks(4, start=5), window, state))
    assert publication.blocks == 15


# Blocks (R7).


@pytest.mark.parametrize(
    ("start", "count", "problem"),
    [
        (FULL.num_blocks, 1, "out of range"),
        (FULL.num_blocks - 1, 2, "out of range"),
        (2**31 - 1, 1, "out of range"),
        (0, 1, "null block"),
    ],
)
def test_block_ids_are_those_of_the_group(scene: Scene, start: int, count: int, problem: str) -> None:
    with pytest.raises(BadBlock, match=problem):
        scene.publish(groups=(blocks(start=start, count=count),))
    assert not arrived(scene.records)


@pytest.mark.parametrize(
    "bad",
    [
        BlockRuns("unknown", 0, 16, 0, (1,), (1,)),
        BlockRuns("full", 0, 17, 0, (1,), (1,)),
        BlockRuns("full", 0, 16, 0, (1,), (2,)),
        BlockRuns("full", 0, 0, 0, (1,), (1,)),
        BlockRuns("full", 15, 17, 0, (1,), (1,)),
        BlockRuns("full", 0, 16, 5, (1,), (1,)),
        BlockRuns("state", 0, 16, 0, (1,), (1,)),
        BlockRuns("full", 0, 2**61, 0, (1,), (900,)),
    ],
)
def test_blocks_that_do_not_fit_their_tokens_are_refused(scene: Scene, bad: BlockRuns) -> None:
    with pytest.raises(InvalidField):
        scene.publish(groups=(bad,))
    assert not arrived(scene.records)


def test_a_group_comes_once_per_step(scene: Scene) -> None:
    with pytest.raises(InvalidField):
        scene.publish(groups=(blocks(), blocks(4)))


@pytest.mark.parametrize(
    "early",
    [
        BlockRuns("full", 0, 17, 0, (1,), (2,)),
        BlockRuns("window", 0, 16, 0, (1,), (1,)),
        BlockRuns("state", state_token=3, starts=(1,), counts=(1,)),
    ],
)
def test_blocks_that_may_still_be_written_come_with_the_last_step(scene: Scene, early: BlockRuns) -> None:
    with pytest.raises(InvalidField):
        scene.publish(groups=(early,), last=False)
    scene.publish(groups=(early,))


def named(*layers: str, begun: Sequence[BlockRuns] = ()) -> dict[str, Any]:
    """A step that names complete layers of its blocks, or of the previous step's blocks."""
    return {"groups": (), "unfinished": Unfinished(tuple(begun), layers), "last": False}


def test_blocks_may_be_published_layer_by_layer(scene: Scene) -> None:
    scene.publish(last=False)
    scene.publish(step=1, **named("a", begun=[blocks(4, start=5)]))
    scene.publish(step=2, **named("b", "c"))
    found = scene.publish(step=3, groups=(blocks(4, start=5, count=6),), last=False)
    # The next unfinished blocks may begin in the step that completes the earlier ones.
    both: dict[str, Any] = {"groups": (blocks(10, count=2, start=20),), "last": False}
    scene.publish(step=4, **named("a", begun=[blocks(10, count=1, start=20)]))
    scene.publish(step=5, **{**both, "unfinished": Unfinished((blocks(12, count=1),), ("a",))})
    scene.publish(step=6, groups=(blocks(12, count=1),))
    assert found.blocks == 4 + 6 + 2 + 1
    (told,) = pb.ReadBlocksResponse.FromString(found.steps[2].encoded).blocks
    assert told == pb.Blocks(step=2, unfinished=pb.Unfinished(layers=["b", "c"]))


@pytest.mark.parametrize(
    "bad",
    [
        named("a"),
        named("a", begun=[blocks(5)]),
        named("a", begun=[blocks(3)]),
        named("a", begun=[blocks(4, start=5000)]),
        named("a", begun=[blocks(4), blocks(4)]),
        named("a", begun=[BlockRuns("full", 64, 81, 0, (1,), (2,))]),
        named("a", begun=[BlockRuns("full", 64, 64, 0, (), ())]),
        named("a", begun=[BlockRuns("window", 0, 16, 0, (1,), (1,))]),
        named("a", begun=[blocks(group="other")]),
        {**named("a", begun=[blocks(4)]), "last": True},
    ],
)
def test_invalid_unfinished_blocks_are_refused(scene: Scene, bad: dict[str, Any]) -> None:
    before = scene.publish(last=False)
    with pytest.raises((InvalidField, BadBlock)):
        scene.publish(step=1, **bad)
    assert before.step_count == 1
    scene.publish(step=1)


@pytest.mark.parametrize(
    "bad",
    [
        named("b", begun=[blocks(8)]),
        {"groups": (blocks(4, count=1),), "last": False},
        {"groups": (), "last": True},
        {"groups": (BlockRuns("window", 0, 16, 0, (1,), (1,)),), "last": True},
    ],
)
def test_unfinished_blocks_have_to_be_completed_first(scene: Scene, bad: dict[str, Any]) -> None:
    scene.publish(last=False)
    scene.publish(step=1, **named("a", begun=[blocks(4, start=5)]))
    with pytest.raises(InvalidField):
        scene.publish(step=2, **bad)
    scene.publish(step=2, groups=(blocks(4, start=5),))


def test_further_layers_are_added_without_a_copy_of_all(scene: Scene) -> None:
    """There may be 8192, each in a step of its own."""
    publication = scene.publish(**named("a", begun=[blocks()]))
    layers = publication.layers
    scene.publish(step=1, **named("b"))
    assert publication.layers is layers
    assert layers == {"a", "b"}


def test_layers_of_unfinished_blocks_are_counted_over_all_steps(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publications, "MAX_LAYERS", 3)
    scene.publish(last=False)
    scene.publish(step=1, **named("a", "b", begun=[blocks(4, start=5)]))
    # Repeated layers do not count twice.
    scene.publish(step=2, **named("b", "a", "c"))
    with pytest.raises(InvalidField, match="at most 3"):
        scene.publish(step=3, **named("d"))
    scene.publish(step=3, groups=(blocks(4, start=5),), last=False)
    scene.publish(step=4, **named("d", "e", "f", begun=[blocks(8, start=9)]))


def test_unfinished_blocks_are_limited(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publications, "MAX_UNFINISHED", 4)
    scene.publish(last=False)
    with pytest.raises(InvalidField, match="at most 4"):
        scene.publish(step=1, **named("a", begun=[blocks(4, count=5, start=5)]))
    scene.publish(step=1, **named("a", begun=[blocks(4, count=4, start=5)]))


# Marks of the prompt (R14).


def marked(*ends: int, digest: bytes = b"d" * 16) -> list[pb.PromptMark]:
    return [pb.PromptMark(end=end, digest=digest) for end in ends]


def test_marks_are_kept_with_the_step_that_stated_them(scene: Scene) -> None:
    scene.publish(last=False, marks=marked(100, 64))
    found = scene.publish(step=1, marks=marked(128))
    told = [pb.ReadBlocksResponse.FromString(step.encoded).blocks[0].marks for step in found.steps]
    assert [[(mark.end, mark.digest) for mark in marks] for marks in told] == [
        [(100, b"d" * 16), (64, b"d" * 16)],
        [(128, b"d" * 16)],
    ]


def test_a_repeated_step_with_another_digest_is_refused(scene: Scene) -> None:
    publication = scene.publish(last=False, marks=marked(64))
    assert scene.publish(last=False, marks=marked(64)) is publication
    for other in ([], marked(64, digest=b"e" * 16), marked(65), marked(64, 65)):
        with pytest.raises(InvalidField) as caught:
            scene.publish(last=False, marks=other)
        assert caught.value.values["field"] == "publish.step"
    assert publication.mark_ends == (64,)


@pytest.mark.parametrize("step", [0, 1])
def test_mark_of_an_end_comes_once(scene: Scene, step: int) -> None:
    if step:
        scene.publish(last=False, marks=marked(64))
    twice = marked(64) if step else marked(64, 128, 64)
    with pytest.raises(InvalidField, match=r"publish\.marks.*end 64 again"):
        scene.publish(step=step, marks=twice)
    assert scene.publish(step=step, marks=marked(128)).mark_ends == (*([64] * step), 128)


def test_marks_of_a_publication_are_limited_over_all_steps(scene: Scene) -> None:
    scene.publish(last=False, marks=marked(*range(1, MAX_MARKS)))
    with pytest.raises(InvalidField, match=f"at most {MAX_MARKS}"):
        scene.publish(step=1, marks=marked(500, 501))
    assert len(scene.publish(step=1, marks=marked(500)).mark_ends) == MAX_MARKS


def test_marks_are_accounted_with_about_the_memory_they_use(scene: Scene) -> None:
    numbers = range(1, 51)
    tracemalloc.start()
    try:
        for number in numbers:
            # The marks share no objects.
            ends = range(number << 20, (number << 20) + MAX_MARKS)
            scene.publish(number, marks=marked(*ends))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = sum(publication.size + PUBLICATION_BYTES for publication in arrived(scene.records))
    assert taken <= 1.2 * counted <= 4 * taken


def test_mark_digests_are_not_in_a_repr(scene: Scene) -> None:
    publication = scene.publish(marks=marked(64))
    assert "mark_ends=(64,)" in repr(publication)
    assert "dddd" not in repr(publication)


def test_blocks_of_unregistered_groups_are_refused() -> None:
    scene = Scene()
    scene.engine.groups = None
    with pytest.raises(EngineIncomplete):
        scene.publish()


# Numbers.


def test_publication_numbers_may_arrive_slightly_out_of_order(scene: Scene) -> None:
    waits = scene.grant(2)
    scene.publish(5)
    scene.publish(3)
    scene.publish(2)
    assert waits.live
    scene.wait(TIMES.max_ttl)
    with pytest.raises(PublicationStale):
        scene.publish(4)
    with pytest.raises(PublicationStale):
        scene.grant(4)


def test_late_publication_that_is_forgotten_does_not_arrive_again(scene: Scene) -> None:
    scene.publish(5)
    scene.publish(3)
    scene.lessor.decline(P, 3, key(3))
    scene.sources.acknowledge(P, [3])
    with pytest.raises(PublicationStale):
        scene.publish(3)


def test_jump_of_numbers_takes_bounded_memory(scene: Scene) -> None:
    scene.publish(2**63)
    with pytest.raises(PublicationStale):
        scene.publish(2**63 - MAX_SKIPPED - 1)
    scene.publish(2**63 - MAX_SKIPPED)


def test_publications_and_their_bytes_are_limited() -> None:
    scene = Scene(limits=Limits(publications=2, memory=0, engine_memory=20_000))
    scene.publish(1, payload=b"x" * 8000)
    with pytest.raises(LimitReached) as caught:
        scene.publish(2, payload=b"x" * 8000)
    assert caught.value.values["limit"] == "memory"
    scene.publish(2)
    with pytest.raises(LimitReached) as caught:
        scene.publish(3)
    assert caught.value.values["limit"] == "publications"
    for number in (1, 2):
        scene.lessor.decline(P, number, key(number))
    with pytest.raises(LimitReached):
        scene.publish(3)  # Released, but its source has not acknowledged the release.
    scene.sources.acknowledge(P, [1, 2])
    scene.publish(3, payload=b"x" * 4000)


# Restart of the home.


def test_grants_wait_for_the_end_of_the_snapshot() -> None:
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    scene.publish(3)
    with pytest.raises(HomeRecovering):
        scene.grant(3)
    with pytest.raises(HomeRecovering):
        scene.grant(2)
    scene.sources.end_snapshot(P, 5)
    assert scene.grant(3).live
    with pytest.raises(PublicationStale):
        scene.grant(2)
    with pytest.raises(PublicationStale):
        scene.publish(5)
    assert scene.grant(6).live


def test_a_read_without_a_lease_counts_only_once_the_snapshot_has_named_its_publication() -> None:
    """The publish may have been under way when the home that had released the publication ended."""
    scene, digest = Scene(recovering=True), bytes(range(16))
    scene.publish(1, hint_digest=digest)
    scene.sources.begin_snapshot(P)
    scene.publish(2, hint_digest=digest)
    for number in (1, 2):
        with pytest.raises(HomeRecovering):
            scene.lessor.validate(ask(number), digest, done(0))
    scene.sources.end_snapshot(P, 2)
    with pytest.raises(PublicationAborted):
        scene.lessor.validate(ask(1), digest, done(0))
    assert scene.lessor.validate(ask(2), digest, done(0)).verdict == pb.VERDICT_VALID


def test_a_read_without_a_lease_of_what_was_given_up_meanwhile_is_told_so() -> None:
    """The reference was right, so it is not the router's mistake."""
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    scene.sources.abort(P, 1, not_published=True)
    scene.sources.end_snapshot(P, 1)
    # It is not released at once: the home before this one may have granted leases.
    with pytest.raises(NotPublished):
        scene.lessor.validate(ask(1), bytes(range(16)), done(0))
    scene.publish(2)
    with pytest.raises(BadReference):
        scene.lessor.validate(ask(2), bytes(range(16)), done(0))


def test_step_before_the_snapshot_waits_for_the_snapshot() -> None:
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    scene.publish(last=False)
    # The previous step is in the part of the snapshot that has not arrived yet.
    with pytest.raises(HomeRecovering):
        scene.publish(step=2)
    scene.publish(step=1, last=False)
    assert scene.publish(step=2).step_count == 3
    scene.publish(2, last=False)
    scene.sources.end_snapshot(P, 2)
    with pytest.raises(InvalidField):
        scene.publish(2, step=2)


@pytest.mark.parametrize("end", ["read", "abort", "decline", "lease"])
def test_republished_publication_is_not_released_within_max_ttl(end: str) -> None:
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    scene.publish(1)
    scene.sources.end_snapshot(P, 1)
    scene.wait(1)
    if end == "read":
        scene.report(scene.grant(), 0)
    elif end == "abort":
        scene.sources.abort(P, 1)
    elif end == "decline":
        scene.lessor.decline(P, 1, key(1))
    else:
        scene.cancel(scene.grant())
        scene.sources.abort(P, 1)
    scene.wait(TIMES.max_ttl - 2)
    assert not scene.told()
    scene.wait(1)
    assert len(scene.told()) == 1


def test_a_publish_before_the_snapshot_may_be_a_repeated_one(scene: Scene) -> None:
    scene = Scene(recovering=True)
    scene.publish(1)
    scene.sources.abort(P, 1)
    scene.wait(TIMES.max_ttl - 1)
    assert not scene.told()
    scene.wait(1)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]


def test_publication_missing_in_a_snapshot_is_aborted(scene: Scene) -> None:
    scene.publish(1)
    scene.publish(2)
    scene.sources.begin_snapshot(P)
    scene.publish(2)
    scene.publish(3)
    scene.sources.end_snapshot(P, 2)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]
    assert scene.grant(2).live
    assert scene.grant(3).live


def test_a_snapshot_that_is_delivered_again_ends_nothing_newer(scene: Scene) -> None:
    for _ in range(2):
        scene.sources.begin_snapshot(P)
        scene.publish(1)
        scene.sources.end_snapshot(P, 1)
        scene.publish(2)
    assert not scene.told()


def test_a_late_end_of_an_earlier_snapshot_ends_nothing_in_a_later_one(scene: Scene) -> None:
    scene.publish(1)
    scene.sources.begin_snapshot(P, b"given up")
    scene.sources.begin_snapshot(P, b"later")
    with pytest.raises(InvalidField):
        scene.sources.end_snapshot(P, 1, b"given up")
    assert not scene.told()
    scene.publish(1)
    scene.sources.end_snapshot(P, 1, b"later")
    assert not scene.told()
    assert scene.grant(1).live


def test_decline_does_not_let_a_publication_missing_in_the_snapshot_arrive() -> None:
    scene = Scene(recovering=True)
    scene.lessor.decline(P, 3, key(3))
    scene.sources.begin_snapshot(P)
    scene.sources.end_snapshot(P, 5)
    with pytest.raises(PublicationStale):
        scene.publish(3)
    scene.sources.abort(P, 3)
    assert not scene.told()


def test_end_of_a_snapshot_that_this_home_saw_no_begin_of_is_refused() -> None:
    scene = Scene(recovering=True)
    with pytest.raises(InvalidField):
        scene.sources.end_snapshot(P, 5)
    with pytest.raises(HomeRecovering):
        scene.grant(1)


def test_a_snapshot_may_come_before_the_ranks_and_is_checked_when_they_do() -> None:
    scene = Scene(recovering=True)
    scene.engine.groups = None
    sources = scene.sources
    sources.begin_snapshot(P)
    good = sources.publish(P, offer(1))
    bad = sources.publish(P, offer(2, groups=(blocks(start=FULL.num_blocks),)))
    sources.end_snapshot(P, 2)
    scene.registry.register(registration(), SECRETS[P])
    assert good.stage is PublicationStage.PUBLISHED
    assert bad.stage is PublicationStage.ENDING
    with pytest.raises(PublicationAborted):
        scene.grant(2)


# The source's end.


def test_dead_source_that_comes_back_gets_its_releases(scene: Scene) -> None:
    scene.publish(1)
    lease = scene.grant(2)
    scene.lose()
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]
    assert lease.live
    scene.open(P)
    assert [publication.number for publication in scene.records.released(P)] == [1]
    scene.wait(TIMES.ttl)
    scene.publish(2)


def test_forgotten_source_that_comes_back_under_a_live_lease_gets_its_release() -> None:
    scene = Scene(replace(TIMES, engine_ttl=2, retire=3))
    scene.publish()
    lease = scene.grant()
    scene.lose()
    scene.wait(3)
    assert scene.engine.gone
    scene.open(P)
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID
    assert [publication.number for publication in scene.records.released(P)] == [1]


def test_memory_of_a_forgotten_source_that_comes_back_counts_once() -> None:
    scene = Scene(replace(TIMES, engine_ttl=2, retire=3))
    scene.registry.register(registration(), SECRETS[P])
    scene.publish()
    scene.grant()
    scene.lose()
    scene.wait(3)
    assert scene.engine.gone
    scene.open(P)
    scene.registry.register(registration(), SECRETS[P])
    assert scene.engine.block_bytes == registration().block_bytes


def test_releases_of_a_replaced_incarnation_are_not_sent(scene: Scene) -> None:
    # Until then there may be leases that the home does not know.
    scene.wait(scene.times.max_ttl)
    scene.publish(1)
    scene.publish(2)
    scene.report(scene.grant(2), 0)
    scene.publish(3)
    lease = scene.grant(3)
    scene.told()
    scene.registry.evict(P)
    scene.open(P2)
    assert scene.registry.reuse_after(P2) == lease.remaining(scene.clock.now())
    assert [publication.number for publication in arrived(scene.records)] == [3]
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID
    assert not arrived(scene.records)
    assert not scene.told()
    assert scene.registry.reuse_after(P2) == 0


def test_publication_numbers_are_per_incarnation(scene: Scene) -> None:
    scene.publish(7)
    scene.lose()
    scene.open(P2)
    scene.sources.begin_snapshot(P2)
    scene.sources.end_snapshot(P2, 0)
    scene.registry.register(registration(P2), SECRETS[P2])
    scene.publish(1, source=P2)
    assert scene.lessor.grant(ask(1, source=P2)).live


# Bounds.


def test_records_are_empty_after_many_requests(scene: Scene) -> None:
    for number in range(1, 500):
        scene.publish(number)
        lease = scene.grant(number, name=f"r{number}")
        if number % 3:
            scene.report(lease, 0)
        else:
            scene.cancel(lease)
        scene.lessor.decline(P, number, key(number))
        scene.sources.acknowledge(P, [found for found, _ in scene.told()])
        scene.wait(0.1)
    scene.wait(TIMES.final)
    assert not arrived(scene.records)
    assert not list(scene.records.leases())
    assert scene.records.deadlines.next_deadline() == float("inf")


def test_a_later_step_waits_for_the_snapshot_that_holds_the_first() -> None:
    scene = Scene(recovering=True)
    later = offer(step=1)
    for _ in range(2):
        with pytest.raises(HomeRecovering):
            scene.sources.publish(P, later)
        scene.sources.begin_snapshot(P)
    scene.sources.publish(P, offer(last=False))
    assert scene.sources.publish(P, later).step_count == 2
