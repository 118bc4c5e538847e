"""A read takes its blocks from the hint in the reference, without a lease; at the end, the home says whether they
count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group, IntegrityOptions, Prompt, Publication, Read, parse_reference
from kvferry._cache import runtime_of
from kvferry._control.acquire_request import Acquired
from kvferry._control.acquisition import Acquisition
from kvferry._reads.leased_reads import LeasedReads
from kvferry._wire.reference import MAX_HINT_BLOCKS, MAX_LENGTH, format_reference
from kvferry.engine import SchedulerPort
from kvferry.engine.values import RankEnd, WorkerOutput
from kvferry.errors import (
    BadReference,
    KvferryError,
    NotAllowed,
    PeerRestarted,
    PromptMismatch,
    PublicationAborted,
    PublicationReleased,
    PublicationStale,
    TransferCancelled,
    TransferExpired,
)
from kvferry.geometry.blocks import MAX_BLOCKS
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SOON = 20.0
SHORT = 0.8
"""Seconds; less than a read waits for the answer of its home."""
LONG = 6.0
"""Seconds after which a read takes a lease. That of production is shorter than a busy machine may take for a step."""
BLOCKS = 16
ENDED = (PublicationReleased, PublicationAborted, PublicationStale, PeerRestarted)


class Pair:
    """A source whose block n holds the value n, and a reader."""

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        self.fabric = fabric
        self.source, self.reader = fabric.client(), fabric.client(**options)
        self.memory = np.zeros((2, BLOCKS, 1, 4, 4), np.float32)
        self.theirs = self.memory + np.arange(BLOCKS, dtype=np.float32)[None, :, None, None, None]
        group = Group("full", block_tokens=4, num_blocks=BLOCKS)
        self.spec = EngineSpec("d", (group,))
        self.session = self.source.open_engine(EngineSpec("p", (group,)))
        self.source.register_cache(EngineSpec("p", (group,)), tensors={"layer": self.theirs}, axes=AXES)
        self.cache = self.reader.register_cache(self.spec, tensors={"layer": self.memory}, axes=AXES)

    def publish(self, block: int = 3, **options: Any) -> Publication:
        return self.session.publish("request", {"full": Blocks([block])}, **options)

    def holds(self, value: int, block: int = 7) -> bool:
        return bool((self.memory[:, block] == value).all())

    def leases(self) -> list[Any]:
        """The leases that the home has granted and that have not ended."""
        return [lease for lease in records(self.fabric).leases() if lease.live]


def records(fabric: Fabric) -> Any:
    return fabric._homes[fabric.address]._home.records


def hint_of(publication: Publication) -> pb.Hint:
    return pb.Hint.FromString(parse_reference(publication.reference).hint)


def refusal(pair: Pair, port: SchedulerPort, request_id: str) -> KvferryError:
    """Why a request is refused after a while, although it had an offer."""
    for _ in range(5):
        pair.fabric.advance(LONG)
    with pytest.raises(KvferryError) as refused:
        port.granted(request_id)
    return refused.value


@pytest.fixture(autouse=True)
def long_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry._reads.leased_reads.LEASE_AFTER", LONG - 1.0)


@pytest.fixture(name="pair")
def pair_fixture(fabric: Fabric) -> Pair:
    return Pair(fabric)


def test_a_read_from_a_hint_counts_without_a_lease_and_releases_its_publication(pair: Pair) -> None:
    publication = pair.publish(payload=b"first token")
    granted = records(pair.fabric).journal.notifications
    read = pair.cache.read(publication.reference, {"full": Blocks([7])})
    assert read.reference == publication.reference
    result = read.result(SOON)
    assert pair.holds(3)
    assert (result.payload, result.confirmed, result.request_id) == (b"first token", True, "request")
    assert (granted["validate"], granted["read_done"]) == (1, 0)
    (release,) = pair.session.released(timeout=SOON)
    assert release.outcome.name == "READ"
    (summary,) = release.reads
    assert (summary.state, summary.reader, summary.bytes) == ("valid", "d", result.bytes)


def test_an_offer_is_there_when_acquire_returns(pair: Pair) -> None:
    port = SchedulerPort(pair.fabric.client(), EngineSpec("e", pair.spec.groups))
    publication = pair.publish(payload=b"first token")
    port.acquire("r", publication.reference)
    offer = port.granted("r")
    assert offer is not None
    assert offer.blocks()["full"].ids.tolist() == [3]
    assert (offer.payload, offer.complete) == (b"first token", True)
    port.close()


@pytest.mark.parametrize("options", [{"optimistic": False}, {"integrity": IntegrityOptions("full")}])
def test_readers_that_need_a_lease_take_one(fabric: Fabric, options: dict[str, Any]) -> None:
    pair = Pair(fabric, **options)
    publication = pair.publish()
    pair.cache.read(publication.reference, {"full": Blocks([7])}).result(SOON)
    assert pair.holds(3)
    assert records(fabric).journal.notifications["validate"] == 0


def test_references_have_no_hint_where_blocks_follow_are_summed_or_are_too_many(fabric: Fabric) -> None:
    group = Group("full", block_tokens=4, num_blocks=8192)
    memory = np.zeros((2, 8192, 1, 4, 1), np.uint8)
    client = fabric.client()
    session = client.open_engine(EngineSpec("p", (group,)))
    client.register_cache(EngineSpec("p", (group,)), tensors={"layer": memory}, axes=AXES)
    scattered = {"full": Blocks(range(0, 4096, 2))}
    publications = [
        session.publish("more follow", {"full": Blocks([1])}, last=False),
        session.publish("summed", {"full": Blocks([1])}, checksums=True),
        session.publish("too many", scattered),
        session.publish("payload", {"full": Blocks([1])}, payload=bytes(2048)),
    ]
    assert not [each for each in publications if parse_reference(each.reference).hint]
    long = session.publish("n" * 256, {"full": Blocks(range(0, 1300, 3))}, prompt=Prompt(range(9)))
    assert len(long.reference) <= MAX_LENGTH


@pytest.mark.parametrize("end", ["abort", "restart"])
def test_bytes_do_not_count_whose_publication_has_ended_in_the_meantime(pair: Pair, end: str) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])})
        held.wait(1, SOON)
        if end == "abort":
            pair.session.abort(publication)
            assert pair.session.released(timeout=SOON)
        else:
            pair.session.close()
            pair.fabric.client().open_engine(EngineSpec("p", pair.spec.groups))
    error = read.exception(SOON)
    assert isinstance(error, ENDED)
    assert read.quiet
    # A source that has restarted is not read from any more.
    until(lambda: len(runtime_of(pair.cache)._sources._slots) == (end == "abort"))


def altered(publication: Publication, alter: Callable[[pb.Hint], object]) -> str:
    """The reference as a router has changed it."""
    reference, hint = parse_reference(publication.reference), hint_of(publication)
    alter(hint)
    reference.hint = hint.SerializeToString()
    return format_reference(reference)


@pytest.mark.parametrize(
    "alter",
    [
        lambda hint: hint.groups[0].run_starts.__setitem__(0, 5),
        lambda hint: hint.MergeFrom(pb.Hint(payload=b"another")),
        lambda hint: hint.ClearField("marks"),
        lambda hint: hint.MergeFrom(pb.Hint(request_id="another")),
    ],
    ids=["blocks", "payload", "marks", "request_id"],
)
def test_a_hint_that_a_router_has_altered_does_not_count(pair: Pair, alter: Callable[[pb.Hint], object]) -> None:
    prompt = Prompt(range(4))
    publication = pair.publish(prompt=prompt)
    read = pair.cache.read(altered(publication, alter), {"full": Blocks([7])}, prompt=prompt)
    assert isinstance(read.exception(SOON), BadReference)
    # It is there for a reader of the reference as it was.
    pair.cache.read(publication.reference, {"full": Blocks([8])}, prompt=prompt).result(SOON)
    assert pair.holds(3, 8)


def groups_of(*counts: int) -> list[pb.GroupBlocks]:
    return [pb.GroupBlocks(group=f"g{n}", run_starts=[0], run_counts=[count]) for n, count in enumerate(counts)]


@pytest.mark.parametrize(
    "hint",
    [
        b"\xff\xff",
        pb.Hint(groups=[pb.GroupBlocks(group="g", run_starts=[1])]).SerializeToString(),
        # Their ids would be made in the step of an engine, which a forged reference must not hold up.
        pb.Hint(groups=groups_of(MAX_BLOCKS)).SerializeToString(),
        pb.Hint(groups=groups_of(MAX_HINT_BLOCKS, 1)).SerializeToString(),
    ],
    ids=["garbage", "malformed", "too many blocks", "too many blocks together"],
)
def test_a_hint_that_cannot_be_read_costs_no_more_than_a_lease(pair: Pair, hint: bytes) -> None:
    publication = pair.publish()
    reference = parse_reference(publication.reference)
    reference.hint = hint
    read = pair.cache.read(format_reference(reference), {"full": Blocks([7])})
    assert read.exception(SOON) is None
    assert pair.holds(3)


def test_a_read_that_is_named_like_an_earlier_one_does_not_get_the_answer_to_that_one(pair: Pair) -> None:
    publication = pair.publish()
    pair.cache.read(publication.reference, {"full": Blocks([7])}, read_id="name").result(SOON)
    assert pair.session.released(timeout=SOON)
    pair.theirs[:, 3] = 99
    again = pair.cache.read(publication.reference, {"full": Blocks([8])}, read_id="name")
    assert isinstance(again.exception(SOON), ENDED)


@pytest.mark.parametrize("optimistic", [True, False])
def test_reads_of_one_name_at_once_have_leases_of_their_own(fabric: Fabric, optimistic: bool) -> None:
    pair = Pair(fabric, optimistic=optimistic)
    publication = pair.publish()
    with fabric.hold_reads() as held:
        first = pair.cache.read(publication.reference, {"full": Blocks([7])}, read_id="name", timeout=1000.0)
        held.wait(1, SOON)
        second = pair.cache.read(publication.reference, {"full": Blocks([8])}, read_id="name", timeout=1000.0)
        held.wait(2, SOON)
        fabric.advance(1.0)
        until(lambda: len(pair.leases()) == 2)
        held.release(1)
        first.result(SOON)
        assert not pair.session.released(timeout=0)
    second.result(SOON)
    assert pair.holds(3, 8)


def test_a_rank_that_reads_again_under_the_name_of_a_shared_read_gets_no_verdict_of_before(fabric: Fabric) -> None:
    """The other rank ends the lease while the second reading goes on: the source is free to change its blocks."""
    pair = Pair(fabric)
    session = fabric.client().open_engine(spec := EngineSpec("two", pair.spec.groups, num_ranks=2))
    memory = [np.zeros_like(pair.theirs) for _ in range(2)]
    ranks = [
        fabric.client().register_cache(
            spec, rank=rank, token=session.token, tensors={"layer": memory[rank]}, axes=AXES, replicated=True
        )
        for rank in range(2)
    ]
    publication = pair.publish()

    def read(rank: int, block: int) -> Read:
        return ranks[rank].read(publication.reference, {"full": Blocks([block])}, read_id="name", parties=2)

    read(0, 7).result(SOON)
    with fabric.hold_reads() as held:
        other = read(1, 7)
        held.wait(1, SOON)
        again = read(0, 8)
        held.wait(2, SOON)
        held.release(1)
        other.result(SOON)
        assert pair.session.released(timeout=SOON)
        pair.theirs[:, 3] = 99
    assert isinstance(again.exception(SOON), TransferExpired)
    assert (memory[0][:, 7] == 3).all()


def test_the_hint_of_another_publication_does_not_count(pair: Pair) -> None:
    first, second = pair.publish(3), pair.publish(5)
    read = pair.cache.read(altered(first, lambda hint: hint.CopyFrom(hint_of(second))), {"full": Blocks([7])})
    assert isinstance(read.exception(SOON), BadReference)


def test_a_hint_with_the_mark_of_another_prompt_moves_no_byte(pair: Pair) -> None:
    publication = pair.publish(prompt=Prompt([1, 2, 3, 4]))
    read = pair.cache.read(publication.reference, {"full": Blocks([7])}, prompt=Prompt([1, 2, 3, 5]))
    assert isinstance(read.exception(SOON), PromptMismatch)
    assert pair.holds(0)


def test_a_long_read_gets_a_lease_so_that_its_publication_is_not_released(pair: Pair) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        assert not pair.leases()
        for _ in range(20):
            pair.fabric.advance(10.0)
        assert len(pair.leases()) == 1
        assert not pair.session.released(timeout=0)
    read.result(SOON)
    assert pair.holds(3)
    assert not pair.leases()
    (release,) = pair.session.released(timeout=SOON)
    assert [summary.state for summary in release.reads] == ["valid"]


def test_a_long_read_of_a_hint_that_was_altered_ends_with_its_lease(pair: Pair) -> None:
    publication = pair.publish()
    reference = altered(publication, lambda hint: hint.groups[0].run_starts.__setitem__(0, 5))
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        pair.fabric.advance(LONG)
        assert isinstance(read.exception(SOON), BadReference)
        assert not read.quiet
    assert read.wait_quiet(SOON)
    assert not pair.leases()


@pytest.mark.parametrize("alter", [pb.Hint(payload=b"another"), pb.Hint(request_id="another")], ids=["payload", "name"])
def test_a_lease_confirms_only_what_its_home_has_told(pair: Pair, alter: pb.Hint) -> None:
    port = SchedulerPort(pair.fabric.client(), EngineSpec("e", pair.spec.groups))
    publication = pair.publish(payload=b"first token")
    port.acquire("r", altered(publication, lambda hint: hint.MergeFrom(alter)), timeout=1000.0)
    assert port.granted("r") is not None
    assert isinstance(refusal(pair, port, "r"), BadReference)
    port.close()
    assert not pair.leases()


def test_a_first_step_is_not_a_whole_publication(pair: Pair) -> None:
    port = SchedulerPort(pair.fabric.client(), EngineSpec("e", pair.spec.groups))
    reference = parse_reference(pair.session.publish("request", {"full": Blocks([3])}, last=False).reference)
    group = pb.GroupBlocks(group="full", end_token=4, run_starts=[3], run_counts=[1])
    reference.hint = pb.Hint(groups=[group], request_id="request").SerializeToString()
    port.acquire("r", format_reference(reference), timeout=1000.0, progressive=True)
    assert isinstance(refusal(pair, port, "r"), BadReference)
    port.close()
    assert not pair.leases()


def test_a_failed_read_has_no_payload_of_a_hint(pair: Pair) -> None:
    port = SchedulerPort(pair.fabric.client(), EngineSpec("e", pair.spec.groups))
    publication = pair.publish()
    port.acquire("r", altered(publication, lambda hint: hint.MergeFrom(pb.Hint(payload=b"another"))))
    grant = port.attach("r", {"full": Blocks([7])})
    port.collect(WorkerOutput(0, ended=(RankEnd(grant.read_id, "r", ok=True, quiet=True, bytes=64),)))
    until(lambda: port.stats().quiet)
    (end,) = port.finished().reads
    assert isinstance(end.error, BadReference)
    assert end.payload == b""
    port.close()


def test_a_router_that_has_replaced_the_marks_too_is_found_by_the_lease(pair: Pair) -> None:
    mine = Prompt([1, 2, 3, 5])
    publication = pair.publish(prompt=Prompt([1, 2, 3, 4]))
    reference, hint = parse_reference(publication.reference), hint_of(publication)
    for mark in (*reference.marks, *hint.marks):
        mark.digest = mine.mark(reference.key, mark.end)
    reference.hint = hint.SerializeToString()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(format_reference(reference), {"full": Blocks([7])}, prompt=mine, timeout=1000.0)
        held.wait(1, SOON)
        pair.fabric.advance(LONG)
        assert isinstance(read.exception(SOON), PromptMismatch)


def test_a_read_ends_with_its_lease_although_its_home_is_away(pair: Pair) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        pair.fabric.advance(LONG)
        until(lambda: len(pair.leases()) == 1)
        pair.fabric.stop_home()
        for _ in range(10):
            pair.fabric.advance(5.0)
        assert isinstance(read.exception(SOON), TransferExpired)


def test_a_read_whose_lease_is_refused_ends_with_the_refusal(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that begins with a lease: its user has to learn what to change."""

    async def refused(_: Acquisition) -> Acquired:
        raise NotAllowed("this identity may not read")

    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        monkeypatch.setattr(Acquisition, "first", refused)
        pair.fabric.advance(LONG)
        assert isinstance(read.exception(SOON), NotAllowed)


