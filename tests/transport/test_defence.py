"""Descriptors and metadata that would harm a process are refused before NIXL sees them (R7); nothing is posted."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvferry._clock import now
from kvferry._transport import nixl_agent
from kvferry._transport.bounds import RegionMap, check_agent, check_blocks, check_descriptors
from kvferry._transport.nixl_agent import AgentInfo, HandleState, NixlOptions, ReadingAgent
from kvferry._transport.transport import TransferState
from kvferry.errors import BadAgentMetadata, InvalidField
from kvferry.geometry import MemoryKind, MemoryRegion
from kvferry.planner.descriptors import BlockRows, Descriptors, MemoryPair
from tests.transport.conftest import MakeTransport
from tests.transport.sources import DRAM, SOON, Memory, Source, raw, raw_part

KIB = 1024
ONE_RUN = tuple(np.array([value], np.uint64) for value in (0, 0, 1))
# Two regions that touch, and one apart, on each side.
HERE = RegionMap("here", [MemoryRegion(MemoryKind.DRAM, 0, base * KIB, 64 * KIB) for base in (64, 128, 1024)])
THERE = RegionMap("there", [MemoryRegion(MemoryKind.DRAM, 0, base * KIB, 64 * KIB) for base in (2048, 2112, 4096)])
SOURCE, DESTINATION = 2048 * KIB, 64 * KIB
WRAPS = (1 << 64) - 4096


def one(source: int, destination: int, length: int, memory: MemoryPair = DRAM) -> Descriptors:
    # Beside a right descriptor, so that checking only the first is not enough.
    return raw([SOURCE, source], [DESTINATION, destination], [1, length], memory)


BAD_RAW = {
    "source below its region": one(SOURCE - 1, DESTINATION, 2),
    "source past the end": one(SOURCE + 128 * KIB - 1, DESTINATION, 2),
    "source in the gap": one(3000 * KIB, DESTINATION, 1),
    "source over two regions that touch": one(SOURCE + 64 * KIB - 1, DESTINATION, 2),
    "destination below its region": one(SOURCE, DESTINATION - 1, 2),
    "destination past the end": one(SOURCE, 1088 * KIB, 1),
    "destination in the gap": one(SOURCE, 200 * KIB, 1),
    "no bytes": one(SOURCE, DESTINATION, 0),
    "length that wraps": one(SOURCE + 4096, DESTINATION, WRAPS),
    "length that wraps to nothing": one(SOURCE, DESTINATION, (1 << 64) - 1),
    "length beyond int64": one(SOURCE, DESTINATION, 1 << 63),
    "address beyond int64": one(1 << 63, DESTINATION, 1),
    "destination address that wraps": one(SOURCE, WRAPS, 4096 + 1),
    "other device": one(SOURCE, DESTINATION, 1, DRAM._replace(source=(MemoryKind.DRAM, 1))),
    "other memory": one(SOURCE, DESTINATION, 1, DRAM._replace(destination=(MemoryKind.VRAM, 0))),
    "lengths of another type": Descriptors(
        DRAM,
        np.array([SOURCE], np.uint64),
        np.array([DESTINATION], np.uint64),
        np.ones(1, np.int64),
    ),
    "unequal lists": Descriptors(DRAM, *(np.ones(n, np.uint64) for n in (2, 1, 2))),
    "signed addresses": Descriptors(DRAM, *(np.ones(1, np.int64) for _ in range(3))),  # type: ignore[arg-type]
    "two dimensions": Descriptors(DRAM, *(np.ones((1, 1), np.uint64) for _ in range(3))),
}

HALF = 1 << 63
LIMIT = (1 << 63) - 1
GOOD = {
    "source": [SOURCE, SOURCE + 64 * KIB],
    "destination": [DESTINATION + 64 * KIB, DESTINATION],
    "length": [1024, 512],
    "source_offset": [0, 63 * KIB, 1024],
    "destination_offset": [62 * KIB, 0, 4096],
    "repeats": [1, 1, 2],
}


def grid(**other: Sequence[int]) -> Descriptors:
    """Two rows and three runs, right but for these columns."""
    return Descriptors(DRAM, *(np.array(values, np.uint64) for values in {**GOOD, **other}.values()))


def odd(**other: Any) -> Descriptors:
    return dataclasses.replace(grid(), **other)


BAD_GRIDS = {
    "row below its region": grid(source=[SOURCE, SOURCE + 64 * KIB - 1]),
    "row past the end": grid(source=[SOURCE, SOURCE + 64 * KIB + 513]),
    "row over two regions that touch": grid(source=[SOURCE + 1, SOURCE + 64 * KIB]),
    "row in the gap": grid(source=[SOURCE, 3000 * KIB]),
    "destination row past the end": grid(destination=[DESTINATION + 64 * KIB + 1025, DESTINATION]),
    "destination row below its region": grid(destination=[DESTINATION + 64 * KIB, DESTINATION - 1]),
    "run past the end": grid(source_offset=[0, 64 * KIB - 1023, 1024]),
    "run of too many blocks": grid(repeats=[1, 1, 64]),
    "destination run past the end": grid(destination_offset=[63 * KIB + 1, 0, 4096]),
    "no bytes in a row": grid(length=[1024, 0]),
    "no blocks in a run": grid(repeats=[1, 0, 2]),
    "row that wraps": grid(source=[SOURCE, WRAPS]),
    "offset that wraps": grid(source_offset=[0, WRAPS, 1024]),
    "offset that wraps to the region": grid(source_offset=[0, (1 << 64) - 64, 1024]),
    "rows and offsets that wrap together": grid(source=[HALF, HALF], source_offset=[HALF + SOURCE] * 3),
    "length times blocks that wraps": grid(length=[1 << 40, 1 << 40], repeats=[1 << 24] * 3),
    "length times blocks beyond int64": grid(length=[1 << 40, 1], repeats=[1 << 23] * 3),
    "offset and length that wrap": grid(source_offset=[LIMIT] * 3, length=[LIMIT, 1]),
    "unequal rows": odd(length=np.ones(3, np.uint64)),
    "unequal runs": odd(repeats=np.ones(2, np.uint64)),
    "signed offsets": odd(source_offset=np.zeros(3, np.int64)),
    "32-bit offsets": odd(destination_offset=np.zeros(3, np.uint32)),
    "float blocks": odd(repeats=np.ones(3)),
    "runs of two dimensions": odd(
        source_offset=np.zeros((3, 1), np.uint64),
        destination_offset=np.zeros((3, 1), np.uint64),
        repeats=np.ones((3, 1), np.uint64),
    ),
}


@pytest.mark.parametrize("bad", [*BAD_RAW.values(), *BAD_GRIDS.values()], ids=[*BAD_RAW, *BAD_GRIDS])
def test_bad_descriptors_are_refused(bad: Descriptors) -> None:
    with pytest.raises(InvalidField):
        check_descriptors(bad, HERE, THERE)


@pytest.mark.parametrize(
    "good",
    [
        one(SOURCE + 64 * KIB - 1, DESTINATION, 1),
        one(SOURCE + 64 * KIB, DESTINATION + 64 * KIB, 64 * KIB),
        one(4096 * KIB, 1024 * KIB, 64 * KIB),
        raw([], [], []),
        # Many are checked at once.
        raw([SOURCE] * 40, [DESTINATION] * 40, [1] * 40),
        grid(),
        grid(source=[SOURCE, SOURCE + 64 * KIB + 512]),
        grid(source=[], destination=[], length=[]),
        grid(source_offset=[], destination_offset=[], repeats=[]),
        grid(repeats=[1, 1, 58]),
    ],
)
def test_good_descriptors_pass(good: Descriptors) -> None:
    check_descriptors(good, HERE, THERE)


BLOCKS = BlockRows(
    source=np.array([SOURCE, SOURCE + 1024, SOURCE + 64 * KIB], np.uint64),
    destination=np.array([DESTINATION, DESTINATION + 512, DESTINATION + 64 * KIB], np.uint64),
    length=np.array([512, 256, 512], np.uint64),
    source_stride=4096,
    destination_stride=2048,
    source_blocks=16,
    destination_blocks=32,
)


def of_blocks(**other: Any) -> Descriptors:
    """The last two rows of three blocks, but for these fields."""
    runs = [0, 15 * 4096, 4096], [31 * 2048, 0, 2048], [1, 1, 1]
    rows = BLOCKS.source[1:], BLOCKS.destination[1:], BLOCKS.length[1:]
    made = Descriptors(DRAM, *rows, *(np.array(run, np.uint64) for run in runs), blocks=BLOCKS, first_row=1)
    return dataclasses.replace(made, **other)


def test_rows_of_single_blocks_pass() -> None:
    check_blocks(of_blocks(), BLOCKS)
    check_descriptors(BLOCKS.whole(DRAM), HERE, THERE)


@pytest.mark.parametrize(
    "other",
    [
        {"first_row": 0},
        {"first_row": 2},
        {"first_row": -2},
        {"source": BLOCKS.source[:2]},
        {"destination": BLOCKS.destination[1:] + np.uint64(1)},
        {"length": BLOCKS.length[1:] + np.uint64(1)},
        {"source_offset": np.array([0, 16 * 4096, 0], np.uint64)},
        {"source_offset": np.array([0, 4095, 0], np.uint64)},
        {"destination_offset": np.array([0, 32 * 2048, 0], np.uint64)},
        {"destination_offset": np.array([1, 0, 0], np.uint64)},
        {"repeats": np.array([1, 2, 1], np.uint64)},
    ],
    ids=lambda other: f"{next(iter(other))}={next(iter(other.values()))}",
)
def test_other_descriptors_than_rows_of_single_blocks_are_refused(other: dict[str, Any]) -> None:
    """Their indices would be those of other rows, or of no row."""
    with pytest.raises(InvalidField, match="rows of single blocks"):
        check_blocks(of_blocks(**other), BLOCKS)


@pytest.mark.parametrize(
    "other",
    [
        {"source_blocks": 17},
        {"destination_blocks": 33},
        {"source_stride": 4352},
        {"source_stride": WRAPS, "source_blocks": 2},
        {"destination_stride": 1 << 62, "destination_blocks": 4},
        {"length": np.array([512, 256, 0], np.uint64)},
        {"length": np.array([512, 256, 8192], np.uint64)},
    ],
    ids=str,
)
def test_blocks_outside_regions_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        check_descriptors(dataclasses.replace(BLOCKS, **other).whole(DRAM), HERE, THERE)


def test_a_range_inside_the_larger_of_two_nested_regions_passes() -> None:
    nested = RegionMap("x", [MemoryRegion(MemoryKind.DRAM, 0, 0, 4096), MemoryRegion(MemoryKind.DRAM, 0, 1024, 16)])
    nested.check_ranges("x", MemoryKind.DRAM, 0, np.array([2000], np.uint64), np.array([2000], np.uint64))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_region_is_as_long_as_it_is_whatever_is_beside_it(count: int) -> None:
    bases = [100 * (1 + place) for place in range(count)]
    regions = RegionMap("x", [MemoryRegion(MemoryKind.DRAM, 0, base, 50) for base in bases])

    def inside(address: int, length: int) -> bool:
        try:
            regions.check_ranges("x", MemoryKind.DRAM, 0, *(np.array([n], np.uint64) for n in (address, length)))
        except InvalidField:
            return False
        return True

    assert not inside(0, 1)
    for base in bases:
        assert inside(base, 1)
        assert inside(base, 50)
        assert inside(base + 49, 1)
        assert not inside(base - 1, 1)
        assert not inside(base, 51)
        assert not inside(base + 50, 1)
        assert not inside(base + 49, 100)


def test_a_refused_transfer_posts_nothing(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls)
    good, outside = raw([source.base], [memory.base], [64]), source.base + source.size - 32
    for bad in (
        raw([outside], [memory.base], [64]),
        raw([source.base], [memory.base + len(memory.bytes)], [64]),
        raw([source.base], [memory.base], [WRAPS]),
        raw([source.base], [memory.base], [0]),
    ):
        with pytest.raises(InvalidField):
            read.start([raw_part(source.info, [good, bad])], deadline=now() + SOON, label="bad")
    assert memory.untouched()
    assert read.gauges().agents == 0
    transfer = read.start([raw_part(source.info, [memory.all_of(source)])], deadline=now() + SOON, label="good")
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.DONE
    assert memory.right()
    assert source.alive()


def test_the_reading_agent_itself_refuses_as_well(ucx_tls: str, source: Source, memory: Memory) -> None:
    agent = ReadingAgent(f"last-line-{ucx_tls}", [memory.region], NixlOptions(ucx_tls=ucx_tls))
    agent.add_peer(source.info)
    runs = [0, WRAPS], [0, 64], [1, 1]
    columns = (np.array(column, np.uint64) for column in ([source.base + 4096], [memory.base], [64], *runs))
    for bad in (
        raw([source.base], [memory.base], [WRAPS]),
        raw([source.base - 64], [memory.base], [64]),
        Descriptors(DRAM, *columns),
        past_the_memory(source, memory),
    ):
        with pytest.raises(InvalidField):
            agent.make(source.name, bad)
    agent.remove_peer(source.name)
    assert agent.destroy()
    assert memory.untouched()
    assert source.alive()


def test_prepared_lists_of_a_peer_have_a_bounded_number_of_rows(
    ucx_tls: str, source: Source, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source may name other layers at each step, each with a list of its own. A made read keeps its list."""
    monkeypatch.setattr(nixl_agent, "ROWS_PER_PEER", 3 * (nixl_agent.ROWS_PER_LIST + 8))
    agent = ReadingAgent(f"bounded-{ucx_tls}", [memory.region], NixlOptions(ucx_tls=ucx_tls))
    agent.add_peer(source.info)
    steps = np.arange(8, dtype=np.uint64) * np.uint64(64)
    handles, kept = [], []
    for number in range(8):
        at = np.uint64(number * 512)
        rows = np.uint64(source.base) + at + steps, np.uint64(memory.base) + at + steps, np.full(8, 64, np.uint64)
        # The sixth has more rows than may be kept.
        there, here, length = (np.tile(column, 200 if number == 5 else 1) for column in rows)
        blocks = BlockRows(there, here, length, 64, 64, 1, 1)
        handles.append(agent.make(source.name, Descriptors(DRAM, *rows, *ONE_RUN, blocks=blocks)))
        kept.append(len(agent._added[source.name].lists))
    assert kept == [1, 2, 3, 3, 3, 1, 1, 2]
    for handle in handles:
        state = handle.post()
        while state is HandleState.MOVING:
            state = handle.check()
        assert state is HandleState.DONE
        handle.release()
    assert (memory.bytes[:4096] == source.bytes[:4096]).all()
    agent.remove_peer(source.name)
    assert agent.destroy()


