"""The read plan: one destination rank's reads, their sources, and how a request becomes descriptors.

Pure: a function of (whole source engine, whole destination engine, rank) only. A plan is made once per source
incarnation; `ReadPlan.expand` then turns the block ids of each request into descriptors with vectorised numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

from kvferry._arguments import token_range
from kvferry.errors import Incompatible, InvalidField, Mismatch
from kvferry.geometry.blocks import Blocks, Unfinished, joined
from kvferry.geometry.model import EngineGeometry, Group, GroupKind, RankGeometry
from kvferry.geometry.plane import Plane
from kvferry.planner.coverage import Coverer, Indexed, PlaneRead, engine_mismatches
from kvferry.planner.expansion import Expansion, expand, together
from kvferry.planner.lane import Lane, build_lanes
from kvferry.planner.path_choice import RECURRING_LIMIT, Path, PathChoice, PathRule, choose_path
from kvferry.planner.request_blocks import GroupRequest, check_groups, needed, written

MAX_SIZE = 1 << 14
"""Lanes of a plan and pieces of their periods, together: twice those of the same reads from each of 4,096 ranks."""

READS_KEPT = 1 << 16
"""The most reads that all kept parts for some layers (`ReadPlan.of_layers`) have together. There are as many parts as
steps of a chunk, or as layers that are read one after the other; more only where a reader is late, or where a source
never names the same layers twice."""


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The reads of the destination rank `rank`.

    Attributes:
        reads: one per plane and source, in the order of the destination's planes.
        uncovered: names of optional planes that the source does not hold.
        lanes: the same reads, gathered for expansion.
        paths: the path of each lane's bytes, chosen by `rule`.
        rule: how paths are chosen.
    """

    source: EngineGeometry
    destination: EngineGeometry
    rank: RankGeometry
    reads: tuple[PlaneRead, ...]
    uncovered: tuple[str, ...]
    lanes: tuple[Lane, ...]
    paths: tuple[PathChoice, ...]
    rule: PathRule
    _of_layers: dict[frozenset[str], ReadPlan] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def staged(self) -> frozenset[Lane]:
        """The lanes that go through staging memory."""
        chosen = zip(self.lanes, self.paths, strict=True)
        return frozenset(lane for lane, choice in chosen if choice.path is Path.STAGED)

    def choose_paths(self, rule: PathRule) -> ReadPlan:
        """The same plan with its paths chosen by another rule."""
        return replace(self, paths=tuple(choose_path(lane, rule) for lane in self.lanes), rule=rule)

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """Ranks that this rank reads from, rising."""
        return tuple(sorted({lane.source_rank for lane in self.lanes}))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The destination's groups into which this rank reads."""
        names = {lane.group.name for lane in self.lanes}
        return tuple(group for group in self.destination.groups if group.name in names)

    def only(self, wanted: Callable[[Plane], bool]) -> ReadPlan:
        """The part of the plan that reads the destination planes for which `wanted` is true: some layers, say. A rank
        that reads its layers in several parts gets each byte once."""
        kept = {id(read): read for read in self.reads if wanted(read.destination)}
        parts = (replace(lane, reads=tuple(read for read in lane.reads if id(read) in kept)) for lane in self.lanes)
        lanes = tuple(part for part in parts if part.reads)
        return replace(self, reads=tuple(kept.values()), lanes=lanes).choose_paths(self.rule)

    @cached_property
    def layers(self) -> frozenset[str]:
        return frozenset(read.destination.layer for read in self.reads)

    def of_layers(self, layers: Collection[str]) -> ReadPlan:
        """The part of the plan that reads these layers. The latest parts are kept."""
        wanted = frozenset(layers)
        if wanted == self.layers:
            return self
        part = self._of_layers.get(wanted)
        if part is None:
            part = self.only(lambda plane: plane.layer in wanted)
            if sum(1 + len(kept.reads) for kept in self._of_layers.values()) + len(part.reads) >= READS_KEPT:
                self._of_layers.clear()
            self._of_layers[wanted] = part
        return part

    @cached_property
    def groups_by_name(self) -> tuple[Mapping[str, Group], Mapping[str, Group]]:
        """The groups of the source, and the groups of the destination."""
        return _by_name(self.source), _by_name(self.destination)

    def cut_below(self, group: str, token: int) -> int:
        """The last token up to `token` at which a read of the group may end and another begin, so that both read the
        bytes of one undivided read: whole granules of both sides, in all lanes."""
        while True:
            lower = min((lane.cut_below(token) for lane in self._unlike_lanes.get(group, ())), default=token)
            if lower == token:
                return token
            token = lower

    @cached_property
    def _unlike_lanes(self) -> Mapping[str, Sequence[Lane]]:
        """Lanes by group; only one of those that are cut alike."""
        found: dict[str, dict[object, Lane]] = {}
        for lane in self.lanes:
            cut = lane.line.same_tokens, lane.source.shard, lane.granule, lane.tokens_per_state
            found.setdefault(lane.group.name, {}).setdefault(cut, lane)
        return {name: tuple(lanes.values()) for name, lanes in found.items()}

    def expand(
        self, source: Mapping[str, Blocks], destination: Mapping[str, Blocks], tokens: tuple[int, int] | None = None
    ) -> Expansion:
        """The descriptors of one request.

        Args:
            source: the blocks that the source granted, by group.
            destination: the local blocks, by group; `Blocks.first_token` is the first token that they want.
            tokens: the tokens asked, ``[a, b)``; None: the tokens that the source granted, from each group's first
                wanted token on. State groups are read whole, whatever the tokens.

        Raises:
            BadBlock: an id is out of range, is the null block where a token is needed, or is given twice for the
                destination.
            BlocksShort: one side's blocks do not hold the asked tokens, or states stand at different tokens.
            InvalidField: a group is not of this engine, the start lies inside tokens that may not be cut apart, or the
                read has too many descriptors.
        """
        return self.in_parts(destination, tokens).next(source, last=True)

    def in_parts(self, destination: Mapping[str, Blocks], tokens: tuple[int, int] | None = None) -> RequestParts:
        """A request that is read while its source publishes it; see `expand`."""
        return RequestParts(self, destination, tokens)


