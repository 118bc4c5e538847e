"""Reads between two engines in this process, as their plans say."""

from __future__ import annotations

import ctypes

from kvferry import Blocks, EngineGeometry, plan_read
from kvferry._memory.access import HostAccess
from kvferry.planner import Path, PathRule
from kvferry.planner.descriptors import Descriptors
from tests.support.simulated_memories import copies


def move(
    source: EngineGeometry,
    destination: EngineGeometry,
    theirs: Blocks,
    mine: Blocks,
    tokens: tuple[int, int],
    path: Path,
) -> None:
    """Every descriptor of every rank's plan as a plain copy; staging memory as it is."""
    space = HostAccess().allocate(1 << 22)
    for rank in destination.ranks:
        plan = plan_read(source, destination, rank.rank, rule=PathRule(path))
        for part in plan.expand({"full": theirs}, {"full": mine}, tokens).sources:
            for descriptors in part.descriptors:
                copy(descriptors)
            for read in part.staged:
                for batch in read.batches(space.region.length):
                    copy(batch.descriptors(space.region.base, read.lane.memory))
                    space.memory.copy(batch.copies(space.region.base))


def copy(descriptors: Descriptors) -> None:
    """Copy descriptors as NIXL does."""
    for from_address, to_address, length in copies(descriptors):
        ctypes.memmove(to_address, from_address, length)
