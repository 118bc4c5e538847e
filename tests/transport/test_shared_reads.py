"""Large reads that several reading agents share: every byte arrives once, and the blocks are quiet only when no agent
can write to them any more (R4)."""

from __future__ import annotations

import os

import pytest

from kvferry._transport import peer_link, transport
from kvferry._transport import transfer as transfer_module
from kvferry._transport.reading_thread import ReadingThread
from kvferry._transport.transport import TransferState, Transport
from kvferry.errors import NixlError
from tests.transport.conftest import MakeTransport
from tests.transport.played_agents import CHUNK, DONE, MOVING, Agent, World, done, failed
from tests.transport.sources import POISON, SOON, Memory, Source
from tests.transport.transfers import read_all, until

PEER = "peer"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of the worlds are large, and so are their chunks."""
    monkeypatch.setattr(peer_link, "COPIED", CHUNK)
    monkeypatch.setattr(transport, "SHARED_READ", 4 * CHUNK)
    monkeypatch.setattr(transfer_module, "SHARED_CHUNK", CHUNK)
    monkeypatch.setattr(transfer_module, "COPIED_CHUNKS", 1)


def sharing(world: World) -> Transport:
    """A transport of two agents, both connected to the peer. Each has room for two chunks."""
    read = world.transport(reading_agents=2, bytes_in_flight=CHUNK)
    while read.gauges().peers < 2:
        done(world.read(read))

    def ready(thread: ReadingThread | None) -> bool:
        link = None if thread is None else thread.link_to(world.info())
        return link is not None and link.state is peer_link.LinkState.READY

    assert until(lambda: all(map(ready, read.places)))
    return read


def both_moving(world: World, read: Transport) -> tuple[Agent, Agent]:
    """The two agents, when each has two chunks of a read under way."""
    first, second = world.agents.made
    assert until(lambda: len(first.flying(PEER)) == len(second.flying(PEER)) == 2)
    return first, second


def test_agents_read_a_part_each_and_nothing_twice(world: World) -> None:
    read = sharing(world)
    world.agents.state[PEER] = MOVING
    transfer = world.read(read, at=1)
    first, second = both_moving(world, read)
    parts = [handle.chunk for agent in (first, second) for handle in agent.flying(PEER)]
    assert len({int(part.destination[0]) for part in parts if part is not None}) == 4
    world.agents.state[PEER] = DONE
    done(transfer)
    assert (transfer.chunks, world.memory.right()) == (4, True)


def test_a_shared_read_is_quiet_when_both_agents_are(world: World) -> None:
    read = sharing(world)
    world.agents.state[PEER] = MOVING
    transfer = world.read(read, at=1)
    agents = both_moving(world, read)
    assert not transfer.cancel()
    for agent in agents:
        assert not transfer.quiet
        flying = agent.flying(PEER)
        for handle in flying:
            handle.state = DONE
        assert until(lambda flying=flying: all(handle.released for handle in flying))  # type: ignore[misc]
    assert transfer.wait_quiet(SOON)
    assert transfer.state is TransferState.CANCELLED


def test_an_error_of_one_agent_ends_a_shared_read_and_its_blocks_wait_for_both(world: World) -> None:
    read = sharing(world)
    world.agents.state[PEER] = MOVING
    transfer = world.read(read, at=1)
    broken, well = both_moving(world, read)
    for handle in broken.flying(PEER):
        handle.state = "an error"
    assert "an error" in str(failed(transfer))
    # The failed chunk may write until its agent ends, which is at once.
    assert until(lambda: broken.destroyed)
    assert not transfer.quiet
    assert not well.destroyed
    world.agents.state[PEER] = DONE
    assert transfer.wait_quiet(SOON)
    # The next reads have two agents again.
    while len(world.agents.made) < 3 or read.gauges().peers < 2:
        done(world.read(read))
    assert not well.destroyed


def land(agent: Agent) -> None:
    """Let this agent's chunks from the peer arrive, so that nothing is left to be read."""
    flying = agent.flying(PEER)
    for handle in flying:
        handle.state = DONE
    assert until(lambda: all(handle.released for handle in flying))


