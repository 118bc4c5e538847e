"""Descriptors and metadata that would harm a process are refused before NIXL sees them (R7); nothing is posted."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib

import numpy as np
import pytest

from kvferry._clock import now
from kvferry._transport.bounds import RegionMap, check_agent, check_descriptors
from kvferry._transport.nixl_agent import AgentInfo, NixlOptions, ReadingAgent
from kvferry._transport.transport import TransferState
from kvferry.errors import BadAgentMetadata, InvalidField
from kvferry.geometry import MemoryKind, MemoryRegion
from kvferry.planner.descriptors import Descriptors, DescriptorTable, MemoryPair, PreparedDescriptors, RawDescriptors
from tests.transport.conftest import MakeTransport
from tests.transport.sources import DRAM, SOON, Memory, Source, raw, raw_part, table

KIB = 1024
# Two regions that touch, and one apart, on each side.
HERE = RegionMap("here", [MemoryRegion(MemoryKind.DRAM, 0, base * KIB, 64 * KIB) for base in (64, 128, 1024)])
THERE = RegionMap("there", [MemoryRegion(MemoryKind.DRAM, 0, base * KIB, 64 * KIB) for base in (2048, 2112, 4096)])
SOURCE, DESTINATION = 2048 * KIB, 64 * KIB
WRAPS = (1 << 64) - 4096


def one(source: int, destination: int, length: int, memory: MemoryPair = DRAM) -> RawDescriptors:
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
    "other device": one(SOURCE, DESTINATION, 1, dataclasses.replace(DRAM, source_device=1)),
    "other memory": one(SOURCE, DESTINATION, 1, dataclasses.replace(DRAM, destination_kind=MemoryKind.VRAM)),
    "lengths of another type": RawDescriptors(
        DRAM,
        np.array([SOURCE], np.uint64),
        np.array([DESTINATION], np.uint64),
        np.ones(1, np.int64),
    ),
    "unequal lists": RawDescriptors(DRAM, *(np.ones(n, np.uint64) for n in (2, 1, 2))),
    "signed addresses": RawDescriptors(DRAM, *(np.ones(1, np.int64) for _ in range(3))),  # type: ignore[arg-type]
    "two dimensions": RawDescriptors(DRAM, *(np.ones((1, 1), np.uint64) for _ in range(3))),
}

GOOD_ROW = (SOURCE, 1024, 64), (DESTINATION, 1024, 64)


def prepared(rows: DescriptorTable, source: list[int], destination: list[int]) -> PreparedDescriptors:
    return PreparedDescriptors(rows, np.array(source, np.int32), np.array(destination, np.int32))


def rows_of(source: tuple[int, int, int], destination: tuple[int, int, int]) -> PreparedDescriptors:
    return prepared(table(KIB, [GOOD_ROW[0], source], [GOOD_ROW[1], destination]), [0], [0])


def rows_with(column: int, value: int) -> PreparedDescriptors:
    """Two rows that are right but for one value in the second."""
    both = table(KIB, [GOOD_ROW[0]] * 2, [GOOD_ROW[1]] * 2)
    both.source[1, column] = value
    return prepared(both, [0], [0])


GOOD = table(KIB, [GOOD_ROW[0]], [GOOD_ROW[1]])
BAD_PREPARED = {
    "row past the end": rows_of((SOURCE, 1024, 65), GOOD_ROW[1]),
    "row below its region": rows_of((SOURCE - 1024, 1024, 1), GOOD_ROW[1]),
    "stride that leaves the region": rows_of((SOURCE, 1025, 64), GOOD_ROW[1]),
    "stride that wraps": rows_of((SOURCE + 4096, WRAPS, 2), GOOD_ROW[1]),
    "stride times count that wraps": rows_of((SOURCE, 1 << 34, 1 << 30), GOOD_ROW[1]),
    "no stride": rows_of((SOURCE, 0, 2), GOOD_ROW[1]),
    "no entries": rows_of((SOURCE, 1024, 0), GOOD_ROW[1]),
    "more entries than int32 counts": rows_of((SOURCE, 1, 1 << 31), GOOD_ROW[1]),
    "destination row past the end": rows_of(GOOD_ROW[0], (1024 * KIB, 1024, 65)),
    "negative index": prepared(GOOD, [0, -1], [0, 1]),
    "index past the table": prepared(GOOD, [0, 64], [0, 1]),
    "destination index past the table": prepared(GOOD, [0, 1], [0, 64]),
    "unequal indices": prepared(GOOD, [0, 1], [0]),
    "64-bit destination indices": PreparedDescriptors(GOOD, np.zeros(1, np.int32), np.zeros(1, np.int64)),
    "64-bit indices": PreparedDescriptors(GOOD, np.zeros(1, np.int64), np.zeros(1, np.int64)),
    "float indices": PreparedDescriptors(GOOD, np.zeros(1), np.zeros(1)),  # type: ignore[arg-type]
    "entries of no bytes": prepared(dataclasses.replace(GOOD, entry_bytes=0), [0], [0]),
    "entries of another length": prepared(dataclasses.replace(GOOD, entry_bytes=512), [0], [0]),
    "another device in the rows": prepared(
        dataclasses.replace(GOOD, memory=dataclasses.replace(DRAM, source_device=3)), [0], [0]
    ),
    "rows of another shape": prepared(dataclasses.replace(GOOD, source=np.ones((1, 3), np.uint64)), [0], [0]),
    "rows of more columns": prepared(dataclasses.replace(GOOD, source=np.hstack((GOOD.source, GOOD.source))), [0], [0]),
    "rows of one dimension": prepared(dataclasses.replace(GOOD, source=GOOD.source[0]), [0], [0]),
    "rows of three dimensions": prepared(dataclasses.replace(GOOD, source=GOOD.source[:, :, None]), [0], [0]),
    "signed rows": prepared(
        dataclasses.replace(GOOD, source=GOOD.source.astype(np.int64)),
        [0],
        [0],
    ),
    "one row of another length": rows_with(1, 512),
    "one row of another device": rows_with(2, 3),
    "no rows": prepared(dataclasses.replace(GOOD, source=np.ones((0, 5), np.uint64)), [0], [0]),
}


@pytest.mark.parametrize("bad", [*BAD_RAW.values(), *BAD_PREPARED.values()], ids=[*BAD_RAW, *BAD_PREPARED])
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
        prepared(GOOD, [63, 0], [0, 63]),
        prepared(GOOD, [], []),
        rows_of((SOURCE, 1, 63 * KIB + 1), (DESTINATION + 63 * KIB, 1, 1)),
        # One entry needs no stride.
        rows_of((SOURCE, 0, 1), (DESTINATION, 0, 1)),
        prepared(table(1, [(SOURCE, 1, 64 * KIB)], [(DESTINATION, 1, 64 * KIB)]), [0], [64 * KIB - 1]),
    ],
)
def test_good_descriptors_pass(good: Descriptors) -> None:
    check_descriptors(good, HERE, THERE)


def test_a_range_inside_the_larger_of_two_nested_regions_passes() -> None:
    nested = RegionMap("x", [MemoryRegion(MemoryKind.DRAM, 0, 0, 4096), MemoryRegion(MemoryKind.DRAM, 0, 1024, 16)])
    nested.check_ranges("x", MemoryKind.DRAM, 0, np.array([2000], np.uint64), np.array([2000], np.uint64))


SPACE = (1 << 63) - 1
"""Bytes of a region, more than any honest agent announces."""


@pytest.mark.parametrize(
    ("counts", "good"),
    [
        ([1 << 30, (1 << 30) - 1], True),
        ([1 << 30, 1 << 30], False),
        # Their sum is 1 in 64 bits.
        ([*[1 << 62] * 4, 1], False),
    ],
)
def test_table_entries_are_counted_in_32_bits(counts: list[int], good: bool) -> None:
    everywhere = RegionMap("everywhere", [MemoryRegion(MemoryKind.DRAM, 0, 0, SPACE)])
    rows = table(1, [(0, 1, count) for count in counts], [(0, 1, count) for count in counts])
    with contextlib.nullcontext() if good else pytest.raises(InvalidField, match="count"):
        check_descriptors(prepared(rows, [0], [0]), everywhere, everywhere)


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
    wrapping = table(64, [(source.base + 4096, WRAPS, 2)], [(memory.base, 64, 2)])
    for bad in (
        raw([source.base], [memory.base], [WRAPS]),
        raw([source.base - 64], [memory.base], [64]),
        PreparedDescriptors(wrapping, np.zeros(1, np.int32), np.zeros(1, np.int32)),
    ):
        with pytest.raises(InvalidField):
            agent.make(source.name, bad)
    agent.remove_peer(source.name)
    assert agent.destroy()
    assert memory.untouched()
    assert source.alive()


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
