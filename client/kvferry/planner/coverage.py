"""Whether one engine can read another's cache, and from which source ranks: each unit and token exactly once. If not,
every reason with both values (R8). And whether the ranks of one engine together hold all of their planes.

Rank numbers play no part: planes are matched by ``layer/component``, their fields are compared, and the parts that
ranks declare are divided among the readers (`kvferry.planner.line_rule`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from operator import attrgetter

from kvferry.errors import BadGeometry, Mismatch
from kvferry.geometry.model import EngineGeometry, GroupKind, RankGeometry
from kvferry.geometry.overlap import check_apart
from kvferry.geometry.plane import Interval, Plane, TokenShard
from kvferry.planner.line_rule import RankHolding, ReadShare, Stripe, effort, shares

MAX_CELLS = 1 << 20
"""Units times states of a block of one plane: these are enumerated to find its contiguous rows. 128 heads of 8,192
tokens fit; more would fill the memory of the process that plans."""

MAX_RANK_CELLS = 1 << 23
"""The same for all planes that one rank reads: five times 1,056 tokens of 8 heads in 96 layers, keys and values."""

MAX_RANK_PLACES = 1 << 18
"""Places of a block of all planes that one rank reads, where units or states are further apart than blocks: their
addresses are listed for the check of each request (`kvferry.planner.footprint`). 2**23 take 8 s and 600 MB."""

MAX_EFFORT = 1 << 21
"""Steps of dividing one rank's planes among source ranks: twice those of a thousand ranks that hold a unit each."""

MAX_LISTED = 32
"""Ranks, or intervals of units, that a message lists; it gives the number of the others."""

COMPARED = ("group", "format", "dtype", "state_bytes", "axis_size", "tokens_per_state", "token_granule", "units_divide")
"""Fields of a plane that must be equal on both sides, whatever the plane's shard and layout."""

_KINDS = {"group": "group", "format": "format", "token_granule": "granule"}
"""Kinds of mismatch by field; the others are of kind ``plane``."""


@dataclass(frozen=True, slots=True)
class PlaneRead:
    """The read of a plane from a source plane: `units`, on the global axis, of the `stripe` of the request's blocks."""

    source_rank: int
    source: Plane
    destination: Plane
    units: Interval
    stripe: Stripe


@dataclass(frozen=True, slots=True)
class Covering:
    """All reads of one destination rank, in the order of its planes, by source rank and unit, or the reasons why it has
    none. `uncovered` names the planes without a source that may stay uncovered."""

    reads: tuple[PlaneRead, ...]
    uncovered: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]


_signature = attrgetter(
    *(field for field in COMPARED if field != "tokens_per_state"),
    "tokens_per_state.numerator",
    "tokens_per_state.denominator",
    "block_states",
    "unit_stride",
    "token_stride",
    "token_shard.count",
    "token_shard.interleave",
    "units.begin",
    "units.end",
)
"""All fields of a plane that `_mismatches` compares, as strings and integers: fractions are slow to hash."""


@dataclass(frozen=True, eq=False)
class Holdings:
    """The parts of a tensor that an engine's ranks hold. One object for all names with equal holdings, compared by
    identity: comparing many ranks' holdings plane by plane takes longer than dividing them."""

    ranks: tuple[RankHolding, ...]

    @cached_property
    def in_words(self) -> str:
        """The ranks and their holdings, for people."""
        holders: dict[str, list[str]] = {}
        for holding in self.ranks:
            holders.setdefault(f"{holding.units} {holding.tokens}", []).append(str(holding.rank))
        parts = [
            f"{what} by rank{'s' if len(ranks) > 1 else ''} {' '.join(ranks[:MAX_LISTED])}"
            + (f" and {len(ranks) - MAX_LISTED} more" if len(ranks) > MAX_LISTED else "")
            for what, ranks in islice(holders.items(), MAX_LISTED)
        ]
        if len(holders) > MAX_LISTED:
            parts.append(f"and {len(holders) - MAX_LISTED} parts more")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """The planes of one name in one engine, by rank, and the ranks' holdings. `kinds` has one (rank, plane) for each
    signature; names with the same signatures have the same number `alike`."""

    planes: Mapping[int, Plane]
    kinds: tuple[tuple[int, Plane], ...]
    alike: int
    holdings: Holdings


