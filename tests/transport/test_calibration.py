"""The measured costs of reads and copies are the real ones: agents and copies take as long as the test sets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from kvferry._clock import now
from kvferry._memory.access import HostAccess, StillCopying
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport import calibration
from kvferry._transport.calibration import measure
from kvferry._transport.nixl_agent import AgentInfo, HandleState, MakeReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions, StagingPool
from kvferry._transport.transport import Transport
from kvferry.geometry import MemoryKind, MemoryRegion
from kvferry.planner import Costs
from kvferry.planner.descriptors import Descriptors
from kvferry.planner.expansion import Copy
from tests.support.simulated_memories import addresses
from tests.transport.played_agents import Agent, Agents, Handle
from tests.transport.sources import SOON, Memory
from tests.transport.transfers import until

LAW = Costs(descriptor=3e-6, byte=2e-10, staged_byte=3e-10, cell=5e-9, copied_byte=1e-10)
PAGE = 4096
FIRST_TOUCH = 2e-6
"""Seconds for a page that was never touched."""
MAKING = 10.0
"""Seconds to make an agent: far more than all measurements may take together."""


class Machine(Agents):
    """Agents and copies that take as long as `LAW` says, by a clock that stands still otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.reads: list[Descriptors] = []
        self.touched: set[int] = set()

    def clock(self) -> float:
        return self.seconds

    def reading(self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions) -> Agent:
        self.seconds += MAKING
        self.made.append(PricedAgent(self, name, options))
        return self.made[-1]

    def read(self, chunk: Descriptors) -> None:
        self.seconds += chunk.count * LAW.descriptor + chunk.total_bytes * LAW.byte
        self.reads.append(chunk)
        for begin, size in zip(*written(chunk), strict=True):
            self.touch(begin, begin + size)

    def copy(self, _: HostAccess, copies: Iterable[Copy]) -> None:
        for one in copies:
            runs = len(one.places) * math.prod(one.source.shape[1:])
            self.seconds += runs * (LAW.cell + one.source.size * LAW.copied_byte)
            for at in one.ids.tolist():
                written = addresses(one.destination, at)
                self.touch(min(written), max(written) + one.destination.size)

    def touch(self, begin: int, end: int) -> None:
        pages = set(range(begin // PAGE, -(-end // PAGE))) - self.touched
        self.seconds += len(pages) * FIRST_TOUCH
        self.touched |= pages


class PricedAgent(Agent):
    """An agent whose reads take as long as the machine sets."""

    def make(self, peer: str, chunk: Descriptors) -> Handle:
        self.own()
        self.handles.append(PricedHandle(self, peer, chunk))
        return self.handles[-1]


class PricedHandle(Handle):
    """A read that has ended when it is posted, and copies nothing."""

    def said(self) -> HandleState:
        if self.chunk is not None:
            cast(Machine, self.agent.agents).read(self.chunk)
        return HandleState.DONE


def written(chunk: Descriptors) -> tuple[list[int], list[int]]:
    """Addresses that a read writes to, and bytes at each."""
    single = chunk.one_by_one()
    return single.destination.tolist(), single.length.tolist()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(calibration, "now", made.clock)
    monkeypatch.setattr(HostAccess, "copy", lambda access, copies: made.copy(access, copies))
    return made


@pytest.fixture
def transport(machine: Machine) -> Iterator[Transport]:
    memory = Memory(PAGE)
    made = Transport(RankMemory([memory.region]), reading=cast(MakeReadingAgent, machine.reading), clock=machine.clock)
    yield made
    machine.seconds += 1.0
    assert made.close(SOON)


@pytest.fixture
def peer() -> AgentInfo:
    # Nothing is there: these reads copy nothing.
    region = MemoryRegion(MemoryKind.DRAM, 0, 1 << 30, 32 << 20)
    return AgentInfo("peer", b"metadata", hashlib.sha256(b"metadata").digest(), (region,))


def measured(transport: Transport, peer: AgentInfo) -> Costs:
    found = measure(transport, peer, transport.pool(MemoryKind.DRAM, 0), 1e4)
    assert found is not None
    return found


def test_costs_of_the_first_read_only_are_not_measured(
    transport: Transport, peer: AgentInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent is made, and memory touched that never was: neither is so again. One turn shows what the fastest of
    several would hide."""
    monkeypatch.setattr(calibration, "ENOUGH", -1.0)
    found = measured(transport, peer)
    for cost in ("descriptor", "byte", "staged_byte", "cell", "copied_byte"):
        assert getattr(found, cost) == pytest.approx(getattr(LAW, cost), rel=0.01, abs=0), cost


def test_a_slow_start_leaves_no_less_time_to_measure(machine: Machine, transport: Transport, peer: AgentInfo) -> None:
    measured(transport, peer)
    first = len(machine.reads)
    measured(transport, peer)
    # The agent is there now, and the memory is touched.
    assert len(machine.reads) == 2 * first


@pytest.mark.parametrize(
    ("slot_bytes", "length", "is_measured"),
    [(512 << 10, 32 << 20, True), (4 << 20, 800 << 10, True), (4 << 20, 480 << 10, False)],
)
def test_each_read_fits_into_its_slot_and_into_the_region(
    machine: Machine, peer: AgentInfo, slot_bytes: int, length: int, *, is_measured: bool
) -> None:
    """The next slot may be another read's. Of a region that is too small nothing is read."""
    (large,) = peer.regions
    peer = replace(peer, regions=(replace(large, length=length),))
    transport = Transport(
        RankMemory([Memory(PAGE).region]),
        reading=cast(MakeReadingAgent, machine.reading),
        staging=StagingOptions(slot_bytes=slot_bytes),
        clock=machine.clock,
    )
    pool = transport.pool(MemoryKind.DRAM, 0)
    assert (measure(transport, peer, pool, 1e4) is not None) is is_measured
    base = pool.space.region.base
    for read in machine.reads:
        assert len({(begin - base) // slot_bytes for begin in written(read)[0]}) == 1
    machine.seconds += 1.0
    assert transport.close(SOON)


def free_slots(pool: StagingPool) -> int:
    """How many slots another read could have now."""
    return pool.slots - pool.in_use


def test_slots_of_a_failed_measurement_are_lent_again_when_nothing_can_write_to_them() -> None:
    there = np.zeros(32 << 20, np.uint8)
    region = MemoryRegion(MemoryKind.DRAM, 0, there.ctypes.data, there.nbytes)
    peer = AgentInfo("peer", b"metadata", hashlib.sha256(b"metadata").digest(), (region,))
    agents = Agents(state={"peer": HandleState.MOVING})
    memory = Memory(PAGE)
    transport = Transport(RankMemory([memory.region]), reading=cast(MakeReadingAgent, agents.reading))
    pool = transport.pool(MemoryKind.DRAM, 0)
    assert measure(transport, peer, pool, now() + 1.0) is None
    # The posted read may still write into its own slot, and into no other.
    (handle,) = [handle for agent in agents.made for handle in agent.handles]
    assert handle.chunk is not None
    begins, _ = written(handle.chunk)
    (slot,) = {(begin - pool.space.region.base) // pool.slot_bytes for begin in begins}
    assert free_slots(pool) == pool.slots - 1
    lent = [pool.borrow() for _ in range(pool.slots - 1)]
    assert pool.space.region.base + slot * pool.slot_bytes not in lent
    for other in lent:
        assert other is not None
        pool.release(other)
    agents.state["peer"] = HandleState.DONE
    assert until(lambda: free_slots(pool) == pool.slots)
    assert transport.close(SOON)


def test_a_slot_that_the_device_may_still_copy_into_is_not_lent_again(
    transport: Transport, peer: AgentInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    into: list[int] = []

    def stuck(_: HostAccess, copies: Iterable[Copy]) -> None:
        into.extend(one.destination.address for one in copies)
        raise StillCopying

    monkeypatch.setattr(HostAccess, "copy", stuck)
    pool = transport.pool(MemoryKind.DRAM, 0)
    assert measure(transport, peer, pool, 1e4) is None
    assert free_slots(pool) == pool.slots - 1
    assert not set(into) & {pool.borrow() for _ in range(pool.slots - 1)}
