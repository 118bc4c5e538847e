"""What stands in for NIXL refuses what NIXL refuses."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry._transport.nixl_agent import HandleState, ReadingAgent, ServingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry.errors import BadAgentMetadata, InvalidField, NixlError
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind
from kvferry.planner.descriptors import Descriptors, MemoryPair
from kvferry.testing import Fabric
from kvferry.testing._memory import Agent, Process, Wire

HOST = MemoryPair((MemoryKind.DRAM, 0), (MemoryKind.DRAM, 0))
SIZE = 256


class Side:
    """An agent of either kind on a fabric, with memory of its own."""

    def __init__(self, fabric: Fabric, value: int) -> None:
        self.cells = np.full(SIZE, value, np.uint8)
        self.base = self.cells.ctypes.data
        self.regions = [MemoryRegion(MemoryKind.DRAM, 0, self.base, SIZE)]
        self.binding = fabric.client()._network.binding

    def serving(self, name: str = "source") -> ServingAgent:
        return ServingAgent(name, self.regions, NixlOptions(), self.binding)

    def reading(self) -> ReadingAgent:
        return ReadingAgent("reader", self.regions, NixlOptions(), self.binding)


def pair(fabric: Fabric) -> tuple[Side, Side, ServingAgent, ReadingAgent]:
    """A source, and a reader that is connected to it."""
    source, reader = Side(fabric, 7), Side(fabric, 0)
    serving, reading = source.serving(), reader.reading()
    reading.add_peer(serving.info)
    assert reading.warm_up("source").post() is HandleState.DONE
    return source, reader, serving, reading


def raw(source: int, destination: int, length: int) -> Descriptors:
    return Descriptors(HOST, *(np.array([value], np.uint64) for value in (source, destination, length)))


def test_descriptors_one_by_one_and_of_rows_and_runs_are_copied(fabric: Fabric) -> None:
    source, reader, _, reading = pair(fabric)
    source.cells[:] = np.arange(SIZE)
    assert reading.make("source", raw(source.base + 8, reader.base + 1, 3)).post() is HandleState.DONE
    rows = [source.base, source.base + 128], [reader.base, reader.base + 128], [4, 2]
    runs = [16, 40], [32, 8], [1, 2]
    columns = (np.array(column, np.uint64) for column in (*rows, *runs))
    handle = reading.make("source", Descriptors(HOST, *columns))
    assert (handle.post(), handle.check()) == (HandleState.DONE, HandleState.DONE)
    wanted = np.zeros(SIZE, np.uint8)
    wanted[1:4] = [8, 9, 10]
    for of, to, length in ((16, 32, 4), (40, 8, 8), (144, 160, 2), (168, 136, 4)):
        wanted[to : to + length] = np.arange(of, of + length)
    assert np.array_equal(reader.cells, wanted)


@pytest.mark.parametrize("side", [0, 1])
def test_unregistered_memory_is_not_touched(side: int) -> None:
    process = Process(Wire())
    here, there = Agent(process, "here"), Agent(process, "there")
    cells = [np.zeros(SIZE, np.uint8) for _ in range(2)]
    for agent, memory in zip((there, here), cells, strict=True):
        agent.registerMem(("DRAM", np.array([[memory.ctypes.data, SIZE, 0]], np.uint64)), [])
    here.loadRemoteMD(there.getLocalMD())
    lists = [np.array([[memory.ctypes.data + (at == side), SIZE, 0]], np.uint64) for at, memory in enumerate(cells)]
    with pytest.raises(InvalidField, match="registered by"):
        here.createXferReq("READ", ("DRAM", lists[1]), ("DRAM", lists[0]), "there", b"", [])


def test_a_closed_source_cannot_be_read(fabric: Fabric) -> None:
    source, reader, serving, reading = pair(fabric)
    handle = reading.make("source", raw(source.base, reader.base, 8))
    serving.close()
    with pytest.raises(NixlError, match="agent 'source' is gone"):
        handle.post()


def test_a_new_agent_of_the_same_name_is_another_one(fabric: Fabric) -> None:
    source, reader, serving, reading = pair(fabric)
    serving.close()
    again = source.serving()
    with pytest.raises(NixlError, match="is gone"):
        reading.make("source", raw(source.base, reader.base, 8)).post()
    reading.remove_peer("source")
    reading.add_peer(again.info)
    assert reading.warm_up("source").post() is HandleState.DONE


def test_metadata_of_another_agent_are_refused(fabric: Fabric) -> None:
    _, _, serving, reading = pair(fabric)
    other = Side(fabric, 1).serving("other")
    info = type(other.info)("source-2", serving.info.metadata, serving.info.metadata_sha256, serving.info.regions)
    with pytest.raises(BadAgentMetadata, match="its metadata are those of 'source'"):
        reading.add_peer(info)


def test_the_end_of_an_agent_fences_its_writes(fabric: Fabric) -> None:
    source, reader, _, reading = pair(fabric)
    with fabric.hold_reads() as held:
        assert reading.make("source", raw(source.base, reader.base, 8)).post() is HandleState.MOVING
        assert held.count == 1
        assert reading.destroy()
        assert held.count == 0
    assert not reader.cells.any()