def test_a_read_expires_whose_publication_ends_before_its_lease(pair: Pair) -> None:
    """As one whose publication ends before its last byte: whether it needs a lease is a question of time only."""
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        pair.session.abort(publication)
        assert pair.session.released(timeout=SOON)
        pair.fabric.advance(LONG)
    assert isinstance(read.exception(SOON), TransferExpired)


def test_a_read_expires_whose_home_stays_away(pair: Pair) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        pair.fabric.stop_home()
    for _ in range(80):
        pair.fabric.advance(0.25)
    assert isinstance(read.exception(SOON), TransferExpired)


def test_a_read_that_waits_for_its_home_ends_when_it_is_cancelled(pair: Pair) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])})
        held.wait(1, SOON)
        pair.fabric.stop_home()
    until(lambda: pair.reader.stats().reads.stages["judging"] == 1)
    read.cancel()
    assert isinstance(read.exception(SHORT), TransferCancelled)
    assert read.quiet


def test_a_request_that_waits_for_its_home_ends_when_it_is_cancelled(pair: Pair) -> None:
    client = pair.fabric.client()
    port = SchedulerPort(client, EngineSpec("e", pair.spec.groups))
    port.acquire("r", pair.publish().reference)
    grant = port.attach("r", {"full": Blocks([7])})
    pair.fabric.stop_home()
    port.collect(WorkerOutput(0, ended=(RankEnd(grant.read_id, "r", ok=True, quiet=True, bytes=64),)))
    until(lambda: client.stats().reads.stages["judging"] == 1)
    assert port.cancel("r")
    until(lambda: port.stats().quiet)
    (end,) = port.finished().reads
    assert isinstance(end.error, TransferCancelled)
    port.close()


