"""What a test makes go wrong on a fabric goes wrong as it does in production."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvferry import AsyncClient, Blocks, EngineSpec, Group, ReadState
from kvferry.engine import ReadEnd, SchedulerPort, WorkerPort
from kvferry.errors import (
    Closed,
    EngineUnknown,
    InvalidField,
    KvferryError,
    PeerRestarted,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
    Unavailable,
    WrongState,
)
from kvferry.testing import Fabric
from tests.testing.fabric_engines import AXES, BLOCK, BLOCKS, DIM, HEADS, LAYERS, SOON, Engine, kv

VALUES = kv(tokens=8)
THEIRS, MINE = [3, 1], [5, 6]


def test_held_bytes_arrive_one_chunk_after_the_other(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p", 2), Engine(fabric, "d", 1)
    publication = prefill.publish(VALUES, THEIRS)
    with fabric.hold_reads() as held:
        (read,) = decode.read(publication.reference, MINE)
        held.wait(2)
        assert (held.count, read.state, read.progress().done) == (2, ReadState.READING, 0)
        with pytest.raises(InvalidField, match="at most the 2 chunks"):
            held.release(3)
        held.release(1)
        # The half of the heads that the first of the two ranks holds.
        while not read.progress().done:
            held.wait(1)
        assert (held.count, read.progress().done, read.done()) == (1, VALUES.nbytes // 2, False)
        held.release()
        assert read.result(SOON).bytes == VALUES.nbytes
    assert decode.holds(VALUES, MINE)


def test_the_end_of_a_hold_moves_all_bytes(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    with fabric.hold_reads() as held:
        (read,) = decode.read(prefill.publish(VALUES, THEIRS).reference, MINE)
        held.wait()
        with pytest.raises(WrongState, match="held back already"):
            fabric.hold_reads()
    read.result(SOON)
    held.close()
    with fabric.hold_reads() as held, pytest.raises(TimeoutError, match="0 chunks are held back"):
        held.wait(1, timeout=0.01)


@pytest.mark.parametrize("layout", AXES)
def test_a_read_cancelled_halfway_is_uncertain_until_its_bytes_have_come(fabric: Fabric, layout: str) -> None:
    # Another layout leaves pieces so small that production would stage them.
    prefill, decode = Engine(fabric, "p", layout="nhd"), Engine(fabric, "d", layout=layout)
    publication = prefill.publish(VALUES, THEIRS)
    with fabric.hold_reads() as held:
        (read,) = decode.read(publication.reference, MINE)
        held.wait()
        assert read.cancel() is False
        error = read.exception(SOON)
        assert isinstance(error, TransferCancelled)
        assert (read.quiet, error.quiet) == (False, False)
        held.release()
        assert read.wait_quiet(SOON)
        assert error.quiet


def test_a_read_that_fails_is_uncertain_and_becomes_quiet_and_the_next_one_succeeds(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    prefill.write(VALUES, THEIRS)
    publication = prefill.session.publish("twice", {"full": Blocks(THEIRS)}, expected_reads=2)
    fabric.fail_reads()
    (failed,) = decode.read(publication.reference, MINE)
    error = failed.exception(SOON)
    assert isinstance(error, TransferFailed)
    assert "Fabric.fail_reads made this read fail" in error.message
    assert failed.wait_quiet(SOON)
    decode.read(publication.reference, MINE)[0].result(SOON)
    assert decode.holds(VALUES, MINE)


def test_reads_fail_only_where_asked_to(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    fabric.fail_reads(3)
    fabric.fail_reads(0)
    decode.read(prefill.publish(VALUES, THEIRS).reference, MINE)[0].result(SOON)
    with pytest.raises(InvalidField):
        fabric.fail_reads(-1)


def test_a_lease_ends_while_bytes_are_under_way() -> None:
    with Fabric(ttl=10.0, max_ttl=10.0, hold=10.0) as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d", optimistic=False)
        publication = prefill.publish(VALUES, THEIRS)
        with fabric.hold_reads() as held:
            (read,) = decode.read(publication.reference, MINE)
            held.wait()
            # The lease is not renewed any more.
            fabric.stop_home()
            fabric.advance(12.0)
            error = read.exception(SOON)
            assert isinstance(error, TransferExpired)
            assert not error.quiet
        assert read.wait_quiet(SOON)
        fabric.start_home()
        fabric.advance(24.0)
        assert prefill.outcome(publication).name == "UNREAD"


def test_a_publication_that_nobody_reads_is_released_after_the_hold() -> None:
    with Fabric(hold=0.1) as fabric:
        prefill = Engine(fabric, "p")
        assert prefill.outcome(prefill.publish(VALUES, THEIRS)).name == "UNREAD"


def test_a_restarted_home_is_refilled(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    publication = prefill.publish(VALUES, THEIRS)
    fabric.stop_home()
    fabric.stop_home()
    with pytest.raises(Unavailable):
        prefill.session.publish("other", {"full": Blocks([8])}, timeout=0.05)
    fabric.start_home()
    with pytest.raises(WrongState, match="the home runs already"):
        fabric.start_home()
    (read,) = decode.read(publication.reference, MINE)
    read.result(SOON)
    assert decode.holds(VALUES, MINE)


def test_bytes_go_on_moving_while_the_home_is_away(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d", optimistic=False)
    publication = prefill.publish(VALUES, THEIRS)
    with fabric.hold_reads() as held:
        (read,) = decode.read(publication.reference, MINE)
        held.wait()
        fabric.stop_home()
        held.release()
        assert not read.result(SOON).confirmed
    assert decode.holds(VALUES, MINE)


def test_a_source_that_died_cannot_be_read_and_its_successor_can() -> None:
    with Fabric(engine_ttl=0.2) as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
        publication = prefill.publish(VALUES, THEIRS)
        with fabric.hold_reads() as held:
            (read,) = decode.read(publication.reference, MINE)
            held.wait()
            for client in (prefill.scheduler, *prefill.workers):
                fabric.kill(client)
            error = read.exception(SOON)
            assert isinstance(error, TransferFailed)
            assert "is gone" in error.message
            assert read.wait_quiet(SOON)
        with pytest.raises(Closed):
            prefill.session.publish("late", {"full": Blocks([9])})
        successor = Engine(fabric, "p")
        (late,) = decode.read(publication.reference, MINE, timeout=SOON)
        assert isinstance(late.exception(SOON), (PeerRestarted, EngineUnknown))
        decode.read(successor.publish(VALUES, THEIRS).reference, MINE)[0].result(SOON)
        assert decode.holds(VALUES, MINE)


def test_a_read_without_an_end_ends_when_its_home_has_lost_the_source() -> None:
    # As over a network card: the rank's memory is there, and nothing says that its bytes do not come any more.
    with Fabric(engine_ttl=0.1, ttl=4.5, max_ttl=4.5) as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d", optimistic=False)
        publication = prefill.publish(VALUES, THEIRS)
        with fabric.hold_reads() as held:
            (read,) = decode.read(publication.reference, MINE, timeout=SOON)
            held.wait()
            fabric.kill(prefill.scheduler)
            error = read.exception(SOON)
            assert isinstance(error, TransferFailed)
            assert "its home has lost it" in error.message
            assert not error.quiet
            held.release()
            assert read.wait_quiet(SOON)
            assert error.quiet


def test_an_engine_that_died_is_unknown_after_its_ttl() -> None:
    with Fabric(engine_ttl=0.1) as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
        publication = prefill.publish(VALUES, THEIRS)
        fabric.kill(prefill.scheduler)

        def failure() -> KvferryError | None:
            return decode.read(publication.reference, MINE, timeout=1.0, allow_overlap=True)[0].exception(SOON)

        while not isinstance(error := failure(), EngineUnknown):
            assert error is None or isinstance(error, KvferryError)


def test_a_reader_that_died_pins_the_source_until_its_lease_ends() -> None:
    with Fabric(ttl=10.0, max_ttl=10.0, hold=10.0) as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
        publication = prefill.publish(VALUES, THEIRS)
        with fabric.hold_reads() as held:
            decode.read(publication.reference, MINE)
            held.wait()
            for client in (decode.scheduler, *decode.workers):
                fabric.kill(client)
            # The lease ends, and then the hold.
            fabric.advance(24.0)
            assert prefill.outcome(publication).name == "UNREAD"
        assert not decode.holds(VALUES, MINE)


async def test_a_process_of_an_asyncio_engine_can_die() -> None:
    with Fabric(engine_ttl=0.2) as fabric:
        spec = EngineSpec("p", (Group("full", block_tokens=BLOCK, num_blocks=BLOCKS),))
        memory = {f"layer{layer}": np.zeros((2, BLOCKS, HEADS, BLOCK, DIM), np.uint16) for layer in range(LAYERS)}
        decode = await asyncio.to_thread(Engine, fabric, "d")
        async with AsyncClient(fabric.address) as client:
            cache = await client.register_cache(
                spec, tensors=memory, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS
            )
            publication = await cache.session.publish("request", {"full": Blocks(THEIRS)})
            with fabric.hold_reads() as held:
                (read,) = decode.read(publication.reference, MINE)
                await asyncio.to_thread(held.wait)
                fabric.kill(client)
                with pytest.raises(TransferFailed, match="is gone"):
                    await read
            with pytest.raises(Closed):
                await cache.session.publish("late", {"full": Blocks([9])})


def test_only_clients_of_the_fabric_can_be_killed(fabric: Fabric) -> None:
    with Fabric() as other, pytest.raises(InvalidField, match="a client of this fabric"):
        fabric.kill(other.client())
    with pytest.raises(InvalidField):
        fabric.kill("p")  # type: ignore[arg-type]


class Ports:
    """A decode engine of one rank on the ports, whose steps a test makes."""

    def __init__(self, fabric: Fabric, *, hold_until_quiet: bool = False) -> None:
        spec = EngineSpec("d", (Group("full", block_tokens=BLOCK, num_blocks=BLOCKS),))
        memory = {f"layer{layer}": np.zeros((2, BLOCKS, HEADS, BLOCK, DIM), np.uint16) for layer in range(LAYERS)}
        client = fabric.client()
        self.scheduler = SchedulerPort(client, spec, hold_until_quiet=hold_until_quiet)
        self.worker = WorkerPort(client, spec)
        self.worker.register(memory, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS)
        self.ended: list[ReadEnd] = []
        self.quiesced: list[str] = []

    def step(self) -> None:
        """One step of the engine."""
        for read_id in self.scheduler.cancels():
            self.worker.cancel(read_id)
        self.scheduler.collect(self.worker.finished())
        finished = self.scheduler.finished()
        self.ended += finished.reads
        self.quiesced += finished.quiesced

    def start(self, reference: str) -> None:
        """Read a publication into `MINE`."""
        self.scheduler.acquire("request", reference)
        while self.scheduler.granted("request") is None:
            self.step()
        self.worker.start(self.scheduler.attach("request", {"full": Blocks(MINE)}))


def test_a_scheduler_steps_on_while_bytes_are_under_way(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Ports(fabric)
    with fabric.hold_reads() as held:
        decode.start(prefill.publish(VALUES, THEIRS).reference)
        held.wait()
        decode.scheduler.cancel("request")
        while not decode.ended:
            decode.step()
        (ended,) = decode.ended
        assert (type(ended.error), ended.quiet, decode.quiesced) == (TransferCancelled, False, [])
        held.release()
        while not decode.quiesced:
            decode.step()
        assert decode.quiesced == ["request"]


def test_a_scheduler_that_wants_quiet_blocks_gets_the_read_when_they_are(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Ports(fabric, hold_until_quiet=True)
    with fabric.hold_reads() as held:
        decode.start(prefill.publish(VALUES, THEIRS).reference)
        held.wait()
        decode.scheduler.cancel("request")
        for _ in range(100):
            decode.step()
        assert decode.ended == []
        held.release()
        while not decode.ended:
            decode.step()
        assert decode.ended[0].quiet
