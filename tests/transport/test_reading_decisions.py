"""Reading threads and the transport above them, moment by moment: which agent reads a peer, reads given up, memory
kept until nothing can write any more, and counts (R4, R5, R10).

The agents of `played_agents` stand in for NIXL's.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from kvferry._clock import now
from kvferry._memory.access import HostAccess, StagingSpace
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.nixl_agent import MakeReadingAgent, NixlError
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.reading_thread import ReadingThread
from kvferry._transport.staging_pool import StagingOptions, StagingPool
from kvferry._transport.transport import Transfer, TransferPart, TransferState, Transport
from kvferry.errors import (
    BadAgentMetadata,
    Closed,
    InvalidField,
    KvferryError,
    LimitReached,
    TransferExpired,
    TransferFailed,
)
from kvferry.geometry import MemoryKind
from tests.transport.played_agents import CHUNK, DONE, FAILED, MOVING, SIZE, World, done, failed
from tests.transport.sources import DRAM, SOON, Memory, Source, local_source, raw, raw_part
from tests.transport.staged_parts import part
from tests.transport.transfers import until


def test_bytes_arrive_and_are_counted(world: World) -> None:
    read = world.transport()
    gauges = read.gauges()
    assert (gauges.transfers, gauges.uncertain, gauges.quiesced, gauges.bytes_moved, gauges.agents) == (0, 0, 0, 0, 0)
    first, second = world.read(read), world.read(read, "other", 1, 3)
    done(first)
    done(second)
    assert world.memory.right()
    assert first.chunks == 4
    assert until(lambda: read.gauges().bytes_moved == 7 * CHUNK)
    gauges = read.gauges()
    assert (gauges.transfers, gauges.chunks_in_flight, gauges.agents, gauges.peers) == (0, 0, 1, 2)
    (agent,) = world.agents.made
    assert agent.options.chunk_bytes == CHUNK
    assert read.close(SOON)
    assert agent.destroyed
    gauges = read.gauges()
    assert (gauges.bytes_moved, gauges.agents, gauges.uncertain, gauges.quiesced) == (7 * CHUNK, 0, 0, 0)


def test_a_transfer_that_ended_and_is_not_quiet_is_uncertain(world: World) -> None:
    read = world.transport()
    done(world.read(read))
    moving, going_on = world.moving(read, chunks=3), world.moving(read, at=1)
    gauges = read.gauges()
    assert (gauges.transfers, gauges.uncertain, gauges.chunks_in_flight) == (2, 0, 4)
    told: list[str] = []
    moving.add_done_callback(lambda _: told.append("done"))
    moving.add_quiet_callback(lambda _: told.append("quiet"))
    assert not moving.cancel()
    assert until(lambda: told == ["done"])
    gauges = read.gauges()
    assert (gauges.transfers, gauges.uncertain, gauges.quiesced) == (1, 1, 0)
    world.agents.state["peer"] = DONE
    assert moving.wait_quiet(SOON)
    done(going_on)
    assert until(lambda: told == ["done", "quiet"])
    gauges = read.gauges()
    assert (gauges.transfers, gauges.uncertain, gauges.quiesced, gauges.chunks_in_flight) == (0, 0, 1, 0)
    assert gauges.agents == 1


def test_a_transfer_that_ended_and_is_quiet_is_not_uncertain_before_it_is_forgotten(world: World) -> None:
    read, seen = world.transport(), list[tuple[int, int, int]]()

    def look(_: Transfer) -> None:
        gauges = read.gauges()
        seen.append((gauges.transfers, gauges.uncertain, gauges.uncertain_bytes))

    moving = world.moving(read)
    # Callbacks of the end run before those of quiet, with which it is forgotten.
    moving.add_done_callback(look)
    world.agents.state["peer"] = DONE
    done(moving)
    assert until(lambda: seen == [(0, 0, 0)])


def test_a_quiet_read_leaves_nothing_behind(world: World) -> None:
    read = world.transport()
    ended, lost = world.moving(read, chunks=2), world.moving(read, "other", 1)
    references = [weakref.ref(ended), weakref.ref(lost)]
    ended.cancel()
    assert until(lambda: read.gauges().uncertain == 1)
    for name in ("peer", "other"):
        world.agents.state[name] = DONE
    assert ended.wait_quiet(SOON)
    done(lost)
    assert until(lambda: read.gauges().quiesced == 1)
    del ended, lost
    for agent in world.agents.made:
        agent.handles.clear()

    def forgotten() -> bool:
        gc.collect()
        return all(reference() is None for reference in references)

    assert until(forgotten)


def test_an_idle_thread_sleeps(world: World) -> None:
    read = world.transport()
    done(world.read(read))
    assert until(lambda: read.gauges().bytes_moved == SIZE)
    silent = world.moving(read)
    silent.cancel()
    observed = threading.Event()

    def rests(most: int) -> bool:
        before = world.looks
        assert not observed.wait(0.2)
        return world.looks - before <= most

    for most in (200, 0):
        # It has to come to rest first: news are looked at a millisecond later, and on a busy machine later still.
        assert not observed.wait(0.05)
        assert until(partial(rests, most))
        world.agents.state["peer"] = DONE
        assert silent.wait_quiet(SOON)


def test_peers_are_spread_over_agents_and_each_keeps_its_own(world: World) -> None:
    read = world.transport(reading_agents=2)
    read.prepare()
    assert until(lambda: len(world.agents.made) == 2)
    for _ in range(2):
        for number in range(8):
            done(world.read(read, f"peer {number}", number))
    assert world.memory.right()
    peers = [set(agent.peers) for agent in world.agents.made]
    assert all(peers)
    assert not peers[0] & peers[1]
    assert [len(agent.added) for agent in world.agents.made] == [len(names) for names in peers]
    assert read.gauges().peers == 8


def test_agents_are_made_when_they_are_needed(world: World) -> None:
    read = world.transport(reading_agents=3)
    assert read.gauges().agents == 0
    done(world.read(read))
    assert (read.gauges().agents, len(world.agents.made)) == (1, 1)


def test_memory_that_is_not_registered_is_refused_and_nothing_is_read(world: World) -> None:
    read = world.transport()
    good = world.part(world.info())
    beyond = raw([world.bytes.ctypes.data + SIZE], [world.memory.base], [1])
    outside = raw([world.bytes.ctypes.data], [world.memory.base + world.memory.bytes.size], [1])
    own = HostAccess().allocate(4096)
    into_own = raw([world.bytes.ctypes.data], [own.region.base], [4096])
    for wrong in (beyond, outside, into_own):
        with pytest.raises(InvalidField):
            read.start([good, raw_part(world.info("other"), [wrong])], deadline=None, label="wrong")
    damaged = replace(world.info("other"), metadata=b"damaged")
    for call in (lambda: read.start([raw_part(damaged)], deadline=None, label="wrong"), lambda: read.warm(damaged)):
        with pytest.raises(BadAgentMetadata):
            call()
    with pytest.raises(InvalidField, match="one agent of a name"):
        read.start([good, raw_part(world.info(metadata=b"another"))], deadline=None, label="wrong")
    assert (world.agents.made, read.gauges().transfers) == ([], 0)
    # The same agent, though not the same object.
    done(read.start([good, world.part(world.info(), 1)], deadline=None, label="twice"))
    done(read.start([raw_part(world.info(), [into_own])], deadline=None, label="own", spaces=(own,)))
    assert world.agents.made[0].spaces == [own]


def test_an_empty_read_is_done_at_once(world: World) -> None:
    read = world.transport()
    nothing = raw([], [], [])
    done(read.start([raw_part(world.info(), [nothing])], deadline=None, label="nothing"))
    assert (read.gauges().agents, read.gauges().uncertain) == (0, 0)
    _, some = world.part(world.info())
    done(read.start([raw_part(world.info(), [nothing, *some.descriptors])], deadline=None, label="some"))
    assert world.memory.right()


def test_a_closed_transport_begins_nothing(world: World) -> None:
    read = world.transport()
    done(world.read(read))
    assert read.close(SOON)
    assert read.close(0.0)
    calls: list[Callable[[], object]] = [
        lambda: world.read(read),
        lambda: read.warm(world.info()),
        lambda: read.start([], deadline=None, label="nothing"),
        read.prepare,
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()
    assert read.gauges().transfers == 0


def test_every_read_that_begins_while_the_transport_closes_ends(world: World) -> None:
    """A thread that ends has taken each message that it accepted."""
    begun: list[Transfer] = []

    def has_begun(enough: int) -> bool:
        return len(begun) >= enough

    def begin(read: Transport, at: int) -> None:
        while True:
            try:
                begun.append(world.read(read, f"peer-{at}", at, 1))
            except Closed:
                return

    for _ in range(10):
        read = world.transport(reading_agents=2)
        threads = [threading.Thread(target=begin, args=(read, at)) for at in range(3)]
        for thread in threads:
            thread.start()
        enough = len(begun) + 20
        assert until(partial(has_begun, enough))
        assert read.close(SOON)
        for thread in threads:
            thread.join()
        assert all(transfer.wait_quiet(SOON) for transfer in begun)
    assert all(agent.destroyed for agent in world.agents.made)


def test_closing_waits_for_reads_that_may_still_write(world: World) -> None:
    read = world.transport(reading_agents=2)
    read.prepare()
    moving = world.moving(read)
    began = now()
    assert not read.close(0.1)
    assert now() - began < SOON / 2
    assert moving.state is TransferState.CANCELLED
    assert not moving.quiet
    (agent,) = (agent for agent in world.agents.made if agent.handles)
    assert not agent.destroyed
    world.agents.state["peer"] = DONE
    assert read.close(SOON)
    assert moving.quiet
    assert all(agent.destroyed for agent in world.agents.made)


def test_a_stuck_read_is_quiet_after_the_fence_time_and_the_end_of_its_agent(world: World) -> None:
    read = world.transport(fence_time=600.0)
    moving, waiting = world.moving(read), world.moving(read, "other", 1)
    assert not read.close(0.05)
    world.later += 570.0
    assert not read.close(0.05)
    assert not moving.quiet
    world.later += 31.0
    assert read.close(SOON)
    assert (moving.quiet, waiting.quiet) == (True, True)


@pytest.mark.parametrize("refusal", [RuntimeError("a bug"), LimitReached("no memory", retry_after=1.0)])
def test_an_agent_that_cannot_be_made_fails_its_reads_and_the_next_is_tried(world: World, refusal: Exception) -> None:
    read = world.transport()
    world.agents.refusal = refusal
    # Once for each read, however fast making the agent fails.
    for number in range(1, 20):
        error = failed(world.read(read))
        assert isinstance(error, LimitReached if isinstance(refusal, KvferryError) else TransferFailed)
        assert str(refusal) in str(error)
        assert world.agents.refused == number
    read.warm(world.info())
    assert until(lambda: read.gauges().agents == 0)
    world.agents.refusal = None
    done(world.read(read))
    assert read.gauges().quiesced == 0


@pytest.mark.parametrize("refusal", [RuntimeError("a bug"), LimitReached("no thread", retry_after=1.0)])
def test_a_thread_that_cannot_be_had_fails_the_read(
    world: World, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    read = world.transport()

    def refuse(*_: object, **__: object) -> ReadingThread:
        raise refusal

    with monkeypatch.context() as patch:
        patch.setattr("kvferry._transport.transport.ReadingThread", refuse)
        transfer = world.read(read)
        error = failed(transfer)
        assert isinstance(error, LimitReached if isinstance(refusal, KvferryError) else TransferFailed)
        assert transfer.quiet
        assert read.gauges().transfers == 0
    done(world.read(read))


def test_staging_memory_that_cannot_be_had_fails_the_read(world: World, caplog: pytest.LogCaptureFixture) -> None:
    own = HostAccess().allocate(4096)
    read = world.transport()
    into = raw([world.bytes.ctypes.data], [own.region.base], [4096])
    for refusal in (RuntimeError("a bug"), NixlError("it is refused")):
        world.agents.no_space = refusal
        transfer = read.start([raw_part(world.info(), [into])], deadline=None, label="own", spaces=(own,))
        assert refusal.args[0] in str(failed(transfer))
        assert transfer.quiet
    done(world.read(read))
    source, memory = local_source(), Memory(1 << 20)
    _, planned = part(source, memory, [1], [2])
    (staged,) = planned.staged
    device = DRAM._replace(destination=(MemoryKind.VRAM, 3))
    peer = replace(world.info("source"), regions=source.info.regions)
    unknown = replace(planned, staged=(replace(staged, lane=replace(staged.lane, memory=device)),))
    transfer = read.start([(peer, unknown)], deadline=None, label="device")
    assert isinstance(failed(transfer), InvalidField)
    assert transfer.quiet
    assert read.gauges().agents == 1


def test_nothing_waits_while_staging_memory_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may take long to give memory: an engine's step that cancels a read must not wait for that (R11)."""
    read = world.transport()
    moving, other = world.moving(read), world.moving(read, "other", 1)
    allocating, goes_on, made, used = threading.Event(), threading.Event(), list[StagingPool](), list[object]()
    allocate = HostAccess.allocate

    def slowly(memory: HostAccess, size: int) -> StagingSpace:
        allocating.set()
        goes_on.wait(SOON)
        return allocate(memory, size)

    def use() -> None:
        used.append(moving.cancel())
        world.agents.state["other"] = DONE
        used.append(other.wait_quiet(SOON))
        used.append(world.read(read, "third", 2).wait(SOON))
        used.append(read.gauges().uncertain)

    monkeypatch.setattr(HostAccess, "allocate", slowly)
    maker = threading.Thread(target=lambda: made.append(read.pool(MemoryKind.DRAM, 0)))
    user = threading.Thread(target=use)
    maker.start()
    assert allocating.wait(SOON)
    user.start()
    user.join(SOON / 2)
    found = list(used)
    goes_on.set()
    for thread in (maker, user):
        thread.join()
    assert found == [False, True, True, 1]
    assert made == [read.pool(MemoryKind.DRAM, 0)]
    world.agents.state["peer"] = DONE


