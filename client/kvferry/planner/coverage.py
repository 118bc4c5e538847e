"""Whether, and from which source ranks, a destination rank can read its planes: each unit and token exactly once.

Rank numbers play no part: planes are matched by ``layer/component``, their fields are compared, and the parts that
ranks declare are divided among the readers (`kvferry.planner.line_rule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter

from kvferry.errors import Mismatch
from kvferry.geometry.model import EngineGeometry, GroupKind, RankGeometry
from kvferry.geometry.overlap import check_apart
from kvferry.geometry.plane import Interval, Plane
from kvferry.planner.line_rule import RankHolding, ReadShare, Stripe, effort, shares

MAX_CELLS = 1 << 20
"""Units times states of a block of one plane: these are enumerated to find its contiguous rows. 128 heads of 8,192
tokens fit; more would fill the memory of the process that plans."""

MAX_RANK_CELLS = 1 << 23
"""The same for all planes that one rank reads: five times 1,056 tokens of 8 heads in 96 layers, keys and values."""

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
        planes: dict[str, dict[int, Plane]] = {}
        for rank, plane in engine.planes():
            planes.setdefault(plane.name, {})[rank.rank] = plane
        numbers: dict[tuple[object, ...], int] = {}
        known: dict[tuple[object, ...], Holdings] = {}
        self.named = {name: _named(of, numbers, known) for name, of in planes.items()}


def _named(
    planes: Mapping[int, Plane], numbers: dict[tuple[object, ...], int], known: dict[tuple[object, ...], Holdings]
) -> _Named:
    kinds: dict[object, tuple[int, Plane]] = {}
    for rank, plane in planes.items():
        kinds.setdefault(_signature(plane), (rank, plane))
    # Found by the identity of values that decoded planes share: their hash is slow.
    shared = tuple((rank, id(plane.units), id(plane.token_shard)) for rank, plane in planes.items())
    if shared not in known:
        ranks = tuple(RankHolding(rank, plane.units, plane.token_shard) for rank, plane in planes.items())
        known[shared] = known.setdefault(ranks, Holdings(ranks))
    number = numbers.setdefault(tuple(kinds), len(numbers))
    return _Named(planes, tuple(kinds.values()), number, known[shared])


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
        self._effort = cells = 0
        for plane in rank.planes:
            offered = self._offered.get(plane.name)
            if offered is None:
                if plane.optional_cover:
                    uncovered.append(plane.name)
                else:
                    problem = "are held by no rank of the source, which has no such plane"
                    mismatches.append(_uncovered("uncovered", plane, (plane.units,), problem, ""))
                continue
            differing = self._differing(offered, plane)
            if differing:
                mismatches.extend(differing)
                continue
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
            reads.extend(made)
        left = set(uncovered)
        check_apart(self._groups, rank.rank, (plane for plane in rank.planes if plane.name not in left))
        return Covering(tuple(reads), tuple(uncovered), tuple(mismatches))

    def _differing(self, offered: _Named, plane: Plane) -> list[Mismatch]:
        key = (offered.alike, _signature(plane))
        if key in self._fine:
            return []
        found = list(_mismatches(offered.kinds, plane, self._group_kinds[plane.group]))
        if not found:
            self._fine.add(key)
        return found

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
                yield _field_mismatch(wanted, name, rank, theirs, ours)
    if not seen:
        found: dict[Mismatch, None] = {}
        for plane in alike:
            for of in (wanted, plane):
                cells = of.block_states * len(of.units)
                if cells > MAX_CELLS:
                    message = f"{of.name}: a block has {cells} units times states, more than {MAX_CELLS}"
                    found[_too_large(of, message)] = None
            found |= dict.fromkeys(_shard_mismatch(plane, wanted))
        yield from found


def _field_mismatch(wanted: Plane, name: str, rank: int, theirs: str, ours: str) -> Mismatch:
    message = f"{wanted.name}: {name} is {theirs} at the source (rank {rank}), {ours} at the destination"
    if name == "token_granule":
        message += "; pages of this format cannot be cut to fit"
    return Mismatch(_KINDS.get(name, "plane"), wanted.name, name, theirs, ours, message)


def _shard_mismatch(source: Plane, wanted: Plane) -> list[Mismatch]:
    """The mismatch if token shards differ and cut through a granule or a state; else empty."""
    mine, theirs = wanted.token_shard, source.token_shard
    if (mine.count, mine.interleave) == (theirs.count, theirs.interleave):
        return []
    granule_tokens = wanted.token_granule * wanted.tokens_per_state
    turns = [shard.interleave for shard in (mine, theirs) if shard.count > 1]
    if all(turn % granule_tokens == 0 for turn in turns):
        return []
    held = f"the source holds {theirs}, the destination {mine}"
    message = f"{wanted.name}: {held}, but {granule_tokens} tokens are one piece"
    return [Mismatch("granule", wanted.name, "token_shard", str(theirs), str(mine), message)]


def some(intervals: Sequence[Interval]) -> str:
    """The first intervals, for people."""
    more = f" and {len(intervals) - MAX_LISTED} more" if len(intervals) > MAX_LISTED else ""
    return ", ".join(str(interval) for interval in intervals[:MAX_LISTED]) + more


def _uncovered(kind: str, plane: Plane, missing: tuple[Interval, ...], problem: str, held: str) -> Mismatch:
    message = f"{plane.name}: units {some(missing)} {problem}"
    return Mismatch(kind, plane.name, "units", held, str(plane.units), message)
