"""Reads that move each step while their source still computes: what arrives, and how they end when the source, the home
or the reader changes its mind halfway."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvferry import AsyncClient, Blocks, EngineSpec, Group, IntegrityOptions, ReadState
from kvferry.engine import RankEnd, ReadEnd, SchedulerPort, Tails, WorkerOutput, WorkerPort
from kvferry.errors import (
    BadBlock,
    BlocksShort,
    InvalidField,
    KvferryError,
    PublicationAborted,
    PublicationTimeout,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
)
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import AXES, BLOCK, BLOCKS, HEADS, SOON, Engine, kv
from tests.testing.stepping_engines import MINE, THEIRS, TOKENS, VALUES, Decode, Prefill, begin, halfway


def test_each_step_moves_while_the_source_computes(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric, ranks=2), Engine(fabric, "d", layout="nhd")
    (read,) = begin(decode, prefill)
    assert (read.state, read.progress().complete) == (ReadState.WAITING, False)
    for tokens in (4, 12, 20):
        prefill.compute(tokens)
        until(partial(decode.holds, VALUES[:, :, :tokens], MINE))
        progress = read.progress()
        assert (progress.state, progress.total, progress.complete) == (
            ReadState.READING,
            VALUES[:, :, :tokens].nbytes,
            False,
        )
    prefill.compute(TOKENS, b"token")
    result = read.result(SOON)
    assert decode.holds(VALUES, MINE)
    assert (result.bytes, result.payload, result.confirmed, result.source_ranks) == (
        VALUES.nbytes,
        b"token",
        True,
        (0, 1),
    )
    assert read.progress().complete
    assert prefill.outcome(prefill.publication).name == "READ"


def test_a_prefix_that_is_cached_already_does_not_move(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Engine(fabric, "d", ranks=2)
    reads = [
        cache.read(
            prefill.reference,
            {"full": Blocks(MINE[2:], 8)},
            (8, TOKENS),
            progressive=True,
            read_id="shared",
            parties=2,
        )
        for cache in decode.caches
    ]
    for tokens in (4, 8, 12, TOKENS):
        prefill.compute(tokens)
    assert sum(read.result(SOON).bytes for read in reads) == VALUES[:, :, 8:].nbytes
    expected = Engine._memory(decode, len(decode.heads[0]))
    assert (decode.memory[0][:, :, MINE[0]] == expected[:, :, MINE[0]]).all()


def test_a_publication_that_is_complete_already_is_read_at_once(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Engine(fabric, "d")
    for tokens in (8, TOKENS):
        prefill.compute(tokens)
    (read,) = begin(decode, prefill)
    assert read.result(SOON).bytes == VALUES.nbytes
    assert decode.holds(VALUES, MINE)


def test_a_read_of_hundreds_of_small_steps(fabric: Fabric) -> None:
    blocks, size = 300, 300 * BLOCK
    values = kv(size)
    prefill, decode = Engine(fabric, "p", blocks=blocks + 1), Engine(fabric, "d", blocks=blocks + 1)
    theirs, mine = list(range(blocks)), list(range(blocks, 0, -1))
    prefill.write(values, theirs)
    publication = prefill.session.publish("request", {}, last=False)
    (read,) = decode.read(publication.reference, mine, tokens=(0, size), progressive=True)
    for place in range(blocks):
        some = {"full": Blocks(theirs[place : place + 1], place * BLOCK)}
        prefill.session.publish_more(publication, some, last=place == blocks - 1)
    assert read.result(SOON).bytes == values.nbytes
    assert decode.holds(values, mine)


def test_tokens_may_be_named_before_they_are_published(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Engine(fabric, "d")
    with pytest.raises(InvalidField, match="tokens"):
        begin(decode, prefill, tokens=None)


def test_a_read_that_is_not_progressive_waits_for_all_blocks(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Engine(fabric, "d")
    (read,) = begin(decode, prefill, progressive=False)
    (other,) = Engine(fabric, "other").read(prefill.reference, MINE, tokens=(0, TOKENS), progressive=True)
    prefill.compute(8)
    until(lambda: other.progress().done > 0)
    assert (read.state, read.progress().done) == (ReadState.WAITING, 0)
    prefill.compute(TOKENS)
    assert read.result(SOON).bytes == other.result(SOON).bytes


def test_a_read_cancelled_between_steps_is_quiet_at_once_and_its_lease_ends(fabric: Fabric) -> None:
    prefill, decode, read = halfway(fabric)
    assert read.cancel()
    assert isinstance(read.exception(SOON), TransferCancelled)
    prefill.session.abort(prefill.publication)
    assert prefill.outcome(prefill.publication).name == "ABORTED"
    # Its blocks are another read's.
    decode.read(prefill.reference, MINE, tokens=(0, 8))


def test_a_read_cancelled_while_a_step_moves_is_quiet_when_the_bytes_have_come(fabric: Fabric) -> None:
    prefill, _, read = halfway(fabric)
    with fabric.hold_reads() as held:
        prefill.compute(12)
        held.wait()
        assert not read.cancel()
        error = read.exception(SOON)
        assert isinstance(error, TransferCancelled)
        assert (error.quiet, read.quiet) == (False, False)
        held.release()
        assert read.wait_quiet(SOON)


def test_a_step_that_fails_fails_the_read(fabric: Fabric) -> None:
    prefill, _, read = halfway(fabric)
    fabric.fail_reads()
    prefill.compute(12)
    error = read.exception(SOON)
    assert error is not None
    assert "Fabric.fail_reads" in error.message
    assert read.wait_quiet(SOON)


def test_a_read_aborted_halfway_fails_and_its_source_waits_for_it(fabric: Fabric) -> None:
    prefill, _, read = halfway(fabric)
    with fabric.hold_reads() as held:
        prefill.compute(12)
        held.wait()
        prefill.session.abort(prefill.publication)
        error = read.exception(SOON)
        assert isinstance(error, PublicationAborted)
        assert not read.quiet
        held.release()
        assert read.wait_quiet(SOON)
    assert prefill.outcome(prefill.publication).name == "ABORTED"


def test_a_source_that_dies_halfway_fails_the_read() -> None:
    with Fabric(engine_ttl=0.5) as fabric:
        prefill, _, read = halfway(fabric)
        for client in (prefill.scheduler, *prefill.workers):
            fabric.kill(client)
        assert isinstance(read.exception(SOON), PublicationAborted)
        assert read.quiet


def test_a_source_that_stops_halfway_fails_the_read_at_its_timeout(fabric: Fabric) -> None:
    prefill, _, read = halfway(fabric, timeout=3.0)
    error = read.exception(SOON)
    assert isinstance(error, PublicationTimeout)
    assert read.quiet
    prefill.session.abort(prefill.publication)
    assert prefill.outcome(prefill.publication).name == "ABORTED"


def test_a_home_that_restarts_halfway_is_asked_again_and_the_read_goes_on(fabric: Fabric) -> None:
    prefill, decode, read = halfway(fabric)
    fabric.stop_home()
    fabric.start_home()
    for tokens in (12, TOKENS):
        prefill.compute(tokens)
    result = read.result(SOON)
    # What was there is not read again.
    assert (result.bytes, result.confirmed) == (VALUES.nbytes, True)
    assert decode.holds(VALUES, MINE)


def test_a_home_that_stays_away_for_longer_than_the_lease_ends_the_read() -> None:
    with Fabric(ttl=10.0, max_ttl=10.0, hold=10.0) as fabric:
        prefill, _, read = halfway(fabric)
        fabric.stop_home()
        fabric.advance(12.0)
        assert isinstance(read.exception(SOON), TransferExpired)
        assert read.quiet
        fabric.start_home()
        prefill.session.abort(prefill.publication)
        # A restarted home releases nothing before the leases that it does not know have ended.
        fabric.advance(12.0)
        prefill.outcome(prefill.publication)


def test_a_lease_is_renewed_for_as_long_as_the_source_computes() -> None:
    with Fabric(ttl=10.0, max_ttl=10.0) as fabric:
        prefill, decode, read = halfway(fabric)
        fabric.advance(15.0)
        prefill.compute(TOKENS)
        assert read.result(SOON).confirmed
        assert decode.holds(VALUES, MINE)


def test_sums_are_compared_at_the_end_over_all_steps(fabric: Fabric) -> None:
    sums = IntegrityOptions("full", patience=SOON)
    spec = [EngineSpec(name, (Group("full", block_tokens=4, num_blocks=8),)) for name in ("p", "d")]
    memory = [np.full((2, 8, 1, 4, 8), value, np.uint16) for value in (7, 0)]
    prefill, decode = (
        fabric.client(integrity=sums).register_cache(spec[place], tensors={"layer0": memory[place]}, axes=AXES["hnd"])
        for place in range(2)
    )
    steps = [{"full": Blocks([1, 2])}, {"full": Blocks([5], 8)}]
    publication = prefill.session.publish("request", steps[0], last=False, checksums=True)
    read = decode.read(publication.reference, {"full": Blocks([3, 4, 6])}, (0, 12), progressive=True)
    prefill.checksum(publication.number, steps[0], last=False).result(SOON)
    until(lambda: read.progress().done > 0)
    prefill.session.publish_more(publication, steps[1], last=True)
    prefill.checksum(publication.number, steps[1]).result(SOON)
    verification = read.result(SOON).verification
    assert verification is not None
    assert (verification.verified, verification.unverified) == (6, 0)


@pytest.mark.parametrize("restarts", ["before it is attached", "halfway"])
def test_workers_compare_sums_after_a_restart_of_the_home(fabric: Fabric, restarts: str) -> None:
    """The home gives the lease another id, under which alone it tells sums."""
    sums = IntegrityOptions("full", patience=SOON)
    spec = [EngineSpec(name, (Group("full", block_tokens=4, num_blocks=8),)) for name in ("p", "d")]
    memory = [np.full((2, 8, 1, 4, 8), value, np.uint16) for value in (7, 0)]
    source, client = fabric.client(integrity=sums), fabric.client(integrity=sums)
    prefill = source.register_cache(spec[0], tensors={"layer0": memory[0]}, axes=AXES["hnd"])
    scheduler, worker = SchedulerPort(client, spec[1]), WorkerPort(client, spec[1])
    worker.register({"layer0": memory[1]}, axes=AXES["hnd"])
    steps = [{"full": Blocks([1])}, {"full": Blocks([2], 4)}, {"full": Blocks([5], 8)}]

    def restart() -> None:
        fabric.stop_home()
        fabric.start_home()
        # The port has the new lease once it has heard what was published since.
        prefill.session.publish_more(publication, steps[1], last=False)

    def offered() -> int | None:
        offer = scheduler.granted("mine")
        return None if offer is None else offer.blocks()["full"].end_token

    publication = prefill.session.publish("request", steps[0], last=False, checksums=True)
    scheduler.acquire("mine", publication.reference, progressive=True)
    until(lambda: offered() == 4)
    if restarts == "before it is attached":
        restart()
        until(lambda: offered() == 8)
    worker.start(scheduler.attach("mine", {"full": Blocks([3, 4, 6])}, (0, 12)))
    if restarts == "halfway":
        restart()
    for step in steps[:2]:
        prefill.checksum(publication.number, step, last=False).result(SOON)
    prefill.session.publish_more(publication, steps[2], last=True)
    ended = list[ReadEnd]()

    def step_engine() -> bool:
        for gained in scheduler.grant_steps():
            worker.add_step(gained)
        scheduler.collect(worker.finished())
        ended.extend(scheduler.finished().reads)
        return bool(ended)

    until(step_engine)
    assert ended[0].error is None
    # The sums of the last block were not sent, and after a restart no reader waits for them.
    assert (ended[0].verified, ended[0].unverified) == (4, 2)


async def test_the_client_for_asyncio_reads_progressively_as_well(fabric: Fabric) -> None:
    prefill = await asyncio.to_thread(Prefill, fabric)
    memory = np.zeros((2, BLOCKS, HEADS, 4, 8), np.uint16)
    async with AsyncClient(fabric.address) as client:
        spec = EngineSpec("d", (Group("full", block_tokens=4, num_blocks=BLOCKS),))
        cache = await client.register_cache(
            spec, tensors={"layer0": memory}, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS
        )
        read = cache.read(prefill.reference, {"full": Blocks(MINE)}, (0, TOKENS), progressive=True)
        await asyncio.to_thread(prefill.compute, 8)
        await asyncio.to_thread(until, lambda: (memory[:, MINE[1]].swapaxes(1, 2) == VALUES[0, :, 4:8]).all())
        await asyncio.to_thread(prefill.compute, TOKENS)
        assert (await read).bytes == VALUES[0].nbytes


def test_workers_may_get_steps_late_twice_out_of_order_and_before_their_grant(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    grant = decode.attached(prefill)
    for count, tokens in enumerate((8, 12, 20), 1):
        prefill.compute(tokens)
        decode.until(partial(decode.has, count))
    assert [(step.index, step.last) for step in decode.steps] == [(1, False), (2, False), (3, False)]
    first, second, third = decode.steps
    decode.worker.add_step(second)
    decode.worker.start(grant)
    until(lambda: decode.holds(4))
    decode.worker.add_step(third)
    decode.worker.add_step(second)
    decode.worker.add_step(first)
    until(lambda: decode.holds(20))
    prefill.compute(TOKENS, b"token")
    decode.until(lambda: len(decode.steps) == 4)
    for step in (*decode.steps, decode.steps[-1]):
        decode.worker.add_step(step)
    decode.until(lambda: decode.ended)
    (end,) = decode.ended
    assert (end.error, end.payload, end.bytes, end.quiet) == (None, b"token", VALUES.nbytes, True)
    assert decode.holds(TOKENS)
    # A report after the end of the read is ignored.
    decode.worker.add_step(third)
    assert decode.worker.finished() == decode.worker.poll()


def test_waiting_steps_are_returned_together(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    grant = decode.attached(prefill)
    assert (grant.complete, grant.blocks()) == (False, {"full": Blocks(THEIRS[:1], 0, 4)})
    for tokens in (8, 12, TOKENS):
        prefill.compute(tokens)
    until(lambda: decode.scheduler._reads._by_request["mine"].complete)
    (step,) = decode.scheduler.grant_steps()
    assert (step.index, step.last, step.blocks()) == (1, True, {"full": Blocks(THEIRS[1:], 4, TOKENS)})
    assert decode.scheduler.grant_steps() == []


def test_an_offer_grows_until_it_is_attached(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    decode.scheduler.acquire("mine", prefill.reference, progressive=True)
    prefill.compute(4)
    decode.until(lambda: decode.scheduler.granted("mine"))
    prefill.compute(TOKENS, b"token")

    def offered() -> Any:
        return decode.scheduler.granted("mine")

    until(lambda: offered().complete)
    assert (offered().blocks(), offered().payload) == ({"full": Blocks(THEIRS, 0, TOKENS)}, b"token")
    decode.worker.start(decode.scheduler.attach("mine", {"full": Blocks(MINE)}))
    decode.until(lambda: decode.ended)
    assert decode.steps == []
    assert decode.holds(TOKENS)


def test_an_engine_that_gives_up_halfway_and_an_engine_whose_source_does(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    decode.worker.start(decode.attached(prefill))
    assert decode.scheduler.cancel("mine")
    decode.until(lambda: decode.ended)
    decode.worker.start(decode.attached(prefill))
    prefill.session.abort(prefill.publication)
    decode.until(lambda: len(decode.ended) == 2)
    assert [type(end.error).__name__ for end in decode.ended] == ["TransferCancelled", "PublicationAborted"]
    assert all(end.quiet for end in decode.ended)
    assert decode.ended[1].lost == {"full": tuple(MINE)}
    assert prefill.outcome(prefill.publication).name == "ABORTED"


def test_a_read_whose_steps_never_reach_its_worker_ends_at_its_timeout(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    decode.worker.start(decode.attached(prefill, timeout=1.0))
    prefill.compute(TOKENS)
    decode.until(lambda: decode.ended)
    assert isinstance(decode.ended[0].error, KvferryError)
    assert decode.ended[0].quiet


def test_tails_are_cleared_when_all_has_come(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    for memory in decode.memory.values():
        memory[:, MINE] = 9
    prefill.compute(4)
    decode.worker.start(decode.attached(prefill), tails=Tails.ZERO)
    prefill.compute(TOKENS)
    while not decode.ended:
        decode.step()
        for step in decode.steps:
            decode.worker.add_step(step)
    assert decode.ended[0].error is None
    assert decode.holds(TOKENS)


def test_the_time_of_waiting_for_the_source_is_counted_apart(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    decode.worker.start(decode.attached(prefill))
    until(lambda: decode.holds(4))
    prefill.compute(TOKENS)
    while not decode.ended:
        decode.step()
        for step in decode.steps:
            decode.worker.add_step(step)
    times = decode.ended[0].times
    assert times.steps > 0
    assert times.move > 0


def test_a_worker_that_reports_its_end_before_all_was_published_is_refused(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    grant = decode.attached(prefill)
    decode.scheduler.collect(WorkerOutput(0, (RankEnd(grant.read_id, "mine", ok=True, quiet=True, bytes=7),)))
    decode.until(lambda: decode.ended)
    assert isinstance(decode.ended[0].error, TransferFailed)


def test_blocks_are_checked_when_they_are_attached_though_not_all_is_published(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    grant = decode.attached(prefill)
    decode.scheduler.acquire("other", prefill.reference, progressive=True)
    decode.until(lambda: decode.scheduler.granted("other"))
    wrong: list[tuple[Any, type[Exception]]] = [
        ({"full": Blocks([14, 15, 16, 17, 18, 14])}, BadBlock),
        ({"full": Blocks([14, 15, 16, 17, 18, BLOCKS])}, BadBlock),
        # A block of the other read, although no step for it has come.
        ({"full": Blocks([14, 15, 16, 17, 18, MINE[5]])}, BadBlock),
        ({"full": Blocks([14, 15])}, BlocksShort),
        ({}, InvalidField),
    ]
    for blocks, error in wrong:
        with pytest.raises(error):
            decode.scheduler.attach("other", blocks, (0, TOKENS))
    with pytest.raises(InvalidField, match="tokens"):
        decode.scheduler.attach("other", {"full": Blocks([14, 15, 16, 17, 18, 19])})
    assert decode.scheduler.attach("other", {"full": Blocks([14, 15, 16, 17, 18, 19])}, (0, TOKENS)).read_id
    with pytest.raises(InvalidField, match="tokens"):
        decode.worker.start(replace(grant, tokens=None))
    with pytest.raises(InvalidField, match="GrantStep"):
        decode.worker.add_step(grant)
