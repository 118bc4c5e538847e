"""The ports of schedulers and workers, between real processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import msgpack

from kvferry import Blocks, Client, ReleaseOutcome
from kvferry._clock import now
from kvferry._control.acquisition import Acquisition
from kvferry.engine import Grant, RankEnd, SchedulerPort, Tails, WorkerOutput
from kvferry.errors import (
    BadBlock,
    BadReference,
    DataLoss,
    InvalidField,
    InvalidInput,
    KvferryError,
    LimitReached,
    PublicationAborted,
    PublicationReleased,
    PublicationStale,
    PublicationTimeout,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
    TransferStuck,
    WrongState,
)
from kvferry.geometry.blocks import BlockRuns
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.engine.port_engines import PortEngine
from tests.support.caches import POISON, Model, expect, kv, shards, write
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.repository import ROOT

Pair = tuple[PortEngine, PortEngine]
SOURCE_IDS, IDS, TOKENS = [3, 4, 9], [20, 7, 8], 40


def publish(source: PortEngine, request: str, **options: object):  # type: ignore[no-untyped-def]
    """Write a request's KV into the source's blocks, and offer them."""
    values = kv(source.model, len(request), TOKENS)
    for memory in source.memories:
        write(memory, values, SOURCE_IDS)
    blocks = {"full": Blocks(SOURCE_IDS, end_token=TOKENS)}
    return source.scheduler.publish(request, blocks, **options), values  # type: ignore[arg-type]


def test_a_request_from_prefill_to_decode(pair: Pair) -> None:
    source, destination = pair
    publication, values = publish(source, "one", payload=b"first token: 7")
    destination.scheduler.acquire("mine", publication.reference)
    grant = destination.grant("mine")
    assert grant.source_request_id == "one"
    assert grant.payload == b"first token: 7"
    assert grant.blocks() == {"full": Blocks(SOURCE_IDS, end_token=TOKENS)}
    destination.start("mine", IDS)
    end = destination.end_of("mine")
    assert (end.error, end.quiet, end.ranks, end.confirmed) == (None, True, 3, True)
    assert end.bytes == sum(array.size for array in values.values())
    assert end.payload == b"first token: 7"
    for memory in destination.memories:
        assert (memory.cells == expect(memory, values, IDS, (0, TOKENS))).all()
    release = source.release_of(publication)
    assert release.outcome is ReleaseOutcome.READ
    # One report for all ranks. On a slow machine the read without a lease has become one with a lease.
    assert [read.reported for read in release.reads if read.reported] == [3]


def test_a_prefix_that_is_cached_already_is_not_read(pair: Pair) -> None:
    source, destination = pair
    publication, values = publish(source, "prefix")
    destination.scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    destination.start("mine", IDS[1:], (16, TOKENS))
    assert destination.end_of("mine").error is None
    for memory in destination.memories:
        assert (memory.cells == expect(memory, values, IDS[1:], (16, TOKENS))).all()
    source.release_of(publication)


def test_tails_are_cleared_where_asked(pair: Pair) -> None:
    source, destination = pair
    publication, values = publish(source, "tails")
    destination.scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    # A block more than is published: 8 tokens of the third block and all of the fourth are tail.
    into = [*IDS, 15]
    blocks = {"full": Blocks(into, end_token=TOKENS)}
    grant = destination.scheduler.attach("mine", blocks)
    for worker in destination.workers:
        worker.call("start", msgpack.encode(grant), Tails.ZERO.value)
    assert destination.end_of("mine").error is None
    for memory in destination.memories:
        wanted = expect(memory, values, into, (0, TOKENS))
        before = memory.cells.copy()
        memory.cells[:] = wanted
        for layer in range(memory.model.layers):
            for component in memory.model.components:
                plane = memory.plane(layer, component)
                plane[IDS[2], :, TOKENS % 16 :] = 0
                plane[15] = 0
        wanted = memory.cells.copy()
        memory.cells[:] = before
        assert (memory.cells == wanted).all()
    source.release_of(publication)


def test_a_read_may_begin_before_the_publication(pair: Pair) -> None:
    source, destination = pair
    blocks = {"full": Blocks(SOURCE_IDS[:2])}
    publication = source.scheduler.publish("slow", blocks, last=False)
    destination.scheduler.acquire("mine", publication.reference)
    assert destination.scheduler.granted("mine") is None
    source.scheduler.publish_more(publication, {"full": Blocks(SOURCE_IDS[2:], 32, TOKENS)}, last=True)
    assert destination.grant("mine").blocks() == {"full": Blocks(SOURCE_IDS, end_token=TOKENS)}
    assert destination.scheduler.cancel("mine")
    source.scheduler.abort(publication)
    assert source.release_of(publication).outcome is ReleaseOutcome.ABORTED


def test_samples_of_one_prompt_read_one_publication(pair: Pair) -> None:
    source, destination = pair
    publication, values = publish(source, "samples", expected_reads=3)
    for sample in range(3):
        assert not any(release.publication == publication.number for release in source.released)
        for memory in destination.memories:
            memory.cells[:] = POISON
        destination.scheduler.acquire(f"sample-{sample}", publication.reference)
        destination.grant(f"sample-{sample}")
        ids = [id_ + 3 * sample for id_ in (12, 13, 14)]
        destination.start(f"sample-{sample}", ids)
        assert destination.end_of(f"sample-{sample}").error is None
        for memory in destination.memories:
            assert (memory.cells == expect(memory, values, ids, (0, TOKENS))).all()
        source.step()
    release = source.release_of(publication)
    assert len(release.reads) == 3


def test_a_declined_publication_is_released_at_once(pair: Pair) -> None:
    source, destination = pair
    publication, _ = publish(source, "declined")
    destination.scheduler.decline(publication.reference)
    assert source.release_of(publication).outcome is ReleaseOutcome.DECLINED


def test_a_publication_declined_after_its_grant_is_released(pair: Pair) -> None:
    source, destination = pair
    publication, _ = publish(source, "late-decline")
    destination.scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    destination.scheduler.decline(publication.reference)
    with pytest.raises(WrongState):
        destination.scheduler.granted("mine")
    source.release_of(publication)


def test_a_read_cancelled_while_it_waits(pair: Pair) -> None:
    source, destination = pair
    publication = source.scheduler.publish("never", {"full": Blocks([1])}, last=False)
    destination.scheduler.acquire("mine", publication.reference)
    assert destination.scheduler.cancel("mine")
    assert not destination.scheduler.cancel("mine")
    # The name is free at once.
    destination.scheduler.acquire("mine", publication.reference)
    destination.scheduler.cancel("mine")
    source.scheduler.abort(publication)
    source.release_of(publication)


def test_a_read_cancelled_while_its_bytes_move(pair: Pair) -> None:
    source, destination = pair
    publication, _ = publish(source, "cancelled")
    destination.scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    # Rank 2 is never started, so that the read cannot have ended.
    grant = destination.start("mine", IDS, ranks=range(2))
    destination.until(lambda: destination.scheduler.stats().reading == 1)
    assert destination.scheduler.cancel("mine")
    assert destination.scheduler.cancels() == [grant.read_id]
    destination.workers[2].call("start", msgpack.encode(grant), Tails.KEEP.value)
    for worker in destination.workers:
        worker.call("cancel", grant.read_id)
    end = destination.end_of("mine")
    assert isinstance(end.error, TransferCancelled)
    assert end.lost == {"full": tuple(IDS)}
    assert end.quiet
    source.scheduler.abort(publication)
    source.release_of(publication)


def test_a_publication_that_its_source_aborts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = pair
    accept, accepted = Acquisition._accept, threading.Event()

    def seen(waiting: Acquisition, answer: pb.Accepted, sent_at: float) -> bool:
        accepted.set()
        return accept(waiting, answer, sent_at)

    monkeypatch.setattr(Acquisition, "_accept", seen)
    publication = source.scheduler.publish("taken-back", {"full": Blocks([1])}, last=False)
    destination.scheduler.acquire("mine", publication.reference)
    assert accepted.wait(30)
    source.scheduler.abort(publication)
    with pytest.raises(PublicationAborted):
        destination.grant("mine")
    source.release_of(publication)
    # Whoever asks only now; once the source has acknowledged the release, its home has forgotten the publication.
    destination.scheduler.acquire("late", publication.reference)
    with pytest.raises((PublicationReleased, PublicationStale)):
        destination.grant("late")


def test_a_publication_that_never_comes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = pair
    accept = Acquisition._accept

    def soon(waiting: Acquisition, accepted: pb.Accepted, sent_at: float) -> bool:
        # From the first answer on, which may come late.
        waiting._request.deadline = now() + 0.5
        return accept(waiting, accepted, sent_at)

    monkeypatch.setattr(Acquisition, "_accept", soon)
    publication = source.scheduler.publish("half", {"full": Blocks([1])}, last=False)
    destination.scheduler.acquire("mine", publication.reference)
    with pytest.raises(PublicationTimeout):
        destination.grant("mine")
    source.scheduler.abort(publication)
    source.release_of(publication)


def test_a_grant_that_is_not_attached_in_time(pair: Pair) -> None:
    source, destination = pair
    publication, _ = publish(source, "forgotten")
    destination.scheduler.acquire("mine", publication.reference, timeout=1.5)
    destination.grant("mine")
    destination.until(lambda: destination.scheduler.stats().granted == 0)
    # The engine may have asked before, and has blocks now.
    with pytest.raises(TransferStuck):
        destination.scheduler.attach("mine", {"full": Blocks(IDS)})
    with pytest.raises(WrongState):
        destination.scheduler.granted("mine")
    source.scheduler.abort(publication)
    source.release_of(publication)


def test_blocks_that_are_too_few_are_refused_and_the_request_stays_granted(pair: Pair) -> None:
    source, destination = pair
    publication, _ = publish(source, "short")
    destination.scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    for short in (IDS[:1], [], [IDS[0]] * len(IDS)):
        with pytest.raises(InvalidInput) as refused:
            destination.start("mine", short)
        assert refused.value.reason in ("BLOCKS_SHORT", "BAD_BLOCK")
    destination.start("mine", IDS)
    assert destination.end_of("mine").error is None
    source.release_of(publication)


def test_a_changed_byte_is_found(homes: tuple[str, str], port_engine: Callable[..., PortEngine]) -> None:
    model = Model(heads=6)
    source = port_engine(homes[0], model, shards(6, 2), integrity="full")
    destination = port_engine(homes[1], model, shards(6, 1), integrity="full")
    source.ready(), destination.ready()
    for request, spoilt in (("sound", False), ("spoilt", True)):
        publication, _ = publish(source, request, checksums=True)
        for worker in source.workers:
            worker.call("checksum", publication.number, {"full": Blocks(SOURCE_IDS, end_token=TOKENS)})
        if spoilt:
            source.memories[1].plane(1, "value")[SOURCE_IDS[1], 0, 3, 0] ^= 1
        destination.scheduler.acquire("mine", publication.reference)
        destination.grant("mine")
        destination.start("mine", IDS)
        end = destination.end_of("mine")
        if spoilt:
            assert isinstance(end.error, DataLoss)
            assert end.error.values["plane"] == "layers.1/value"
            assert end.lost == {"full": tuple(IDS)}
            source.scheduler.abort(publication)
        else:
            assert end.error is None
        source.release_of(publication)


def test_invalid_arguments_are_refused_at_once(pair: Pair) -> None:
    source, destination = pair
    scheduler = destination.scheduler
    with pytest.raises(BadReference):
        scheduler.acquire("mine", "nonsense")
    with pytest.raises(BadReference):
        scheduler.decline("nonsense")
    with pytest.raises(WrongState, match="acquire it first"):
        scheduler.granted("nobody")
    with pytest.raises(WrongState, match="acquire it first"):
        scheduler.attach("nobody", {"full": Blocks([1])})
    with pytest.raises(BadBlock):
        source.scheduler.publish("bad", {"full": Blocks([source.model.num_blocks])})
    with pytest.raises(InvalidField):
        scheduler.collect(WorkerOutput(3))
    publication, _ = publish(source, "refused")
    scheduler.acquire("mine", publication.reference)
    with pytest.raises(WrongState, match="being read already"):
        scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    with pytest.raises(BadBlock):
        scheduler.attach("mine", {"full": Blocks([-1])})
    scheduler.decline(publication.reference)
    source.release_of(publication)


def test_waiting_reads_have_a_limit(homes: tuple[str, str], pair: Pair) -> None:
    source, destination = pair
    publication = source.scheduler.publish("awaited", {"full": Blocks([1])}, last=False)
    with Client(homes[1]) as client:
        port = SchedulerPort(client, replace(destination.spec, engine_id=unique_id("small")), max_waiting=2)
        for request in ("a", "b"):
            port.acquire(request, publication.reference)
        with pytest.raises(LimitReached):
            port.acquire("c", publication.reference)
        port.close()
    # The waiting reads were cancelled; no caller waits for their leases.
    source.scheduler.abort(publication)
    release = source.release_of(publication)
    assert {read.state for read in release.reads} <= {"cancelled"}


def test_the_loss_of_a_source_is_returned_with_the_blocks(
    homes: tuple[str, str], port_engine: Callable[..., PortEngine]
) -> None:
    model = Model()
    source = port_engine(homes[0], model, shards(model.heads, 1))
    destination = port_engine(homes[1], model, shards(model.heads, 1))
    source.ready(), destination.ready()
    publication, _ = publish(source, "orphan")
    destination.scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    os.kill(source.workers[0].process.pid, signal.SIGKILL)
    source.workers[0].process.join()
    destination.start("mine", IDS)
    end = destination.end_of("mine", 60)
    assert isinstance(end.error, (TransferFailed, TransferStuck)), end.error
    assert end.lost == {"full": tuple(IDS)}
    destination.until(lambda: end.quiet or "mine" in destination.quiesced, 60)
    assert destination.scheduler.stats().uncertain == 0


def test_counts_of_ports_are_exact(pair: Pair) -> None:
    source, destination = pair
    outcomes = destination.client.stats().reads.outcomes
    publications = []
    for index in range(4):
        publication, _ = publish(source, f"count-{index}")
        publications.append(publication)
        destination.scheduler.acquire(f"count-{index}", publication.reference)
        destination.grant(f"count-{index}")
        destination.start(f"count-{index}", [4 * index, 4 * index + 1, 4 * index + 2])
        assert destination.end_of(f"count-{index}").error is None
    for publication in publications:
        source.release_of(publication)
    after = destination.client.stats().reads
    assert after.outcomes["done"] - outcomes["done"] == 4
    assert (source.scheduler.stats().pinned, destination.scheduler.stats().quiet) == (0, True)


def test_a_home_that_refuses_releases_the_publication(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = pair
    # As if only the home looked at it.
    monkeypatch.setattr("kvferry._control.publish.check_published", lambda *_, **__: None)
    publication = source.scheduler.publish("refused", {"full": Blocks([1], state_token=5)})
    release = source.release_of(publication)
    assert (release.outcome, release.local) == (ReleaseOutcome.ABORTED, False)


def test_workers_without_reports_are_given_up(
    homes: tuple[str, str], port_engine: Callable[..., PortEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks stay aside until they have said that these are quiet."""
    monkeypatch.setattr("kvferry._reads.leased_reads.RANKS_GRACE", 0.5)
    model = Model()
    source = port_engine(homes[0], model, shards(model.heads, 1))
    destination = port_engine(homes[1], model, shards(model.heads, 1))
    source.ready(), destination.ready()
    assert source.scheduler.stats().quiet
    publication, _ = publish(source, "silent")
    assert not source.scheduler.stats().quiet
    assert destination.scheduler.stats().quiet
    destination.scheduler.acquire("mine", publication.reference, timeout=2)
    assert not destination.scheduler.stats().quiet
    destination.grant("mine")
    # Nor does the engine tell them that the read has ended.
    monkeypatch.setattr(destination.scheduler, "cancels", list)
    grant = destination.start("mine", IDS, ranks=range(0))
    end = destination.end_of("mine")
    assert isinstance(end.error, TransferStuck)
    assert (end.quiet, end.ranks, end.lost) == (False, 0, {"full": tuple(IDS)})
    assert (destination.scheduler.stats().uncertain, destination.scheduler.stats().quiet) == (1, False)
    # Late, but it comes.
    destination.workers[0].call("start", msgpack.encode(grant), Tails.KEEP.value)
    destination.until(lambda: destination.quiesced == ["mine"])
    assert (destination.scheduler.stats().uncertain, destination.scheduler.stats().quiet) == (0, True)
    source.scheduler.abort(publication)
    source.release_of(publication)
    assert source.scheduler.stats().quiet


