"""A node server's state is soft: killed and started again, its engines refill it; nothing is lost or released twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, MemoryKind, MemoryRegion, ReleaseOutcome
from kvferry._control.acquire_request import Acquired, ReadTerms
from kvferry._control.notifier import read_done
from kvferry._wire.token import engine_ref
from kvferry.errors import PeerRestarted, PublicationReleased, PublicationStale
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import BlockingControl, on_loop
from tests.support.caches import POISON, Memory, Model, expect, kv, shards, write
from tests.support.engines import Engine
from tests.support.identifiers import unique_id
from tests.support.loaded_processes import LOADED
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import stop, until

MakeEngine = Callable[..., Engine]
MODEL = Model()


def test_killed_home_is_refilled_and_a_reference_from_before_still_reads(tmp_path: Path, engine: MakeEngine) -> None:
    # A short max_ttl: what was published again is not released before it, since old readers may still be reading.
    server = NodeServerProcess(tmp_path / "home", tcp=True, engine_ttl=20, ttl=4, max_ttl=4).start()
    try:
        source = engine(server.address, MODEL, shards(4, 2))
        destination = engine(server.address, MODEL, shards(4, 1), serve=False)
        source.ready()
        (rank,) = destination.ready().ranks
        request = kv(MODEL, 9, 40)
        for memory in source.memories:
            write(memory, request, [3, 4, 5])
        before = source.session.publish("before", {"full": Blocks([3, 4, 5], end_token=40)})
        gone = source.session.publish("gone", {"full": Blocks([9])})
        rank.read(gone.reference, [9], None)
        assert source.release_of(gone).outcome is ReleaseOutcome.READ

        server.stop(signal.SIGKILL)
        server.start()

        # The reader asks until the home has its engines back: the source's ranks, its session and what it published.
        result = rank.read(before.reference, [7, 8, 9], (0, 40), timeout=60, result_timeout=60)
        assert result.confirmed
        memory = destination.memories[0]
        wanted = expect(memory, request, [7, 8, 9], (0, 40))
        # The last block's tail holds what the read before the restart had brought.
        written = wanted != POISON
        assert np.array_equal(memory.cells[written], wanted[written])
        assert source.release_of(before).outcome is ReleaseOutcome.READ
        # What was released before the restart stays so, and numbers go on from where they were.
        with pytest.raises((PublicationReleased, PublicationStale)):
            rank.read(gone.reference, [9], None)
        after = source.session.publish("after", {"full": Blocks([1])})
        assert after.number == gone.number + 1
        rank.read(after.reference, [1], None)
        assert source.release_of(after).outcome is ReleaseOutcome.READ
        assert source.session.unreleased() == ()
        assert source.session.released() == []
    finally:
        server.stop()


def _schedule(address: str, spec: EngineSpec, pipe: Connection) -> None:
    with Client(address) as client:
        session = client.open_engine(spec)
        pipe.send(str(session.token))
        pipe.recv()
        pipe.send(session.publish("request", {"full": Blocks([3], end_token=16)}, timeout=30).reference)
        pipe.recv()


@pytest.mark.slow
@pytest.mark.parametrize("relayed", [False, True], ids=["on-its-home", "on-another-node"])
def test_a_scheduler_may_come_back_later_than_its_ranks(
    tmp_path: Path, engine: MakeEngine, caplog: pytest.LogCaptureFixture, relayed: bool
) -> None:
    """A home that has settled after its restart knows no engine whose scheduler is not back: the ranks go on asking."""
    server = NodeServerProcess(tmp_path / "home", tcp=True, engine_ttl=1).start()
    other = NodeServerProcess(tmp_path / "other", tcp=True, engine_ttl=1)
    spec, units = EngineSpec(unique_id("late"), (MODEL.group(),), identity={"model": "tiny"}), shards(MODEL.heads, 1)[0]
    pipe, theirs = LOADED.Pipe()
    scheduler = LOADED.Process(target=_schedule, args=(server.address, spec, theirs), daemon=True)
    scheduler.start()
    memory, request = Memory(MODEL, units, tmp_path / "memory"), kv(MODEL, 9, 16)
    write(memory, request, [3])
    base, size = memory.cells.ctypes.data, memory.cells.nbytes
    try:
        (reader,) = engine(server.address, MODEL, shards(MODEL.heads, 1), serve=False).ready().ranks
        with Client(other.start().address if relayed else server.address) as client:
            client.register_cache(
                spec,
                planes=MODEL.planes(units, base),
                regions=[MemoryRegion(MemoryKind.DRAM, 0, base, size)],
                keep=memory.cells,
                token=pipe.recv(),
            )
            stop(scheduler.pid or 0)
            try:
                server.stop(signal.SIGKILL)
                server.start()
                until(lambda: f"this home has no engine {spec.engine_id!r}" in caplog.text)
            finally:
                os.kill(scheduler.pid or 0, signal.SIGCONT)
            pipe.send("publish")
            reader.read(pipe.recv(), [5], (0, 16), timeout=30)
            held = reader.memory
            assert np.array_equal(held.cells, expect(held, request, [5], (0, 16)))
    finally:
        pipe.send("end")
        scheduler.join(30)
        server.stop()
        if relayed:
            other.stop()


@pytest.mark.slow
def test_a_lease_is_acquired_again_at_a_home_that_restarted(tmp_path: Path) -> None:
    server = NodeServerProcess(tmp_path / "home", tcp=True, engine_ttl=20, ttl=9, max_ttl=9).start()
    group = Group("full", block_tokens=16, num_blocks=8)
    axes = ("kv", "block", "head", "token", "content")
    try:
        with Client(server.address) as client:
            caches = [
                client.register_cache(
                    EngineSpec(unique_id(name), (group,)),
                    tensors={"layers.0": np.zeros((2, 8, 1, 16, 8), np.uint8)},
                    axes=axes,
                    serve=False,
                )
                for name in ("source", "reader")
            ]
            publication = caches[0].session.publish("request", {"full": Blocks([1, 2])})
            token, runtime = caches[1].session.token, client._runtime
            holder = runtime.lease_holder(token)
            request = holder.request(publication.reference, ReadTerms(30.0), read_id="read")
            changes: list[None] = []

            async def acquire() -> Acquired:
                return await holder.acquire(request, lambda: changes.append(None)).first()

            granted = runtime.loop.run(acquire())
            first, first_deadline = granted.lease.lease_id, granted.lease.deadline

            server.stop(signal.SIGKILL)
            server.start()

            # Renewed on the way, and granted anew by the home that knows nothing of the old lease.
            until(lambda: granted.lease.lease_id != first)
            assert granted.lease.deadline > first_deadline
            assert changes
            done = read_done(granted.lease.lease_id, [pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE)])
            home = BlockingControl(server.address, control=request.home)
            result = home.notify_one(pb.NotifyRequest(sender=engine_ref(token), notifications=done))
            assert result.read_ended.verdict == pb.VERDICT_VALID
            on_loop(runtime.loop, lambda: holder.drop(granted.lease))
            runtime.loop.run(holder.close(10))
            (release,) = caches[0].session.released(timeout=30)
            assert (release.publication, release.outcome) == (publication.number, ReleaseOutcome.READ)
            assert [summary.state for summary in release.reads] == ["valid"]
    finally:
        server.stop()


def test_restarted_source_is_found_again_under_its_new_incarnation(tmp_path: Path, engine: MakeEngine) -> None:
    with NodeServerProcess(tmp_path / "home", tcp=True, engine_ttl=1) as server:
        server.settled()
        destination = engine(server.address, MODEL, shards(4, 1), serve=False)
        first = engine(server.address, MODEL, shards(4, 1), engine_id="restarting")
        (rank,) = destination.ready().ranks
        first.ready()
        old = first.session.publish("old", {"full": Blocks([1])})
        first.close()
        # The same engine_id is free once the engine ttl has passed; the SDK waits for that by itself.
        second = engine(server.address, MODEL, shards(4, 1), engine_id="restarting").ready()
        request = kv(MODEL, 10, 16)
        write(second.memories[0], request, [2])
        new = second.session.publish("new", {"full": Blocks([2])})
        with pytest.raises(PeerRestarted):
            rank.read(old.reference, [5], None)
        assert rank.read(new.reference, [6], None).confirmed
        memory = destination.memories[0]
        assert np.array_equal(memory.cells, expect(memory, request, [6], (0, 16)))