def plan_read(
    source: EngineGeometry,
    destination: EngineGeometry,
    rank: int,
    *,
    striping: bool = True,
    rule: PathRule | None = None,
) -> ReadPlan:
    """Plan the reads of one destination rank.

    Args:
        source: the whole source engine.
        destination: the whole destination engine; its other ranks only affect the stripes.
        rank: the destination rank.
        striping: spread reads over replicas.
        rule: how the path of each lane is chosen; None: the defaults, see `PathRule`.

    Raises:
        Incompatible: the rank cannot read this engine's cache; names every reason.
        BadGeometry: the rank declares a byte in two planes that the read would write.
        InvalidField: the destination has no such rank.
    """
    mine = next((found for found in destination.ranks if found.rank == rank), None)
    if mine is None:
        raise InvalidField("rank", rank, f"one of {[found.rank for found in destination.ranks]}")
    covering = Coverer(Indexed(source), destination, striping=striping).cover(mine)
    mismatches = (*engine_mismatches(source, destination), *covering.mismatches)
    if mismatches:
        raise Incompatible(mismatches)
    lanes = build_lanes(covering.reads, _by_name(source), _by_name(destination))
    # More parts would take seconds to plan.
    size = sum(1 + min(lane.line.pieces_per_period, RECURRING_LIMIT) for lane in lanes)
    if size > MAX_SIZE:
        message = f"the read falls into {len(lanes)} parts, which with their pieces count {size}, more than {MAX_SIZE}"
        raise Incompatible((Mismatch("too_large", "", "", "", "", message),))
    rule = rule or PathRule()
    paths = tuple(choose_path(lane, rule) for lane in lanes)
    return ReadPlan(source, destination, mine, covering.reads, covering.uncovered, lanes, paths, rule)


def _by_name(engine: EngineGeometry) -> dict[str, Group]:
    return {group.name: group for group in engine.groups}


_Moved: TypeAlias = frozenset[tuple[str, int]]
"""Each group of which something was read, and the first token of its next part."""


