"""Who reads what from whom: each unit and token of a destination plane is covered by source planes, exactly once.

Nothing here is derived from rank arithmetic. A destination plane's units are cut at every boundary that any rank of
either engine declares; each elementary interval has one set of holders (replicas) and one set of readers, and the line
rule (DESIGN §5) spreads the readers' blocks over the replicas:

    the K·n blocks that K readers want of a request of n blocks lie on one line, reader after reader, and replica j
    of R serves [j·K·n // R, (j+1)·K·n // R).

So each replica serves at most ceil(K·n/R) blocks, each reader uses at most ceil(R/K)+1 replicas, and stripes are
contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kvferry.errors import Mismatch
from kvferry.geometry import EngineGeometry, Group, GroupKind, Interval, Plane, RankGeometry, TokenShard


@dataclass(frozen=True, slots=True)
class Stripe:
    """The share ``[begin, end)`` of ``of`` equal parts of a request's blocks; (0, 1, 1) is all of them."""

    begin: int = 0
    end: int = 1
    of: int = 1

    @property
    def whole(self) -> bool:
        """Whether it is all blocks."""
        return self.begin == 0 and self.end == self.of

    def blocks(self, count: int) -> tuple[int, int]:
        """The half-open range of blocks this stripe takes of `count`."""
        return self.begin * count // self.of, self.end * count // self.of


@dataclass(frozen=True, slots=True)
class PlaneRead:
    """What one destination plane reads from one source plane.

    Attributes:
        source_rank: rank read from.
        source, destination: the two planes.
        units: units read, on the global axis; within both planes.
        stripe: the share of the request's blocks.
    """

    source_rank: int
    source: Plane
    destination: Plane
    units: Interval
    stripe: Stripe


@dataclass(frozen=True, slots=True)
class Covering:
    """All reads of one destination rank, or why there are none.

    Attributes:
        reads: in the order of the destination's planes, by source rank and unit.
        uncovered: names of planes without a source that may stay so.
        mismatches: empty if the rank can be covered.
    """

    reads: tuple[PlaneRead, ...]
    uncovered: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]


@dataclass(frozen=True, slots=True)
class _Holding:
    """What a rank holds of a plane's name, for the part of covering that many layers have in common."""

    rank: int
    units: Interval
    tokens: TokenShard


PlanesByName = Mapping[str, list[tuple[int, Plane]]]


def planes_by_name(engine: EngineGeometry) -> dict[str, list[tuple[int, Plane]]]:
    """(rank, plane) of every plane, by ``layer/component`` and rising rank."""
    found: dict[str, list[tuple[int, Plane]]] = {}
    for rank, plane in engine.planes():
        found.setdefault(plane.name, []).append((rank.rank, plane))
    return found


def cover(
    sources: PlanesByName,
    readers: PlanesByName,
    rank: RankGeometry,
    groups: Mapping[str, Group],
    *,
    striping: bool = True,
) -> Covering:
    """Cover the planes of one destination rank.

    Args:
        sources: the source engine's planes.
        readers: the whole destination engine's planes; its other ranks decide the stripes only.
        rank: the destination rank.
        groups: the destination's groups, by name.
        striping: spread reads over replicas; else the line rule chooses one replica for a reader's whole read.
    """
    reads: list[PlaneRead] = []
    uncovered: list[str] = []
    mismatches: list[Mismatch] = []
    for plane in rank.planes:
        offered = sources.get(plane.name, [])
        if not offered:
            if plane.optional_cover:
                uncovered.append(plane.name)
            else:
                units = f"units {plane.units}"
                message = f"{plane.name}: {units} are held by no rank of the source, which has no such plane"
                mismatches.append(Mismatch("uncovered", plane.name, "units", "", str(plane.units), message))
            continue
        differing = _too_many_cells(plane) or _field_mismatches(offered, plane, groups[plane.group].kind)
        if differing:
            mismatches.extend(differing)
            continue
        planes = dict(offered)
        held = tuple(_Holding(r, p.units, p.token_shard) for r, p in offered)
        wanted = tuple(_Holding(r, p.units, p.token_shard) for r, p in readers.get(plane.name, []) if r != rank.rank)
        me = _Holding(rank.rank, plane.units, plane.token_shard)
        shares, missing = _share(held, wanted, me, plane.units_divide, striping)
        if missing:
            mismatches.append(_uncovered(plane, missing, offered))
            continue
        reads.extend(PlaneRead(source, planes[source], plane, units, stripe) for source, units, stripe in shares)
    return Covering(tuple(reads), tuple(uncovered), tuple(mismatches))


