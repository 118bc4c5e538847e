"""The read plan: what one destination rank reads, from whom, and how a request becomes descriptors.

Pure: a function of (whole source engine, whole destination engine, rank) and nothing else. Made once per source
    incarnation;
`expand` then turns the block ids of a request into descriptors with vectorised numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.blocks import Blocks
from kvferry.covering import PlaneRead, cover, planes_by_name
from kvferry.errors import Incompatible, InvalidField
from kvferry.expand import Expansion, LaneTables, expand, prepare_tables
from kvferry.geometry import EngineGeometry, Group, RankGeometry
from kvferry.lanes import Lane, build_lanes


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """What one destination rank reads.

    Attributes:
        source, destination: the two engines.
        rank: the destination rank.
        reads: one per plane and source; ordered as the destination's planes.
        uncovered: names of optional planes that the source does not hold.
        lanes: the same reads, gathered for expansion.
        tables: rows that NIXL prepares once per peer.
    """

    source: EngineGeometry
    destination: EngineGeometry
    rank: RankGeometry
    reads: tuple[PlaneRead, ...]
    uncovered: tuple[str, ...]
    lanes: tuple[Lane, ...]
    tables: LaneTables

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """Ranks that this rank reads from, rising."""
        return tuple(sorted({lane.source_rank for lane in self.lanes}))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The destination's groups that this rank reads into."""
        names = {lane.group.name for lane in self.lanes}
        return tuple(group for group in self.destination.groups if group.name in names)

    def expand(
        self,
        source: Mapping[str, Blocks],
        destination: Mapping[str, Blocks],
        tokens: tuple[int, int] | None = None,
    ) -> Expansion:
        """The descriptors of one request.

        Args:
            source: the blocks that the source granted, by group.
            destination: the local blocks, by group; `Blocks.first_token` is the first token that they want.
            tokens: the tokens asked, ``[a, b)``; None: what the source granted, from each group's first wanted token
                on.

        Raises:
            BadBlock: an id out of range, the null block, or a destination block given twice.
            BlocksShort: one side's blocks do not hold the asked tokens.
            InvalidField: groups that this engine does not have, or a start inside what may not be cut.
        """
        known = {group.name for group in self.destination.groups}
        for name in destination:
            if name not in known:
                raise InvalidField("group", name, f"one of {sorted(known)}")
        return expand(self.lanes, self.tables, self.groups, self.source, source, destination, tokens)


def plan_read(source: EngineGeometry, destination: EngineGeometry, rank: int, *, striping: bool = True) -> ReadPlan:
    """Plan the reads of one destination rank.

    Args:
        source: the whole source engine.
        destination: the whole destination engine; its other ranks decide the stripes only.
        rank: the destination rank.
        striping: spread reads over replicas.

    Raises:
        Incompatible: the rank's planes cannot be covered; every reason is named.
        InvalidField: the destination has no such rank.
    """
    mine = next((found for found in destination.ranks if found.rank == rank), None)
    if mine is None:
        raise InvalidField("rank", rank, f"one of {[found.rank for found in destination.ranks]}")
    groups = {group.name: group for group in destination.groups}
    covering = cover(planes_by_name(source), planes_by_name(destination), mine, groups, striping=striping)
    if covering.mismatches:
        raise Incompatible(covering.mismatches)
    lanes = build_lanes(covering.reads, {group.name: group for group in source.groups}, groups)
    return ReadPlan(
        source=source,
        destination=destination,
        rank=mine,
        reads=covering.reads,
        uncovered=covering.uncovered,
        lanes=lanes,
        tables=prepare_tables(lanes),
    )
