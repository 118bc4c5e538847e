"""The last check, which divides addresses back into blocks: whatever two engines look like, it refuses a descriptor of
another block (R7), and lets pass what the planner makes, descriptors that run on from plane to plane included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import Blocks, expand
from kvferry.descriptors import Descriptors, MemoryPair, PreparedDescriptors, RawDescriptors
from kvferry.errors import InvalidField
from kvferry.expand import SourceDescriptors
from kvferry.footprint import Footprint
from kvferry.geometry import EngineGeometry, Group, GroupKind, MemoryKind, Plane
from kvferry.paths import Path, PathRule
from kvferry.plan import ReadPlan, plan_read
from tests.plan.simulation import address, copies, move
from tests.plan.small import LAYOUTS, PAIRS, Bytes, one_group
from tests.plan.strategies import World, worlds
from tests.plan.worlds import Layout, engine, tensors

PROFILE = settings.get_profile("plan")
TRIES = 6
"""Descriptors of a list that are moved, on each side."""

MODEL = tensors(layers=3, axis=2)
RUNNING_ON = {
    "planes apart": Layout("BPUT"),
    "units outermost": Layout("UPBT"),
    "units outermost, components side by side": Layout("UPBT", level=1),
    "blocks first": Layout("BPUT", level=1),
}


@pytest.mark.parametrize("read_into", RUNNING_ON)
@pytest.mark.parametrize("read_from", RUNNING_ON)
@pytest.mark.parametrize("blocks", [range(12), range(1), range(11, 12), range(2, 12)])
def test_what_runs_on_from_plane_to_plane_is_read(read_from: str, read_into: str, blocks: range) -> None:
    source = engine("p", MODEL, layout=RUNNING_ON[read_from])
    destination = engine("d", MODEL, layout=RUNNING_ON[read_into])
    plan = plan_read(source.geometry(), destination.geometry(), 0)
    length = 16 * len(blocks)
    theirs = {"full": Blocks(list(blocks), end_token=length)}
    assert move([plan], source, destination, theirs, {"full": Blocks(list(blocks))}, length)


def test_the_part_of_a_descriptor_behind_a_plane_is_checked_too() -> None:
    """From the last block of a plane on into the first of the next, of which the request has only the last."""
    geometry = engine("p", MODEL).geometry(), engine("d", MODEL).geometry()
    plan = plan_read(*geometry, 0)
    expansion = plan.expand({"full": Blocks([11], end_token=16)}, {"full": Blocks([11])}, None)
    (read,) = expansion.sources
    assert read.footprint is not None
    for raw in read.descriptors:
        assert isinstance(raw, RawDescriptors)
        read.footprint.check(raw)
        longer = RawDescriptors(raw.memory, raw.source, raw.destination, raw.length + np.uint64(1))
        with pytest.raises(InvalidField):
            read.footprint.check(longer)


# --- small worlds, byte by byte ---------------------------------------------------------------------------------------

DRAM = MemoryPair(MemoryKind.DRAM, 0, MemoryKind.DRAM, 0)
WRONG = 150
"""Wrong descriptors of a world that are tried."""


def small(name: str) -> Iterator[tuple[Bytes, Bytes, SourceDescriptors]]:
    """A small world read directly: by source rank, whose bytes are which."""
    source, destination, theirs, mine = PAIRS[name]
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT))
    for read in plan.expand(theirs, mine).sources:
        yield Bytes(source, read.source_rank, theirs), Bytes(destination, 0, mine), read


def footprint_of(read: SourceDescriptors) -> Footprint:
    assert read.footprint is not None
    return read.footprint


def raw_of(pieces: Iterable[tuple[int, int, int]], memory: MemoryPair = DRAM) -> RawDescriptors:
    return RawDescriptors(memory, *np.array(list(pieces), np.uint64).reshape(-1, 3).T)


def refuses(read: SourceDescriptors, pieces: Iterable[tuple[int, int, int]]) -> None:
    """Each of the pieces is refused, for itself."""
    for piece in pieces:
        with pytest.raises(InvalidField, match="of the request's blocks"):
            footprint_of(read).check(raw_of([piece]))


@pytest.mark.parametrize("name", PAIRS)
def test_a_byte_goes_only_to_a_block_of_the_same_tokens(name: str) -> None:
    turns = Random(name)
    for theirs, mine, read in small(name):
        source, destination = theirs.own, mine.own
        pairs = {(there, here) for there in source for here in turns.sample(destination, 6)}
        pairs |= {(there, here) for here in destination for there in turns.sample(source, 6)}
        right = [pair for pair in sorted(pairs) if theirs.tokens(pair[0]) & mine.tokens(pair[1])]
        footprint_of(read).check(raw_of((there, here, 1) for there, here in right))
        wrong = sorted(pairs - set(right))
        wrong = turns.sample(wrong, min(len(wrong), WRONG))
        # Of other blocks, and of none.
        wrong += [(there, turns.choice(destination)) for there in theirs.others]
        wrong += [(turns.choice(source), here) for here in mine.others]
        refuses(read, ((there, here, 1) for there, here in wrong))


@pytest.mark.parametrize("name", PAIRS)
def test_no_stretch_touches_another_block(name: str) -> None:
    turns = Random(name)
    for theirs, mine, read in small(name):
        source, destination = theirs.own, mine.own
        found = []
        for _ in range(4000):
            there, here = turns.choice(source), turns.choice(destination)
            ends = turns.choice((source, destination))
            length = turns.choice(ends) - (there if ends is source else here) + 1
            if length > 0 and (theirs.strange(there, length) or mine.strange(here, length)):
                found.append((there, here, length))
        # The only block there is is the request's.
        assert found or name == "one block"
        refuses(read, found[:WRONG])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", [[0], [5], [1, 4], [2, 3]], ids=str)
def test_between_two_blocks_of_the_request_lies_no_other(layout: str, ids: list[int]) -> None:
    """From every byte to every byte, where both engines lay out their memory alike."""
    source, destination = one_group("p", layout), one_group("d", layout)
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT))
    (read,) = plan.expand({"full": Blocks(ids)}, {"full": Blocks(ids)}).sources
    theirs = Bytes(source, 0, {"full": Blocks(ids)})
    own = theirs.own
    pieces = [(begin, begin, end - begin + 1) for begin in own[::2] for end in own if end > begin]
    touching = [piece for piece in pieces if theirs.strange(piece[0], piece[2])]
    refuses(read, Random(layout).sample(touching, min(len(touching), WRONG)))


# --- random worlds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One rank's memory: which blocks of which groups begin and end where, and what a request has of them."""

    planes: tuple[Plane, ...]
    groups: Mapping[str, Group]
    blocks: Mapping[str, Blocks]
    starts: Mapping[int, set[tuple[str, int]]]
    ends: Mapping[int, set[tuple[str, int]]]

    @classmethod
    def of(cls, planes: tuple[Plane, ...], groups: Iterable[Group], blocks: Mapping[str, Blocks]) -> Side:
        starts: dict[int, set[tuple[str, int]]] = defaultdict(set)
        ends: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for plane in planes:
            for block_id in range(plane.num_blocks):
                for unit in range(plane.units.begin, plane.units.end):
                    for x in range(plane.block_states):
                        where = address(plane, block_id, unit, x)
                        starts[where].add((plane.group, block_id))
                        ends[where + plane.state_bytes].add((plane.group, block_id))
        return cls(planes, {group.name: group for group in groups}, blocks, starts, ends)

    def known(self, where: int, length: int) -> bool:
        """Whether these bytes begin with a state and end with one; other places within a block are not looked at."""
        return where in self.starts and where + length in self.ends

    def places(self, group: str, where: int, length: int) -> list[int] | None:
        """Where the blocks of these bytes stand in the request; None if one is not its own, or there is none."""
        first = {block for name, block in self.starts.get(where, ()) if name == group}
        last = {block for name, block in self.ends.get(where + length, ()) if name == group}
        if not first or not last:
            return None
        ids = self.blocks[group].ids.tolist()
        wanted = range(min(first), max(last) + 1)
        return [ids.index(block) for block in wanted] if wanted and set(wanted) <= set(ids) else None

    def tokens(self, group: str, place: int) -> range:
        """The tokens of a block of the request."""
        size = self.groups[group].block_tokens
        begin = (self.blocks[group].first_token // size + place) * size
        return range(begin, begin + size)


def may_be_right(theirs: Side, mine: Side, source: int, destination: int, length: int) -> bool:
    """Whether both are blocks of the request that hold the same tokens, in some group."""
    for name, group in mine.groups.items():
        there, here = theirs.places(name, source, length), mine.places(name, destination, length)
        if there is None or here is None or any(np.diff(there) != 1) or any(np.diff(here) != 1):
            continue
        pairs = (there[0], here[0]), (there[-1], here[-1])
        if group.kind is GroupKind.STATE or all(
            set(theirs.tokens(name, place)) & set(mine.tokens(name, own)) for place, own in pairs
        ):
            return True
    return False


def moved(descriptors: Descriptors, theirs: Side, mine: Side, turns: Random) -> Iterator[tuple[Descriptors, int]]:
    """The same descriptors with one moved to another block, and which."""
    for at in turns.sample(range(descriptors.count), min(TRIES, descriptors.count)):
        for column, side in (("source", theirs), ("destination", mine)):
            values = getattr(descriptors, column).copy()
            if isinstance(descriptors, RawDescriptors):
                where = int(values[at])
                plane = turns.choice(
                    [plane for plane in side.planes if plane.extent[0] <= where < plane.extent[1]] or side.planes
                )
                values[at] = where + turns.randint(-plane.num_blocks, plane.num_blocks) * plane.block_stride
            else:
                assert isinstance(descriptors, PreparedDescriptors)
                values[at] = turns.randrange(int(getattr(descriptors.table, column)[:, 4].sum()))
            yield replace(descriptors, **{column: values}), at


def found(plan: ReadPlan, source: EngineGeometry, world: World, turns: Random) -> int:
    """How many wrong descriptors are refused; all are."""
    refused = 0
    groups = {group.name for group in plan.groups}
    mine = Side.of(
        plan.rank.planes,
        plan.groups,
        {name: blocks for name, blocks in world.destination_blocks.items() if name in groups},
    )
    for read in plan.expand(world.source_blocks, mine.blocks, world.tokens).sources:
        rank = next(rank for rank in source.ranks if rank.rank == read.source_rank)
        theirs = Side.of(rank.planes, source.groups, world.source_blocks)
        assert read.footprint is not None
        for descriptors in read.descriptors:
            read.footprint.check(descriptors)
            assert all(may_be_right(theirs, mine, *one) for one in copies(descriptors))
            for bad, at in moved(descriptors, theirs, mine, turns):
                there, here, length = copies(bad)[at]
                if not theirs.known(there, length) or not mine.known(here, length):
                    continue
                if not may_be_right(theirs, mine, there, here, length):
                    with pytest.raises(InvalidField, match="the request's blocks"):
                        read.footprint.check(bad)
                    refused += 1
    return refused


@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE, max_examples=PROFILE.max_examples // 4)
@given(world=worlds(), prepared=st.booleans(), seed=st.integers(0, 99))
def test_a_descriptor_of_another_block_is_found(world: World, prepared: bool, seed: int) -> None:
    source, destination = world.source.geometry(), world.destination.geometry()
    with pytest.MonkeyPatch.context() as patch:
        if prepared:
            patch.setattr(expand, "PREPARED_MIN_COUNT", 1)
        for rank in world.readers:
            plan = plan_read(source, destination, rank, striping=world.striping)
            found(plan, source, world, Random(seed))
