"""Whatever two engines look like: a descriptor moved to another block is found by the last check (R7)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InvalidField
from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind, Plane
from kvferry.planner import ReadPlan, expansion, plan_read
from kvferry.planner.descriptors import Descriptors, PreparedDescriptors, RawDescriptors
from tests.plan.simulation import address, copies
from tests.plan.strategies import World, worlds

PROFILE = settings.get_profile("plan")
TRIES = 6
"""Descriptors of a list that are moved, on each side."""


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
            patch.setattr(expansion, "PREPARED_MIN_COUNT", 1)
        for rank in world.readers:
            plan = plan_read(source, destination, rank, striping=world.striping)
            found(plan, source, world, Random(seed))