class Indexed:
    """An engine with its planes by name; made once for any number of comparisons. Immutable."""

    def __init__(self, engine: EngineGeometry) -> None:
        self.engine = engine
        by_name: dict[str, dict[int, Plane]] = {}
        for rank, plane in engine.planes():
            by_name.setdefault(plane.name, {})[rank.rank] = plane
        self.named: dict[str, _Named] = {}
        numbers: dict[tuple[object, ...], int] = {}
        known: dict[tuple[object, ...], Holdings] = {}
        for name, planes in by_name.items():
            kinds: dict[object, tuple[int, Plane]] = {}
            for number, plane in planes.items():
                kinds.setdefault(_signature(plane), (number, plane))
            # Found by the identity of values that decoded planes share: their hash is slow.
            shared = tuple((number, id(plane.units), id(plane.token_shard)) for number, plane in planes.items())
            if shared not in known:
                ranks = tuple(RankHolding(number, plane.units, plane.token_shard) for number, plane in planes.items())
                known[shared] = known.setdefault(ranks, Holdings(ranks))
            alike = numbers.setdefault(tuple(kinds), len(numbers))
            self.named[name] = _Named(planes, tuple(kinds.values()), alike, known[shared])


class Coverer:
    """Covers the ranks of one destination engine by the planes of one source engine."""

    def __init__(self, source: Indexed, destination: EngineGeometry, *, striping: bool = True) -> None:
        """Take two whole engines; destination ranks that are not covered only affect the stripes. `striping`: spread
        reads over replicas; else the line rule chooses one replica for a reader's whole read."""
        self._striping = striping
        self._groups = destination.groups
        self._group_kinds = {group.name: group.kind for group in destination.groups}
        self._offered = source.named
        self._readers = Indexed(destination).named
        self._fine: set[tuple[int, object]] = set()
        self._shared: dict[tuple[object, ...], tuple[tuple[ReadShare, ...], tuple[Interval, ...]]] = {}
        self._effort = 0

    def cover(self, rank: RankGeometry) -> Covering:
        """Cover the planes of one destination rank; raises `BadGeometry` if two planes to be written share a byte."""
        reads: list[PlaneRead] = []
        uncovered: list[str] = []
        mismatches: list[Mismatch] = []
        self._effort = cells = places = 0
        for plane in rank.planes:
            offered = self._offered.get(plane.name)
            if offered is None:
                if plane.optional_cover:
                    uncovered.append(plane.name)
                else:
                    problem = "are held by no rank of the source, which has no such plane"
                    mismatches.append(_uncovered("uncovered", plane, (plane.units,), problem, ""))
                continue
            signature = offered.alike, _signature(plane)
            if signature not in self._fine:
                differing = list(_mismatches(offered.kinds, plane, self._group_kinds[plane.group]))
                if differing:
                    mismatches.extend(differing)
                    continue
                self._fine.add(signature)
            shared = self._shares(offered, rank.rank, plane)
            if shared is None:
                holders = len(offered.holdings.ranks)
                what = f"to share {plane.name} out among {holders} holders takes more than {MAX_EFFORT} steps"
                mismatches.append(_too_large(plane, what))
                break
            found, missing = shared
            if missing:
                held = offered.holdings.in_words
                kind, problem = "indivisible", f"cannot be cut out of this format; the source holds {held}"
                if plane.units_divide:
                    kind = "uncovered"
                    problem = f"({plane.token_shard}) are held by no rank of the source, which holds {held}"
                mismatches.append(_uncovered(kind, plane, missing, problem, held))
                continue
            made = [PlaneRead(of.rank, offered.planes[of.rank], plane, of.units, of.stripe) for of in found]
            cells += sum(len(read.units) * max(read.source.block_states, plane.block_states) for read in made)
            if cells > MAX_RANK_CELLS:
                what = f"up to {plane.name}, blocks have {cells} units times states, more than {MAX_RANK_CELLS}"
                mismatches.append(_too_large(plane, what))
                break
            # The stretches of bytes in which a block of a plane lies, on either side.
            places += sum(prod(count for _, count in side.apart) for read in made for side in (read.source, plane))
            if places > MAX_RANK_PLACES:
                what = f"up to {plane.name}, blocks are in {places} places, more than {MAX_RANK_PLACES}"
                mismatches.append(_too_large(plane, what))
                break
            reads.extend(made)
        left = set(uncovered)
        check_apart(self._groups, rank.rank, [plane for plane in rank.planes if plane.name not in left])
        return Covering(tuple(reads), tuple(uncovered), tuple(mismatches))

    def _shares(
        self, offered: _Named, rank: int, plane: Plane
    ) -> tuple[tuple[ReadShare, ...], tuple[Interval, ...]] | None:
        """See `shares`; None if the division takes too many steps."""
        held, wanted, divide = offered.holdings, self._readers[plane.name].holdings, plane.units_divide
        me = RankHolding(rank, plane.units, plane.token_shard)
        key = (held, wanted, me, divide)
        found = self._shared.get(key)
        if found is None:
            self._effort += effort(held.ranks, wanted.ranks, me, divide=divide)
            if self._effort > MAX_EFFORT:
                return None
            found = self._shared[key] = shares(held.ranks, wanted.ranks, me, divide=divide, striping=self._striping)
        return found