MAX_CELLS = 1 << 20
"""Units times states of a block of one plane: what is enumerated to find its contiguous rows. 128 heads of 8,192 tokens
fit; whoever declares more would fill our memory."""

COMPARED = ("group", "format", "dtype", "state_bytes", "axis_size", "tokens_per_state", "token_granule", "units_divide")
"""Fields of a plane that must be equal on both sides, whatever its shard and layout."""

_KINDS = {"group": "group", "format": "format", "token_granule": "granule"}
"""Kinds of mismatch by field; the others are of kind ``plane``."""


def _too_many_cells(plane: Plane) -> list[Mismatch]:
    cells = plane.block_states * len(plane.units)
    if cells <= MAX_CELLS:
        return []
    message = f"{plane.name}: a block has {cells} units times states, more than {MAX_CELLS}"
    return [Mismatch("too_large", plane.name, "block_states", "", str(plane.block_states), message)]


def _field_mismatches(offered: list[tuple[int, Plane]], wanted: Plane, kind: GroupKind) -> list[Mismatch]:
    """Every compared field in which a source plane differs from the destination's, once per pair of values."""
    fields = [*COMPARED]
    if kind is GroupKind.STATE:
        fields.append("block_states")
    if not wanted.units_divide:
        # What is moved whole has an order of its own, so the same strides must hold within it.
        fields += ["unit_stride"] if len(wanted.units) > 1 else []
        fields += ["token_stride"] if wanted.token_granule > 1 else []
    found: dict[tuple[str, str], Mismatch] = {}
    for rank, plane in offered:
        for name in fields:
            theirs, ours = getattr(plane, name), getattr(wanted, name)
            if theirs == ours or (name, str(theirs)) in found:
                continue
            message = f"{wanted.name}: {name} is {theirs} at the source (rank {rank}), {ours} at the destination"
            if name == "token_granule":
                message += "; pages of this format cannot be cut to fit"
            kind_of = _KINDS.get(name, "plane")
            found[name, str(theirs)] = Mismatch(kind_of, wanted.name, name, str(theirs), str(ours), message)
        for mismatch in () if found else (*_too_many_cells(plane), *_shard_mismatch(plane, wanted)):
            found[mismatch.field, mismatch.source] = mismatch
    return list(found.values())


def _shard_mismatch(source: Plane, wanted: Plane) -> list[Mismatch]:
    """Token shards that differ must not cut through a granule or a state."""
    mine, theirs = wanted.token_shard, source.token_shard
    same = (mine.count, mine.interleave) == (theirs.count, theirs.interleave)
    granule_tokens = wanted.token_granule * wanted.tokens_per_state
    turns = [shard.interleave for shard in (mine, theirs) if shard.count > 1]
    if same or all(turn % granule_tokens == 0 for turn in turns):
        return []
    message = (
        f"{wanted.name}: the source holds {theirs}, the destination {mine}, but {granule_tokens} tokens are one piece"
    )
    return [Mismatch("granule", wanted.name, "token_shard", str(theirs), str(mine), message)]


_Share = tuple[int, Interval, Stripe]


@lru_cache(maxsize=4096)
def _share(
    held: tuple[_Holding, ...], others: tuple[_Holding, ...], me: _Holding, divide: bool, striping: bool
) -> tuple[tuple[_Share, ...], tuple[Interval, ...]]:
    """Shares (source rank, units, stripe) of one reader, and the units that nobody can give."""
    shares: list[_Share] = []
    missing: list[Interval] = []
    for units in _elementary(held, others, me) if divide else [me.units]:
        holders = [h for h in held if (h.units.intersect(units) is not None if divide else h.units == units)]
        readers = [me, *(o for o in others if o.units.intersect(units) is not None)]
        # Readers of one token shard share its replicas, whatever else they need.
        needs = {tokens: _token_shards(holders, tokens) for tokens in {reader.tokens for reader in readers}}
        if not needs[me.tokens]:
            missing.append(units)
        for shard in needs[me.tokens]:
            replicas = sorted(holder.rank for holder in holders if holder.tokens == shard)
            line = sorted(reader.rank for reader in readers if shard in needs[reader.tokens])
            stripes = _stripes(replicas, line.index(me.rank), len(line), striping)
            shares.extend((rank, units, stripe) for rank, stripe in stripes)
    return tuple(_joined(shares)), tuple(missing)


