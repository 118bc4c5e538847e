"""No address wraps in caches above 4 GiB, with any numpy, and the last check finds one that did (R7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import InvalidField
from kvferry.geometry import Blocks, Interval, Plane
from kvferry.planner import Path
from kvferry.planner.descriptors import Descriptors
from tests.support.checked_lists import checked_lists
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


OFFSETS = ("source_offset", "destination_offset")


@pytest.mark.parametrize("sides", [OFFSETS[:1], OFFSETS[1:], OFFSETS], ids=str)
@pytest.mark.parametrize("gib", [-8, -4, 4, 8])
@pytest.mark.parametrize("name", [name for name in WORLDS if name != "staged"])
def test_an_address_off_by_a_multiple_of_4_gib_is_found(name: str, gib: int, sides: tuple[str, ...]) -> None:
    source, destination, theirs, mine, tokens, path = WORLDS[name]
    plan = planned(source, destination, path)
    for checked in checked_lists(lambda: plan.expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}, (0, tokens))):
        assert not checked.refuses(checked.made)
        for at in range(len(checked.made.repeats)):
            offsets = {side: getattr(checked.made, side).copy() for side in sides}
            for values in offsets.values():
                values[at] = (int(values[at]) + (gib << 30)) % 2**64
            # By chance, both may be the blocks of other tokens of the request.
            places = [
                ids.index(block) if (block := int(values[at]) // window.stride) in ids else -1
                for values, window, ids in zip(
                    offsets.values(), (checked.theirs, checked.mine), (theirs, mine), strict=False
                )
            ]
            if len(places) == 1 or places[0] != places[1] or places[0] < 0:
                assert checked.refuses(replace(checked.made, **offsets))


def test_a_wrapped_address_of_another_block_of_the_same_request_is_found() -> None:
    # 256 blocks are 4 GiB: an address off by that is in a block of the request, on both sides.
    ids = {"full": Blocks([0, 256, 512, 768])}
    (checked,) = checked_lists(lambda: planned(*WHOLE).expand(ids, ids))
    wrapped = checked.made.source_offset % np.uint64(GIB_4)
    assert not np.array_equal(wrapped, checked.made.source_offset)
    assert checked.refuses(replace(checked.made, source_offset=wrapped))


def test_a_plan_refuses_its_own_wrong_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ids times strides wrapped."""

    def wrapped(*columns: Any, **more: Any) -> Descriptors:
        made = Descriptors(*columns, **more)
        return replace(made, source_offset=made.source_offset % np.uint64(GIB_4))

    monkeypatch.setattr("kvferry.planner.expansion.Descriptors", wrapped)
    for name, (source, destination, theirs, mine, tokens, path) in WORLDS.items():
        if name != "staged":
            with pytest.raises(InvalidField, match="the blocks of the same tokens"):
                planned(source, destination, path).expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}, (0, tokens))


def test_rows_for_staging_memory_off_by_4_gib_are_found() -> None:
    source, destination, theirs, mine, tokens, path = WORLDS["staged"]
    plan = planned(source, destination, path)
    (lane,) = plan.lanes
    (extent,) = lane.extents
    for moved in (GIB_4, -GIB_4, extent.length):
        lane.__dict__["extents"] = (replace(extent, source=extent.source + moved),)
        with pytest.raises(InvalidField, match="the request's blocks"):
            plan.expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}, (0, tokens))