def past_the_memory(source: Source, memory: Memory) -> Descriptors:
    """The first block of rows whose last block lies outside the memory."""
    there, here, length = (np.array([value], np.uint64) for value in (source.base, memory.base, 64))
    blocks = BlockRows(there, here, length, 64, 64, source.size // 64 + 1, 2)
    return Descriptors(DRAM, blocks.source, blocks.destination, blocks.length, *ONE_RUN, blocks=blocks)


def damaged(info: AgentInfo) -> dict[str, AgentInfo]:
    flipped = bytearray(info.metadata)
    flipped[len(flipped) // 2] ^= 4
    return {
        "one bit": dataclasses.replace(info, metadata=bytes(flipped)),
        "truncated": dataclasses.replace(info, metadata=info.metadata[:-7]),
        "empty": dataclasses.replace(info, metadata=b"", metadata_sha256=hashlib.sha256(b"").digest()),
        "appended": dataclasses.replace(info, metadata=info.metadata + b"x"),
        "wrong digest": dataclasses.replace(info, metadata_sha256=bytes(32)),
        "no digest": dataclasses.replace(info, metadata_sha256=b""),
        "no name": dataclasses.replace(info, name=""),
        "long name": dataclasses.replace(info, name="x" * 1000),
        "no regions": dataclasses.replace(info, regions=()),
    }


@pytest.mark.parametrize(
    ("name", "size", "regions", "good"),
    [
        ("x", 1, 1, True),
        ("x" * 512, 16 << 20, 1 << 16, True),
        ("", 1, 1, False),
        ("x" * 513, 1, 1, False),
        # Bytes are counted, not letters.
        ("é" * 257, 1, 1, False),
        ("x", 0, 1, False),
        ("x", (16 << 20) + 1, 1, False),
        ("x", 1, 0, False),
        ("x", 1, (1 << 16) + 1, False),
    ],
)
def test_announcements_of_an_agent_are_bounded(name: str, size: int, regions: int, good: bool) -> None:
    metadata = bytes(size)
    announced = AgentInfo(
        name, metadata, hashlib.sha256(metadata).digest(), (MemoryRegion(MemoryKind.DRAM, 0, 64, 1),) * regions
    )
    with contextlib.nullcontext() if good else pytest.raises(BadAgentMetadata):
        check_agent(announced)


@pytest.mark.parametrize("damage", list(damaged(AgentInfo("x", b"x" * 9, b"", ()))))
def test_damaged_metadata_never_reach_nixl(
    damage: str, ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls)
    bad = damaged(source.info)[damage]
    with pytest.raises(BadAgentMetadata):
        read.start([raw_part(bad, [raw([source.base], [memory.base], [64])])], deadline=now() + SOON, label="damaged")
    with pytest.raises(BadAgentMetadata):
        read.warm(bad)
    assert read.gauges().agents == 0


def test_metadata_of_another_agent_or_other_regions_are_refused_without_harm(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls)
    region = source.info.regions[0]
    more = dataclasses.replace(region, length=region.length + 4096)
    part = raw_part(source.info, [memory.all_of(source)])
    # Also while the agent to which the metadata belong is a peer.
    for _ in range(2):
        with pytest.raises(BadAgentMetadata):
            read.warm(dataclasses.replace(source.info, name="somebody-else"))
        wrong = dataclasses.replace(source.info, regions=(more,))
        transfer = read.start(
            [raw_part(wrong, [raw([source.base], [memory.base], [64])])], deadline=None, label="wrong"
        )
        assert transfer.wait(SOON)
        assert transfer.state is TransferState.FAILED
        assert isinstance(transfer.error, BadAgentMetadata), transfer.error
        assert transfer.quiet
        good = read.start([part], deadline=now() + SOON, label="good")
        assert good.wait(SOON)
        assert good.state is TransferState.DONE, good.error
    assert read.gauges().retired_agents == 0
    assert source.alive()


def test_a_source_cannot_spoil_another_ones_name(source: Source, memory: Memory, transport: MakeTransport) -> None:
    """NIXL takes the name from within the metadata. After some that were cut off it refuses those of that name for the
    life of the agent."""
    read = transport()
    spoilt = 0
    for size in range(len(source.info.metadata) // 2, len(source.info.metadata), 9):
        cut = source.info.metadata[:size]
        liar = dataclasses.replace(source.info, name="liar", metadata=cut, metadata_sha256=hashlib.sha256(cut).digest())
        try:
            transfer = read.start(
                [raw_part(liar, [raw([source.base], [memory.base], [64])])], deadline=None, label="liar"
            )
            assert transfer.wait(SOON)
        except BadAgentMetadata:
            spoilt += 1
    good = read.start([raw_part(source.info, [memory.all_of(source)])], deadline=now() + SOON, label="good")
    assert good.wait(SOON)
    assert good.state is TransferState.DONE, good.error
    assert spoilt