def _elementary(held: tuple[_Holding, ...], others: tuple[_Holding, ...], me: _Holding) -> list[Interval]:
    """My units, cut at every boundary that any holder or reader declares."""
    cuts = {me.units.begin, me.units.end}
    for holding in (*held, *others):
        cuts |= {edge for edge in (holding.units.begin, holding.units.end) if me.units.begin < edge < me.units.end}
    edges = sorted(cuts)
    return [Interval(begin, end) for begin, end in pairwise(edges)]


def _token_shards(holders: list[_Holding], wanted: TokenShard) -> tuple[TokenShard, ...]:
    """The holders' shards that together hold the wanted tokens, each once; empty if there are none.

    Shards of one (count, interleave) are disjoint. Of several complete families the reader's own is taken, which needs
    no recutting, else the one with the fewest shards.
    """
    own = (wanted.count, wanted.interleave)
    families = {(holder.tokens.count, holder.tokens.interleave) for holder in holders}
    offered = {holder.tokens for holder in holders}
    for count, interleave in sorted(families, key=lambda family: (family != own, family)):
        found = []
        for index in range(count):
            shard = TokenShard(index, count, interleave)
            if _meet(shard, wanted):
                if shard not in offered:
                    break
                found.append(shard)
        else:
            return tuple(found)
    return ()


def _meet(a: TokenShard, b: TokenShard) -> bool:
    """Whether two token shards have a token in common.

    Each is an interval modulo its period; they meet when two of their members are equal modulo the gcd of the periods.
    """
    common = math.gcd(a.count * a.interleave, b.count * b.interleave)
    apart = a.index * a.interleave - b.index * b.interleave
    lowest, highest = apart - (b.interleave - 1), apart + (a.interleave - 1)
    return highest // common * common >= lowest


def _stripes(replicas: list[int], place: int, readers: int, striping: bool) -> list[tuple[int, Stripe]]:
    """The line rule: the stripes of the reader at `place` of `readers`, by replica."""
    total = len(replicas)
    if not striping or total == 1:
        return [(replicas[place * total // readers], Stripe())]
    found = []
    for index, rank in enumerate(replicas):
        begin = min(max(index * readers - place * total, 0), total)
        end = min(max((index + 1) * readers - place * total, 0), total)
        if begin < end:
            found.append((rank, Stripe() if (begin, end) == (0, total) else Stripe(begin, end, total)))
    return found


def _joined(shares: list[_Share]) -> list[_Share]:
    """Neighbouring units with the same source and stripe become one share."""
    joined: list[_Share] = []
    for rank, units, stripe in sorted(
        shares, key=lambda s: (s[0], s[2].begin / s[2].of, s[2].end / s[2].of, s[1].begin)
    ):
        if joined and joined[-1][0] == rank and joined[-1][2] == stripe and joined[-1][1].end == units.begin:
            joined[-1] = (rank, Interval(joined[-1][1].begin, units.end), stripe)
        else:
            joined.append((rank, units, stripe))
    return joined


def _uncovered(plane: Plane, missing: tuple[Interval, ...], offered: list[tuple[int, Plane]]) -> Mismatch:
    lacking = ", ".join(str(interval) for interval in missing)
    held = ", ".join(f"{p.units} {p.token_shard} by rank {rank}" for rank, p in offered)
    if plane.units_divide:
        message = (
            f"{plane.name}: units {lacking} ({plane.token_shard}) are held by no rank of the source, which holds {held}"
        )
        return Mismatch("uncovered", plane.name, "units", held, str(plane.units), message)
    message = f"{plane.name}: units {lacking} cannot be cut out of this format; the source holds {held}"
    return Mismatch("indivisible", plane.name, "units", held, str(plane.units), message)