def test_failed_reads_are_withheld_until_quiet(
    homes: tuple[str, str], port_engine: Callable[..., PortEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry._reads.leased_reads.RANKS_GRACE", 0.5)
    model = Model()
    source = port_engine(homes[0], model, shards(model.heads, 1))
    destination = port_engine(homes[1], model, shards(model.heads, 1), hold_until_quiet=True)
    source.ready(), destination.ready()
    publication, _ = publish(source, "withheld")
    destination.scheduler.acquire("mine", publication.reference, timeout=2)
    destination.grant("mine")
    monkeypatch.setattr(destination.scheduler, "cancels", list)
    grant = destination.start("mine", IDS, ranks=range(0))
    destination.until(lambda: destination.scheduler.stats().uncertain == 1)
    destination.step()
    assert destination.ended == {}
    destination.workers[0].call("start", msgpack.encode(grant), Tails.KEEP.value)
    end = destination.end_of("mine")
    assert (isinstance(end.error, TransferStuck), end.quiet) == (True, True)


def test_a_closed_port_gives_its_leases_back(
    homes: tuple[str, str], pair: Pair, port_engine: Callable[..., PortEngine]
) -> None:
    source, _ = pair
    publication, _ = publish(source, "closed")
    with Client(homes[1]) as client:
        spec = replace(pair[1].spec, engine_id=unique_id("closing"))
        port = SchedulerPort(client, spec)
        port.acquire("mine", publication.reference)
        while port.granted("mine") is None:
            pass
        port.close()
    source.scheduler.abort(publication)
    # At once: a lease that runs on would hold it for half a minute.
    source.release_of(publication, timeout=10)


def test_poll_returns_more_until_it_is_acknowledged(pair: Pair) -> None:
    source, destination = pair
    publication, _ = publish(source, "polled")
    destination.scheduler.acquire("mine", publication.reference)
    destination.grant("mine")
    destination.start("mine", IDS)
    worker = destination.workers[0]
    seen: WorkerOutput = worker.call("poll")
    while not seen.ended:
        seen = worker.call("poll")
    assert worker.call("poll") == seen
    # An engine without a scheduler process reduces over its ranks: done is what all have seen.
    for other in destination.workers[1:]:
        while not other.call("poll").ended:
            pass
    for each in destination.workers:
        output = each.call("poll")
        destination.scheduler.collect(output)
        destination.scheduler.collect(output)
        each.call("acknowledge", output)
        assert not each.call("poll")
    assert destination.end_of("mine").error is None
    source.release_of(publication)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "exec"])