def staged_part(world: World, source: Source, memory: Memory) -> TransferPart:
    _, planned = part(source, memory, list(range(0, 40, 2)), list(range(20)))
    return replace(world.info("source"), regions=source.info.regions), planned


def test_a_read_that_waits_for_the_slots_of_broken_peers_moves_on(world: World) -> None:
    """Only the end of the retired agent gives such slots back, and the agent ends when it has nothing to do (R10)."""
    memory, source = Memory(1 << 20), local_source()
    one_slot, reading = StagingOptions(slot_bytes=16384, slots=1), cast(MakeReadingAgent, world.agents.reading)
    read = Transport(RankMemory([memory.region]), NixlOptions(), reading=reading, staging=one_slot, clock=world.clock)
    world.transports.append(read)
    peer, planned = staged_part(world, source, memory)
    world.agents.state["broken"] = MOVING
    broken = read.start([(replace(peer, name="broken"), planned)], deadline=None, label="broken")
    assert until(lambda: read.gauges().chunks_in_flight == 1)
    waiting = read.start([(peer, planned)], deadline=None, label="waiting")
    (thread,) = read.living
    assert until(lambda: any(work.blocked for link in thread._links for work in tuple(link.queued)))
    world.agents.state["broken"] = FAILED
    failed(broken)
    done(waiting)
    assert until(lambda: read.gauges().staging_slots == 0)


