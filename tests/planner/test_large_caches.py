"""No address wraps in caches above 4 GiB, with any numpy, and the last check finds one that did (R7)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.errors import InvalidField
from kvferry.geometry import Blocks, Interval, Plane
from kvferry.planner import Path
from kvferry.planner.descriptors import Descriptors
from tests.support.large_caches import BLOCKS, TOKENS, cells, expanded, plane, planned

BASE, OWN_BASE = 1 << 36, 1 << 40
GIB_4 = 1 << 32


def some(seed: int, count: int, most: int) -> list[int]:
    """Block ids on both sides of every 2 GiB."""
    return sorted(int(block) for block in np.random.default_rng(seed).permutation(most)[:count])[::-1]


WHOLE = plane(BASE), plane(OWN_BASE)
HEAD = Interval(1, 3)
PACKED = plane(BASE, packed=True)
WORLDS = {
    "raw rows": (*WHOLE, some(1, 40, BLOCKS), some(2, 40, BLOCKS), 40 * TOKENS, Path.DIRECT),
    "raw head slices": (
        plane(BASE),
        plane(OWN_BASE, heads=HEAD),
        some(3, 40, BLOCKS),
        some(4, 40, BLOCKS),
        630,
        Path.DIRECT,
    ),
    "rows and runs": (*WHOLE, some(5, 300, BLOCKS), some(6, 300, BLOCKS), 300 * TOKENS, Path.DIRECT),
    "staged": (
        plane(BASE, heads_first=False),
        plane(OWN_BASE),
        some(7, 40, BLOCKS),
        some(8, 40, BLOCKS),
        40 * TOKENS,
        Path.STAGED,
    ),
    "runs": (
        PACKED,
        plane(OWN_BASE, packed=True),
        [*range(10 << 18, (10 << 18) + 32), *range(9 << 18, (9 << 18) + 32)],
        [*range(11 << 18, (11 << 18) + 64)],
        64 * TOKENS,
        Path.DIRECT,
    ),
    "runs of other block sizes": (
        plane(BASE, packed=True, heads_first=False),
        plane(OWN_BASE, packed=True, heads_first=False, tokens=2 * TOKENS),
        [*range(10 << 18, (10 << 18) + 64)],
        [*range(5 << 18, (5 << 18) + 32)],
        64 * TOKENS,
        Path.DIRECT,
    ),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_addresses_equal_those_of_pythons_integers(
    world: tuple[Plane, Plane, list[int], list[int], int, Path],
) -> None:
    source, destination, theirs, mine, tokens, path = world
    plan = planned(source, destination, path)
    expansion = plan.expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}, (0, tokens))
    assert expanded(expansion) == cells(source, destination, theirs, mine, tokens)
    (read,) = expansion.sources
    assert bool(read.staged) == (path is Path.STAGED)
    assert read.footprint is not None
    for descriptors in read.descriptors:
        read.footprint.check(descriptors)


@pytest.mark.parametrize("side", ["source", "destination", "both"])
@pytest.mark.parametrize("gib", [-8, -4, 4, 8])
@pytest.mark.parametrize("name", ["raw rows", "raw head slices", "runs", "runs of other block sizes"])
def test_an_address_off_by_a_multiple_of_4_gib_is_found(name: str, gib: int, side: str) -> None:
    source, destination, theirs, mine, tokens, path = WORLDS[name]
    expansion = planned(source, destination, path).expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}, (0, tokens))
    (read,) = expansion.sources
    (raw,) = read.descriptors
    single = raw.one_by_one()
    assert read.footprint is not None
    refused = 0
    for at in range(raw.count):
        bad = single.source.copy(), single.destination.copy()
        inside = True
        for column, of in ((bad[0], source), (bad[1], destination)):
            if side in ("both", "source" if of is source else "destination"):
                moved = int(column[at]) + (gib << 30)
                inside &= of.extent[0] <= moved and moved + int(single.length[at]) <= of.extent[1]
                column[at] = moved
        if inside:
            # The regions' check finds nothing: the address lies inside a region.
            with pytest.raises(InvalidField, match="the request's blocks"):
                read.footprint.check(Descriptors(raw.memory, *bad, single.length))
            refused += 1
    assert refused > 0


def test_a_wrapped_address_of_another_block_of_the_same_request_is_found() -> None:
    # 256 blocks are 4 GiB: an address off by that is in a block of the request, on both sides.
    ids = [0, 256, 512, 768]
    expansion = planned(*WHOLE).expand({"full": Blocks(ids)}, {"full": Blocks(ids)})
    (read,) = expansion.sources
    (raw,) = read.descriptors
    single = raw.one_by_one()
    assert read.footprint is not None
    wrapped = (single.source - np.uint64(BASE)) % np.uint64(GIB_4) + np.uint64(BASE)
    assert not np.array_equal(wrapped, single.source)
    with pytest.raises(InvalidField, match="the blocks of the same tokens"):
        read.footprint.check(Descriptors(raw.memory, wrapped, single.destination, single.length))


def test_a_run_in_another_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.planner.expansion.OWN_LIST", 1)
    source, destination, theirs, mine, tokens, path = WORLDS["rows and runs"]
    expansion = planned(source, destination, path).expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}, (0, tokens))
    (read,) = expansion.sources
    (whole,) = read.descriptors
    assert not whole.plain
    assert read.footprint is not None
    read.footprint.check(whole)
    other = next(block for block in range(BLOCKS) if block not in theirs)
    bad = whole.source_offset.copy()
    bad[17] = other * source.block_stride
    with pytest.raises(InvalidField, match="the request's blocks"):
        read.footprint.check(replace(whole, source_offset=bad))


def test_rows_for_staging_memory_off_by_4_gib_are_found() -> None:
    source, destination, theirs, mine, tokens, path = WORLDS["staged"]
    expansion = planned(source, destination, path).expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}, (0, tokens))
    (read,) = expansion.sources
    assert read.footprint is not None
    (staged,) = read.staged
    for batch in staged.batches(1 << 20):
        raw = batch.descriptors(0, staged.lane.memory)
        read.footprint.check_source(raw)
        with pytest.raises(InvalidField, match="the request's blocks"):
            read.footprint.check_source(replace(raw, source=raw.source ^ np.uint64(GIB_4)))