def diff(source: EngineGeometry, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """Every reason why the destination's ranks cannot read the source's cache; empty if they can.

    The destination may hold only the ranks that ask. Identity is compared key by key, groups by the fields that decide
    how block tables are read, planes by format, dtype and cut (`COMPARED`), and every unit and token must be
    held. Raises `BadGeometry` if a destination rank declares a byte in two planes that a read writes.
    """
    return diff_indexed(Indexed(source), destination)


def diff_indexed(source: Indexed, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """`diff` for a source that is compared with many destinations."""
    found = dict.fromkeys(engine_mismatches(source.engine, destination))
    coverer = Coverer(source, destination)
    for rank in destination.ranks:
        found |= dict.fromkeys(coverer.cover(rank).mismatches)
    return tuple(found)


def engine_mismatches(source: EngineGeometry, destination: EngineGeometry) -> Iterator[Mismatch]:
    """The part of `diff` for identity and groups, without the planes of single ranks."""
    for key in sorted({*source.identity, *destination.identity}):
        theirs, ours = (engine.identity.get(key) for engine in (source, destination))
        if theirs != ours:
            shown = ["missing" if value is None else repr(value) for value in (theirs, ours)]
            message = f"identity {key!r} is {shown[0]} at the source, {shown[1]} at the destination"
            yield Mismatch("identity", "identity", key, theirs or "", ours or "", message)
    offered = {group.name: group for group in source.groups}
    for group in destination.groups:
        other = offered.get(group.name)
        if other is None:
            planes = [plane for _, plane in destination.planes() if plane.group == group.name]
            if planes and not all(plane.optional_cover for plane in planes):
                message = f"group {group.name!r} does not exist at the source, which has {sorted(offered)}"
                yield Mismatch("group", group.name, "name", "", group.name, message)
            continue
        if group.kind is not other.kind:
            yield _differs(group.name, "kind", other.kind.name, group.kind.name)
        elif group.kind is GroupKind.WINDOW and group.window_tokens != other.window_tokens:
            yield _differs(group.name, "window_tokens", str(other.window_tokens), str(group.window_tokens))


def _differs(group: str, field: str, theirs: str, ours: str) -> Mismatch:
    message = f"group {group!r}: {field} is {theirs} at the source, {ours} at the destination"
    return Mismatch("group", group, field, theirs, ours, message)


def _too_large(plane: Plane, message: str) -> Mismatch:
    return Mismatch("too_large", plane.name, "block_states", "", str(plane.block_states), message)


def _mismatches(offered: Iterable[tuple[int, Plane]], wanted: Plane, kind: GroupKind) -> Iterator[Mismatch]:
    """Every compared field in which a source plane differs from the destination's, once per pair of values, or every
    other reason why the plane cannot be read."""
    fields = [*COMPARED]
    if kind is GroupKind.STATE:
        fields.append("block_states")
    if not wanted.units_divide:
        # The order within pages that move whole is not declared, so their strides have to be equal.
        fields += ["unit_stride"] if len(wanted.units) > 1 else []
        fields += ["token_stride"] if wanted.token_granule > 1 else []
    seen: set[tuple[str, str]] = set()
    alike: list[Plane] = []
    for rank, plane in offered:
        differing = [name for name in fields if getattr(plane, name) != getattr(wanted, name)]
        alike += [] if differing else [plane]
        for name in differing:
            theirs, ours = str(getattr(plane, name)), str(getattr(wanted, name))
            if (name, theirs) not in seen:
                seen.add((name, theirs))
                message = f"{wanted.name}: {name} is {theirs} at the source (rank {rank}), {ours} at the destination"
                if name == "token_granule":
                    message += "; pages of this format cannot be cut to fit"
                yield Mismatch(_KINDS.get(name, "plane"), wanted.name, name, theirs, ours, message)
    if not seen:
        yield from dict.fromkeys(mismatch for plane in alike for mismatch in _uncuttable(plane, wanted))


def _uncuttable(source: Plane, wanted: Plane) -> Iterator[Mismatch]:
    """The reasons why planes of equal fields cannot be cut to fit: their blocks are too large to be enumerated, or
    their token shards differ and cut through a granule or a state."""
    for plane in (wanted, source):
        cells = plane.block_states * len(plane.units)
        if cells > MAX_CELLS:
            message = f"{plane.name}: a block has {cells} units times states, more than {MAX_CELLS}"
            yield _too_large(plane, message)
    mine, theirs = wanted.token_shard, source.token_shard
    if (mine.count, mine.interleave) == (theirs.count, theirs.interleave):
        return
    granule_tokens = wanted.token_granule * wanted.tokens_per_state
    if any(shard.interleave % granule_tokens for shard in (mine, theirs) if shard.count > 1):
        held = f"the source holds {theirs}, the destination {mine}"
        message = f"{wanted.name}: {held}, but {granule_tokens} tokens are one piece"
        yield Mismatch("granule", wanted.name, "token_shard", str(theirs), str(mine), message)


def _some(intervals: Sequence[Interval]) -> str:
    """The first intervals, for people."""
    more = f" and {len(intervals) - MAX_LISTED} more" if len(intervals) > MAX_LISTED else ""
    return ", ".join(str(interval) for interval in intervals[:MAX_LISTED]) + more


def _uncovered(kind: str, plane: Plane, missing: tuple[Interval, ...], problem: str, held: str) -> Mismatch:
    message = f"{plane.name}: units {_some(missing)} {problem}"
    return Mismatch(kind, plane.name, "units", held, str(plane.units), message)


def check_complete(engine: Indexed) -> None:
    """Raise `BadGeometry` if no rank holds some units or tokens of a plane, unless the engine is declared partial.

    Planes that no rank has are not missed: an engine may hold some layers only. `engine` has all its ranks.

    Two ranks that by mistake declare the same heads are replicas to a reader. As a source they lack heads, which a
    reader finds; as a destination each gets the heads that it declares, and one of the two gets wrong heads.
    """
    if engine.engine.partial:
        return
    known: dict[tuple[Holdings, int], tuple[Interval, ...]] = {}
    lacking: list[tuple[str, int, tuple[Interval, ...]]] = []
    for name, named in engine.named.items():
        size = max(plane.axis_size for _, plane in named.kinds)
        key = named.holdings, size
        if key not in known:
            known[key] = _lacking(named.holdings.ranks, size)
        if known[key]:
            lacking.append((name, size, known[key]))
    if not lacking:
        return
    name, size, missing = lacking[0]
    alike = f" (and {len(lacking) - 1} more planes)" if len(lacking) > 1 else ""
    raise BadGeometry(
        f"engine {engine.engine.engine_id!r}, plane {name}{alike}",
        f"units {_some(missing)} of {size} are held by no rank for all tokens; held are "
        f"{engine.named[name].holdings.in_words}. Does each rank declare its own heads? An engine that holds a "
        "part of the model only says partial=True",
    )


def _lacking(held: tuple[RankHolding, ...], size: int) -> tuple[Interval, ...]:
    """The units of ``[0, size)`` whose tokens are not all held, by one rank or by ranks that split the tokens alike."""
    changes: dict[int, list[tuple[TokenShard, int]]] = {size: []}
    for one in held:
        changes.setdefault(one.units.begin, []).append((one.tokens, 1))
        changes.setdefault(one.units.end, []).append((one.tokens, -1))
    # For the units from `reached` on: the ranks that hold each shard, the shards held of each split, and the number of
    # splits held whole.
    holders: Counter[TokenShard] = Counter()
    shards: Counter[tuple[int, int]] = Counter()
    reached = whole = 0
    missing: list[Interval] = []
    for unit in sorted(changes):
        if not whole and reached < unit:
            begin = missing.pop().begin if missing and missing[-1].end == reached else reached
            missing.append(Interval(begin, unit))
        for shard, change in changes[unit]:
            holders[shard] += change
            if holders[shard] == (change > 0):
                split = shard.count, shard.interleave
                whole -= shards[split] == shard.count
                shards[split] += change
                whole += shards[split] == shard.count
        reached = unit
    return tuple(missing)