def test_rows_go_through_staging_memory_of_the_configured_size(world: World) -> None:
    memory, source = Memory(1 << 20), local_source()
    reading = cast(MakeReadingAgent, world.agents.reading)
    with_slots = StagingOptions(slot_bytes=16384, slots=3)
    read = Transport(RankMemory([memory.region]), NixlOptions(), reading=reading, staging=with_slots, clock=world.clock)
    world.transports.append(read)
    pool = read.pool(MemoryKind.DRAM, 0)
    assert read.pool(MemoryKind.DRAM, 0) is pool
    assert (pool.slot_bytes, pool.space.region.length) == (16384, 3 * 16384)
    with pytest.raises(InvalidField, match="device"):
        read.pool(MemoryKind.VRAM, 0)
    asked = staged_part(world, source, memory)
    world.agents.state["source"] = MOVING
    transfer = read.start([asked], deadline=None, label="staged")
    assert until(lambda: read.gauges().staging_slots == 1)
    world.agents.state["source"] = DONE
    done(transfer)
    assert memory.right()
    assert until(lambda: read.gauges().staging_slots == 0)
    assert world.agents.made[0].spaces[0] is pool.space


def test_a_peer_is_warmed_up_once_and_dropped_when_it_is_through(world: World) -> None:
    read = world.transport()
    read.warm(world.info())
    read.warm(world.info())
    assert until(lambda: read.gauges().peers == 1)
    moving = world.moving(read)
    read.retire("nobody")
    read.retire("peer")
    world.agents.state["other"] = DONE
    done(world.read(read, "other", 1))
    (agent,) = world.agents.made
    assert read.gauges().peers == 2
    # It may come back, when it has gone.
    again = world.read(read, at=2)
    done(world.read(read, "other", 3))
    assert again.state is TransferState.PENDING
    assert [info.name for info in agent.added] == ["peer", "other"]
    world.agents.state["peer"] = DONE
    done(moving)
    done(again)
    assert [info.name for info in agent.added] == ["peer", "other", "peer"]
    read.retire("peer")
    assert until(lambda: set(agent.peers) == {"other"})
    assert read.gauges().peers == 1
    assert world.memory.right()