def test_a_lease_that_came_too_late_does_not_end_its_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def given_back(reads: Any, read: Any) -> None:
        leased = await reads._holder.acquire(read.request, lambda: None).first()
        reads._holder.let_go(read.request.home, leased.lease)

    monkeypatch.setattr(LeasedReads, "_lease", given_back)
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        pair.fabric.advance(LONG)
        until(lambda: any(not lease.live for lease in records(pair.fabric).leases()))
    assert read.exception(SOON) is None
    assert pair.holds(3)


@pytest.mark.parametrize("leased", [True, False])
def test_a_long_read_counts_without_its_home_only_by_a_lease(pair: Pair, leased: bool) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        if leased:
            pair.fabric.advance(LONG)
            until(lambda: len(pair.leases()) == 1)
        pair.fabric.stop_home()
        # It may ask for a lease in vain.
        pair.fabric.advance(LONG)
    if leased:
        assert not read.result(SOON).confirmed
        assert pair.holds(3)
        return
    for _ in range(80):
        pair.fabric.advance(0.25)
    assert isinstance(read.exception(SOON), TransferExpired)


def test_a_long_read_whose_home_is_away_from_its_begin_ends_long_before_its_timeout(pair: Pair) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])}, timeout=1000.0)
        held.wait(1, SOON)
        pair.fabric.stop_home()
        for _ in range(30):
            pair.fabric.advance(1.0)
        assert isinstance(read.exception(SOON), TransferExpired)
        assert not read.quiet
    assert read.wait_quiet(SOON)