def test_workers_may_be_made_in_any_way(homes: tuple[str, str], tmp_path: Path, method: str) -> None:
    """Forked before their parent uses kvferry, spawned, or started by somebody else with the token in their
    environment, as Ray does."""
    command = [sys.executable, "-m", "tests.engine.startup", "engine", method, homes[0], str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_warm_up_makes_the_handshakes(
    homes: tuple[str, str], pair: Pair, port_engine: Callable[..., PortEngine]
) -> None:
    source, _ = pair
    destination = port_engine(homes[1], source.model, shards(6, 3)).ready()
    ranks = [worker.call("warm", source.scheduler.engine_reference) for worker in destination.workers]
    assert ranks == [(0,), (0, 1), (1,)]
    # While a publication lives, its reference does as well.
    late = port_engine(homes[1], source.model, shards(6, 3)).ready()
    published, _ = publish(source, "published")
    assert [worker.call("warm", published.reference) for worker in late.workers] == ranks


def test_a_reference_that_is_gone_fails_no_other_read_of_its_source(
    homes: tuple[str, str], pair: Pair, port_engine: Callable[..., PortEngine]
) -> None:
    source, _ = pair
    destination = port_engine(homes[1], source.model, shards(6, 3)).ready()
    gone, _ = publish(source, "gone")
    destination.scheduler.acquire("gone", gone.reference)
    local = (BlockRuns.of_blocks("full", Blocks([1, 2, 3])),)
    late = destination.grant("gone").attached(local, None, timeout=30.0)
    assert destination.scheduler.cancel("gone")
    destination.scheduler.decline(gone.reference)
    source.release_of(gone)
    good, values = publish(source, "good")
    destination.scheduler.acquire("good", good.reference)
    destination.grant("good")
    grant = destination.scheduler.attach("good", {"full": Blocks(IDS)})
    failed: list[KvferryError | None] = []
    for worker in destination.workers:
        # The first of them handshakes with the source, the other waits for its result.
        for each in (late, grant):
            worker.call("start", msgpack.encode(each), Tails.KEEP.value)
    while len(failed) < len(destination.workers):
        for worker in destination.workers:
            output = worker.finished()
            failed += [end.error() for end in output.failed]
            destination.scheduler.collect(output)
    assert all(isinstance(error, PublicationStale) for error in failed)
    assert destination.end_of("good").error is None
    for memory in destination.memories:
        assert (memory.cells == expect(memory, values, IDS, (0, TOKENS))).all()
    source.release_of(good)


@pytest.mark.slow
def test_a_home_that_restarts_while_ports_work(tmp_path: Path, port_engine: Callable[..., PortEngine]) -> None:
    model = Model()
    with NodeServerProcess(tmp_path / "one", tcp=True, ttl=6, max_ttl=6, engine_ttl=10) as server:
        source = port_engine(server.address, model, shards(model.heads, 1))
        destination = port_engine(server.address, model, shards(model.heads, 1))
        source.ready(), destination.ready()
        publication, values = publish(source, "restart")
        destination.scheduler.acquire("mine", publication.reference)
        destination.grant("mine")
        server.stop(signal.SIGKILL)
        server.start()
        end = None
        # On a busy machine the lease ends before the home is back.
        with suppress(TransferExpired):
            destination.start("mine", IDS)
            end = destination.end_of("mine")
        # Whichever way it ends, it is not wrong.
        if end is not None and end.error is None:
            assert (destination.memories[0].cells == expect(destination.memories[0], values, IDS, (0, TOKENS))).all()
        source.scheduler.abort(publication)
        source.release_of(publication, 60)


def test_values_pass_through_pickle_and_msgpack() -> None:
    runs = BlockRuns.of_blocks("full", Blocks([5, 6, 7, 2], 16, 70))
    grant = Grant(
        "r", "id", "h:1", "e", b"\x00" * 16, 7, "kvf1.x", "s", b"l", 1.5, (runs,), (runs,), (16, 70), payload=b"p"
    )
    end = RankEnd("id", "r", False, False, 3, {"full": (5, 6)}, "BadBlock", "a message", {"block": "7"})
    output = WorkerOutput(1, (RankEnd("a", "b", True, True, 9),), (end,), ("x",))
    assert pickle.loads(pickle.dumps(grant)) == grant
    assert msgpack.decode(msgpack.encode(grant), type=Grant) == grant
    assert pickle.loads(pickle.dumps(output)) == output
    assert msgpack.decode(msgpack.encode(output), type=WorkerOutput) == output
    assert runs.blocks() == Blocks([5, 6, 7, 2], 16, 70)
    error = end.error()
    assert isinstance(error, BadBlock)
    assert (error.message, error.values) == ("a message", {"block": "7"})