@pytest.mark.parametrize("what", ["metadata", "regions"])
def test_another_agent_of_the_same_name_is_added_when_the_first_is_through(world: World, what: str) -> None:
    read = world.transport()
    moving = world.moving(read)
    new = world.info(metadata=b"new") if what == "metadata" else world.info()
    if what == "regions":
        new = replace(new, regions=(replace(new.regions[0], length=SIZE - 1),))
    later = [read.start([world.part(new, at, CHUNK)], deadline=None, label="new") for at in (1, 2)]
    expires = read.start([world.part(new, 3, CHUNK)], deadline=world.clock() + 0.1, label="expires")
    assert expires.wait(SOON)
    assert isinstance(expires.error, TransferExpired)
    assert expires.quiet
    told = threading.Event()
    later[1].add_done_callback(lambda _: told.set())
    later[1].cancel()
    assert told.wait(SOON)
    world.agents.state["peer"] = DONE
    done(moving)
    done(later[0])
    (agent,) = world.agents.made
    assert agent.added == [world.info(), new]
    assert read.gauges().peers == 1


def test_a_peer_that_does_not_answer_is_waited_for_until_its_time_out(world: World) -> None:
    read = world.transport(warm_up_timeout=50.0, fence_time=600.0)
    world.agents.warm["peer"] = MOVING
    waiting = world.read(read)
    done(world.read(read, "other", 1))
    assert waiting.state is TransferState.PENDING
    world.later += 51.0
    assert "no answer within 50 s" in str(failed(waiting))
    assert waiting.quiet
    world.later += 550.0
    done(world.read(read, "other", 1))
    assert len(world.agents.made) == 1
    world.later += 100.0
    # The first read of a few bytes may still write into the agent's own memory: that ends with the agent.
    assert until(lambda: world.agents.made[0].destroyed)