def test_a_request_that_waits_for_blocks_gets_a_lease_and_gives_it_back(pair: Pair) -> None:
    port = SchedulerPort(pair.fabric.client(), EngineSpec("e", pair.spec.groups))
    publication = pair.publish()
    port.acquire("r", publication.reference, timeout=1000.0)
    for _ in range(20):
        pair.fabric.advance(10.0)
    assert len(pair.leases()) == 1
    port.cancel("r")
    port.close()
    assert not pair.leases()


def test_an_offer_ends_when_its_publication_does(pair: Pair) -> None:
    port = SchedulerPort(pair.fabric.client(), EngineSpec("e", pair.spec.groups))
    publication = pair.publish()
    port.acquire("r", publication.reference)
    pair.session.abort(publication)
    assert pair.session.released(timeout=SOON)
    assert port.news() == ["r"]
    for _ in range(5):
        pair.fabric.advance(LONG)
    port.wait_news(SOON)
    with pytest.raises(KvferryError) as refused:
        port.granted("r")
    assert isinstance(refused.value, ENDED)
    port.close()


def test_a_home_that_has_restarted_is_asked_again_until_it_knows(pair: Pair) -> None:
    publication = pair.publish()
    with pair.fabric.hold_reads() as held:
        read = pair.cache.read(publication.reference, {"full": Blocks([7])})
        held.wait(1, SOON)
        pair.fabric.stop_home()
    pair.fabric.start_home()
    assert read.result(SOON).confirmed
    assert pair.holds(3)


def test_every_read_counts_once(pair: Pair) -> None:
    publication = pair.publish(expected_reads=2)
    pair.cache.read(publication.reference, {"full": Blocks([7])}).result(SOON)
    assert not pair.session.released(timeout=0)
    pair.cache.read(publication.reference, {"full": Blocks([8])}).result(SOON)
    (release,) = pair.session.released(timeout=SOON)
    assert [summary.state for summary in release.reads] == ["valid", "valid"]


def test_a_failed_read_is_told_and_leaves_its_publication_to_others(pair: Pair) -> None:
    publication = pair.publish()
    pair.fabric.fail_reads(1)
    assert pair.cache.read(publication.reference, {"full": Blocks([7])}).exception(SOON) is not None
    pair.fabric.fail_reads(0)
    pair.cache.read(publication.reference, {"full": Blocks([8])}).result(SOON)
    (release,) = pair.session.released(timeout=SOON)
    assert sorted(summary.state for summary in release.reads) == ["failed", "valid"]
