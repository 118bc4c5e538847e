"""Retired agents: when, how many, and the memory kept until nothing can write any more (R4, R5, R10).

The agents of `played_agents` stand in for NIXL's.
"""

from __future__ import annotations

import pytest

from kvferry._transport.reading_thread import RETIRE_AGAIN
from kvferry._transport.transport import TransferState
from kvferry.errors import (
    TransferFailed,
)
from tests.transport.played_agents import CHUNK, DONE, MOVING, SIZE, World, done, failed
from tests.transport.sources import SOON
from tests.transport.transfers import until


def test_a_broken_peer_leaves_its_retired_agent_to_the_other_peers(world: World) -> None:
    read = world.transport()
    patient = world.moving(read, "patient")
    doomed = world.lost(read, "doomed", 1)
    assert isinstance(failed(doomed), TransferFailed)
    assert until(lambda: read.gauges().retired_agents == 1)
    world.agents.state["doomed"] = DONE
    # NIXL's answers after an error prove nothing, and new reads go to a fresh agent.
    done(world.read(read, "doomed", 1))
    done(world.read(read, "third", 2))
    old, new = world.agents.made
    assert set(new.peers) == {"doomed", "third"}
    assert (doomed.quiet, old.destroyed, patient.state) == (False, False, TransferState.MOVING)
    gauges = read.gauges()
    assert (gauges.agents, gauges.retired_agents, gauges.uncertain, gauges.chunks_in_flight) == (2, 1, 1, 2)
    world.agents.state["patient"] = DONE
    done(patient)
    assert doomed.wait_quiet(SOON)
    assert until(lambda: read.gauges().agents == 1)
    assert (old.destroyed, new.destroyed) == (True, False)
    assert read.gauges().quiesced == 1
    assert until(lambda: read.gauges().bytes_moved == 4 * CHUNK + SIZE * 2 - 3 * CHUNK)
    assert world.memory.right()


def test_shares_of_a_peer_that_is_stuck_move_on_and_others_stay(world: World) -> None:
    read = world.transport(bytes_in_flight=2 * CHUNK, fence_time=60.0)
    stuck, other = world.moving(read, "stuck", 0, 2), world.moving(read, "other", 2, 2)
    behind, beside = world.read(read, "stuck", 1), world.read(read, "other", 3)
    restarted = read.start([world.part(world.info("other", b"new"), 4)], deadline=None, label="restarted")
    stuck.cancel()
    assert read.gauges().retired_agents == 0
    world.later += 61.0
    assert until(lambda: len(world.agents.made) == 2)
    # The read's first agent keeps two of its chunks for ever; the next agent has none.
    old = world.agents.made[0]
    under_way = {name: old.flying(name) for name in ("stuck", "other")}
    for handle in (*under_way["stuck"], *under_way["other"]):
        handle.state = MOVING
    world.agents.state.clear()
    done(behind)
    done(restarted)
    assert (other.state, beside.state) == (TransferState.MOVING, TransferState.PENDING)
    assert not stuck.quiet
    for handle in under_way["other"]:
        handle.state = DONE
    done(other)
    done(beside)
    assert stuck.wait_quiet(SOON)
    assert old.destroyed
    assert {handle.peer for handle in world.agents.made[1].handles} == {"stuck", "other"}


def test_an_agent_that_does_not_end_leaves_its_reads_uncertain(world: World, caplog: pytest.LogCaptureFixture) -> None:
    read = world.transport()
    world.agents.may_end = False
    lost = world.lost(read)
    assert until(lambda: read.gauges().agents == 0)
    assert not lost.quiet
    assert read.gauges().uncertain == 1
    assert "could not be destroyed" in caplog.text
    caplog.clear()
    # An agent with nothing under way leaves nothing uncertain.
    done(world.read(read, "other", 1))
    assert read.close(SOON)
    assert "could not be destroyed" not in caplog.text


def test_retired_agents_are_bounded(world: World) -> None:
    read = world.transport(retired_agents=1, reading_agents=2)
    read.prepare()
    assert until(lambda: len(world.agents.made) == 2)
    names: dict[int, list[str]] = {0: [], 1: []}
    for number in range(12):
        done(world.read(read, f"peer {number}"))
        (place,) = (place for place in (0, 1) if f"peer {number}" in world.agents.made[place].peers)
        names[place].append(f"peer {number}")
    (one, keeps, *_), (other, healthy, *_) = names[0], names[1]
    keeping = world.moving(read, keeps)
    first = world.lost(read, one, 1)
    assert until(lambda: read.gauges().retired_agents == 1)
    second = world.lost(read, other, 2)
    # Its agent may not be retired: new reads from this peer fail at once, and all other peers are read.
    refused = world.read(read, other, 3)
    assert "too many agents" in str(failed(refused))
    assert refused.quiet
    done(world.read(read, healthy, 4))
    assert (read.gauges().retired_agents, len(world.agents.made)) == (1, 2)
    world.agents.state[keeps] = DONE
    done(keeping)
    assert first.wait_quiet(SOON)
    # Now there is room for it.
    world.later += RETIRE_AGAIN
    assert second.wait_quiet(SOON)
    del world.agents.state[other]
    done(world.read(read, other, 5))