def test_bytes_under_way_are_bounded_over_all_peers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry._transport.peer_link.STALLED", 1000.0)
    read = world.transport(bytes_in_flight_total=6 * CHUNK, reading_agents=2)
    names = [name for name in map(str, range(100)) if read.thread_of(name) is read.places[0]][:2]
    for name in names:
        done(world.read(read, name))
        world.agents.state[name] = MOVING
    transfers = [world.read(read, name, at) for at, name in enumerate(names)]

    def flying() -> list[int]:
        return [transfer.chunks_in_flight for transfer in transfers]

    assert until(lambda: sum(flying()) == 3)
    elsewhere = next(name for name in map(str, range(100)) if read.thread_of(name) is read.places[1])
    done(world.read(read, elsewhere, 5))
    assert sum(flying()) == 3
    # Stalled peers take no room.
    world.later += 1000.0
    assert until(lambda: sum(flying()) > 3)
    for name in names:
        world.agents.state[name] = DONE
    for transfer in transfers:
        done(transfer)


def test_a_single_chunk_is_allowed_whatever_the_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry._transport.peer_link.STALLED", 1000.0)
    read = world.transport(bytes_in_flight_total=1)
    transfers = [world.read(read, name, at) for at, name in enumerate(("a", "b", "c"))]
    for transfer in transfers:
        done(transfer)
    assert world.memory.right()
    for name in "abc":
        world.agents.state[name] = MOVING
    transfers = [world.read(read, name, at, 2) for at, name in enumerate(("a", "b", "c"))]
    (agent,) = world.agents.made
    for _ in range(6):
        assert until(lambda: any(agent.flying(name) for name in "abc"))
        assert sum(transfer.chunks_in_flight for transfer in transfers) == 1
        (handle,) = (handle for name in "abc" for handle in agent.flying(name))
        handle.state = DONE
        assert until(partial(getattr, handle, "released"))
    for transfer in transfers:
        done(transfer)