class RequestParts:
    """One request of one destination rank, read in parts. With each step that its source publishes, the next part reads
    the bytes that can be read now and could not before. All parts together read the bytes of one read of the whole
    request, each byte once. Not thread-safe.

    A part of a group ends at the last token that the source has published so far and at which both sides' granules may
    be cut (`ReadPlan.cut_below`); inside a block of the destination, if need be. The last step reads windows, states
    and the rest of all groups. A request that is published at once has one part.

    Where the layers of some blocks are completed one after the other, a part has the layers that are complete. These
    layers are then ahead of the others, until all are complete. Replicas share each part among them, not the whole
    request, so that every part is read from all replicas.
    """

    def __init__(self, plan: ReadPlan, destination: Mapping[str, Blocks], tokens: tuple[int, int] | None) -> None:
        """`tokens` as in `ReadPlan.expand`; if they are None, the source publishes in one step. Raises `InvalidField`
        for a group that is not of this engine."""
        check_groups(plan.destination.groups, destination)
        self._plan = plan
        self._destination = destination
        self._tokens = token_range(tokens)
        self._begin, self._end = self._tokens or (0, 0)
        self.granted: dict[str, Blocks] = {}
        """The blocks that the source has published so far, by group."""
        self._moved: dict[_Moved, frozenset[str]] = {frozenset(): plan.layers}
        """How far the layers were read, and which layers that far."""
        self._checked = False

    def next(self, steps: Mapping[str, Blocks], unfinished: Unfinished | None = None, *, last: bool) -> Expansion:
        """The reads that are possible now and were not before. `steps` are the blocks that the source has published
        since the last call, by group, and `unfinished` those after them of which only some layers are complete now;
        with `last`, the source publishes no more. Raises the errors of `ReadPlan.expand`, and `InvalidField` if the
        last step has not come and no tokens were asked."""
        self.granted = joined((self.granted, steps))
        if last:
            return together(self._read(self._plan.layers, self._rest))
        if self._tokens is None:
            raise InvalidField("tokens", None, "the tokens to read, since the publication is not complete")
        if not self._checked:
            # What no single part can check: that no block is in two parts; and what the last step would find after all
            # bytes have moved: that all groups have blocks.
            groups = self._plan.groups
            mine = {group.name: self._destination[group.name] for group in groups if group.name in self._destination}
            written(groups, self.granted, mine, self._tokens, more=True)
            self._checked = True
        parts = self._read(self._plan.layers, partial(self._so_far, self.granted))
        if unfinished is not None:
            begun = {runs.group: runs.blocks() for runs in unfinished.groups}
            growing = [group.name for group in self._plan.groups if _grows(group, begun.get(group.name))]
            more = {name: begun[name] for name in growing}
            theirs = joined(({name: self.granted[name] for name in more if name in self.granted}, more))
            parts += self._read(self._plan.layers.intersection(unfinished.layers), partial(self._so_far, theirs))
        return together(parts)

    def _read(
        self, layers: frozenset[str], wanted: Callable[[Mapping[str, int]], dict[str, GroupRequest]]
    ) -> list[Expansion]:
        """Expand what is wanted of these layers. `wanted` gets the first token of the next part, by group."""
        found: list[Expansion] = []
        moved: dict[_Moved, frozenset[str]] = {}
        for before, every in self._moved.items():
            chosen = every & layers
            of = wanted(dict(before)) if chosen else {}
            if of:
                part = self._plan.of_layers(chosen)
                found.append(expand(part.lanes, part.staged, of))
            after = frozenset((dict(before) | {name: one.end for name, one in of.items()}).items())
            for key, some in ((after, chosen), (before, every - chosen)):
                if some:
                    moved[key] = moved.get(key, frozenset()) | some
        self._moved = moved
        return found

    def _rest(self, moved: Mapping[str, int]) -> dict[str, GroupRequest]:
        """All that was not read yet, of all groups."""
        whole = [group for group in self._plan.groups if group.name not in moved]
        wanted = self._needed(whole, self.granted, self._tokens)
        for name, begin in moved.items():
            wanted |= self._needed([self._plan.destination.group(name)], self.granted, (begin, self._end))
        return wanted

    def _so_far(self, granted: Mapping[str, Blocks], moved: Mapping[str, int]) -> dict[str, GroupRequest]:
        """The tokens that can be read before the last step."""
        wanted: dict[str, GroupRequest] = {}
        for group in self._plan.groups:
            theirs = granted.get(group.name)
            if theirs is None or not _grows(group, theirs):
                continue
            begin = moved.get(group.name, self._begin)
            end = self._plan.cut_below(group.name, min(theirs.end_token or 0, self._end))
            if begin < end:
                wanted |= self._needed([group], granted, (begin, end))
        return wanted

    def _needed(
        self, groups: Sequence[Group], granted: Mapping[str, Blocks], tokens: tuple[int, int] | None
    ) -> dict[str, GroupRequest]:
        return needed(groups, self._plan.groups_by_name[0], granted, self._destination, tokens)


def _grows(group: Group, blocks: Blocks | None) -> bool:
    """Whether blocks can be read before the last step. Blocks that the source rewrites while it computes are read at
    the end, even if the home announces them before."""
    return blocks is not None and blocks.end_token is not None and group.kind is GroupKind.TOKENS