def test_an_agent_that_is_done_with_its_part_drops_the_peer_while_the_other_still_reads(world: World) -> None:
    """Else a read that waits for the peer to be added again would wait for the other agent, or for ever."""
    read = sharing(world)
    world.agents.state[PEER] = MOVING
    shared = world.read(read, at=1)
    agents = both_moving(world, read)
    read.retire(PEER)
    behind = world.read(read, at=2, chunks=1)
    home = read.thread_of(PEER)
    done_first, still = sorted(agents, key=lambda agent: agent.name != home.name)
    for handle in still.flying(PEER):
        handle.state = MOVING
    world.agents.state[PEER] = DONE
    land(done_first)
    done(behind)
    assert not shared.state.final
    land(still)
    done(shared)
    assert world.memory.right()


def test_a_retired_agent_ends_when_its_part_is_read_while_the_other_still_reads(world: World) -> None:
    read = sharing(world)
    world.agents.state[PEER] = MOVING
    shared = world.read(read, at=1)
    agents = both_moving(world, read)
    doomed = world.lost(read, "doomed", 2)
    assert until(lambda: read.gauges().retired_agents == 1)
    retired, other = sorted(agents, key=lambda agent: "doomed" not in agent.peers)
    for handle in other.flying(PEER):
        handle.state = MOVING
    land(retired)
    # The lost chunk may write until its agent ends, and that is now.
    assert doomed.wait_quiet(SOON)
    assert not shared.state.final
    land(other)
    done(shared)


def test_small_reads_are_not_shared(world: World) -> None:
    read = sharing(world)
    world.agents.state[PEER] = MOVING
    transfer = world.read(read, at=1, chunks=3)
    assert until(lambda: sorted(len(agent.flying(PEER)) for agent in world.agents.made) == [0, 2])
    world.agents.state[PEER] = DONE
    done(transfer)


@pytest.mark.parametrize(("cores", "agents"), [(1, 1), (3, 1), (4, 2), (64, 2)])
def test_a_second_agent_is_made_where_posts_copy_and_there_are_cores(
    world: World, monkeypatch: pytest.MonkeyPatch, cores: int, agents: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    read = world.transport(reading_agents=None)
    read.prepare(SOON)
    for at in range(3):
        not_copied = world.moving(read, "silent", at, chunks=4)
        world.agents.state["silent"] = DONE
        done(not_copied)
    assert len(world.agents.made) == 1
    for at in range(3, 6):
        done(world.read(read, at=at))
    assert until(lambda: len(world.agents.made) == agents)
    assert (read.gauges().agents, world.memory.right()) == (agents, True)


def test_one_agent_reads_all_where_no_second_can_be_made_and_making_is_not_retried_for_each_read(world: World) -> None:
    read = world.transport(reading_agents=2)
    read.prepare(0.0)
    home = read.thread_of(PEER)
    other = next(thread for thread in read.places if thread is not home)
    assert other is not None
    assert until(lambda: len(world.agents.made) == 2)
    other.close()
    assert other.join(SOON)
    world.agents.refusal = NixlError("no memory can be registered")
    places = read.places
    for at in range(6):
        done(world.read(read, at=at))
        assert until(lambda: all(thread in (home, other) or (thread and thread.refusal) for thread in places))
    assert (world.agents.refused, world.memory.right()) == (1, True)


def test_one_agent_reads_all_where_the_system_refuses_a_second_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    read = world.transport(reading_agents=None)
    done(world.read(read))

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(transport, "ReadingThread", refuse)
    for at in range(3):
        done(world.read(read, at=at))
    assert world.memory.right()


def test_shared_reads_deliver_the_right_bytes(
    source: Source, memory: Memory, transport: MakeTransport, ucx_tls: str
) -> None:
    read = transport(ucx_tls, reading_agents=2, chunk_bytes=256 << 10)
    read.prepare(SOON)
    for _ in range(4):
        memory.bytes[:] = POISON
        done(read_all(read, source, memory))
        assert memory.right()
        # Over TCP posts do not copy.
        assert ucx_tls or until(lambda: read.gauges().agents == 2)
    # The second connects while the first reads.
    assert ucx_tls or until(lambda: read.gauges().peers == 2)