@pytest.mark.parametrize("error", [SystemExit("an engine's"), RuntimeError("a bug")])
def test_a_thread_that_fails_waits_for_posted_chunks(world: World, error: BaseException) -> None:
    read = world.transport()
    moving = world.moving(read)
    behind = read.start([world.part(world.info(metadata=b"new"), 3)], deadline=None, label="behind")
    breaks = world.moving(read, "other", 1)
    (agent,) = world.agents.made
    (handle,) = agent.flying("other")
    handle.state = error
    for transfer in (moving, breaks, behind):
        assert repr(error) in str(failed(transfer))
    assert behind.quiet
    # New reads go to another agent.
    world.agents.state["third"] = DONE
    done(world.read(read, "third", 2))
    assert not moving.quiet
    assert not agent.destroyed
    for one in agent.flying("peer"):
        one.state = DONE
    handle.state = DONE
    assert moving.wait_quiet(SOON)
    assert breaks.wait_quiet(SOON)
    assert until(lambda: agent.destroyed)
    assert len(world.agents.made) == 2


def test_a_deadline_is_kept_however_long_nothing_happens(world: World) -> None:
    read = world.transport()
    done(world.read(read))
    moving = world.moving(read)
    late = world.read(read, at=1, deadline=world.clock() + 300.0)
    world.later += 270.0
    done(world.read(read, "other", 2))
    states = [late.state]
    world.later += 30.5
    assert late.wait(SOON)
    assert [*states, late.state] == [TransferState.MOVING, TransferState.EXPIRED]
    assert moving.state is TransferState.MOVING
    assert not late.quiet


def test_the_earliest_alarm_wakes_the_thread(world: World) -> None:
    """Chunks under way are polled long before the deadline of reads that wait for room."""
    read = world.transport(bytes_in_flight=2 * CHUNK)
    done(world.read(read))
    world.agents.state["peer"] = MOVING
    moving = world.read(read, at=1, deadline=world.clock() + 1e4)
    waiting = world.read(read, at=2, deadline=world.clock() + 2e4)
    assert until(lambda: read.gauges().chunks_in_flight == 2)
    world.agents.state["peer"] = DONE
    done(moving)
    done(waiting)


def test_the_owner_of_the_memory_is_kept_while_an_agent_may_write_to_it(world: World) -> None:
    class Owner:
        pass

    owner = Owner()
    reference = weakref.ref(owner)
    read = Transport(
        RankMemory([world.memory.region], keep=owner),
        NixlOptions(chunk_bytes=CHUNK),
        reading=cast(MakeReadingAgent, world.agents.reading),
        clock=world.clock,
    )
    moving = world.moving(read)
    del owner, read
    gc.collect()
    assert reference() is not None
    world.agents.state["peer"] = DONE
    done(moving)


def test_threads_are_named_after_their_agents(world: World) -> None:
    read = world.transport(reading_agents=2)
    read.prepare()
    assert until(lambda: len(world.agents.made) == 2)
    names = {agent.name for agent in world.agents.made}
    assert len(names) == 2
    threads = {thread.name: thread for thread in threading.enumerate()}
    # They do not keep the interpreter from its exit.
    assert all(threads[name].daemon for name in names)
