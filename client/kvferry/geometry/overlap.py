"""Whether planes share bytes, so that a read into both would write those bytes twice.

A plane is a box: it has an address for every choice of block, page, unit and state, each step a stride. Boxes are first
separated all at once: those whose extents are apart; then, within one period of the largest stride, those whose parts
of a period are apart; and so on for each smaller stride. That separates layers, keys and values that interleave in one
storage, thousands of them. For the few boxes that it does not separate, "is there a byte in both" is an equation in
bounded integers, which is solved by an exact search.

The search is bounded, so that no geometry of a peer can keep a server busy. What it cannot decide in time (strides
without a common divisor, which no engine has) passes: a layout that may be right is never refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from kvferry.errors import BadGeometry
from kvferry.geometry.model import Group, RankGeometry
from kvferry.geometry.plane import Plane

MOST_STEPS = 200_000
"""Boxes compared, and places tried, for all planes of a rank: some tenths of a second."""


@dataclass(frozen=True, slots=True)
class _Box:
    """The bytes of a plane, or of the part of it in one period.

    Attributes:
        plane: whose bytes.
        pool: planes of different groups of one pool may share bytes.
        first: address of its first byte.
        cell: contiguous bytes at every address.
        axes: (stride, count) of more than one step, largest stride first; each steps over all that follow (`Plane`
            checks that).
    """

    plane: Plane
    pool: tuple[str, str]
    first: int
    cell: int
    axes: tuple[tuple[int, int], ...]

    @property
    def extent(self) -> int:
        """Bytes from the first to one past the last, holes included."""
        return self.cell + sum(stride * (count - 1) for stride, count in self.axes)

    @property
    def end(self) -> int:
        return self.first + self.extent


class _Steps:
    """What is left of `MOST_STEPS`."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def take(self, count: int) -> bool:
        """Count so many steps; returns whether they were left."""
        self._left -= count
        return self._left >= 0


def check_unshared(groups: Iterable[Group], rank: RankGeometry) -> None:
    """Raise `BadGeometry` if two planes of a rank share a byte and do not both say so (`Plane.shared`), and name both.

    Groups of one pool overlap by design.

    Args:
        groups: of the engine.
        rank: the rank.
    """
    if all(plane.shared for plane in rank.planes):
        return
    problem = "both hold the same bytes. {} Layers that share a cache on purpose both say shared=True"
    _check(groups, rank.rank, rank.planes, problem, may_share=True)


def check_apart(groups: Iterable[Group], rank: int, planes: Iterable[Plane]) -> None:
    """Raise `BadGeometry` if two planes that a read writes share a byte, and name both.

    Groups of one pool overlap by design. A source may declare memory twice, for layers that share their cache; a
    destination declares it once.

    Args:
        groups: of the engine.
        rank: the destination rank, for the message.
        planes: those of its planes that are written.
    """
    problem = "both hold the same bytes, which a read would write twice. {}"
    _check(groups, rank, planes, problem, may_share=False)


def _check(groups: Iterable[Group], rank: int, planes: Iterable[Plane], problem: str, *, may_share: bool) -> None:
    by_name = {group.name: group for group in groups}
    spaces: dict[tuple[int, int], list[_Box]] = {}
    for plane in planes:
        box = _box(plane, by_name[plane.group])
        spaces.setdefault((plane.memory_kind, plane.device), []).append(box)
    steps = _Steps()
    for boxes in spaces.values():
        for one, other in _suspects(boxes, steps):
            if not steps.take(1):
                return
            if may_share and one.plane.shared and other.plane.shared:
                continue
            found = _shared_byte(one, other, steps)
            if found is not None:
                raise BadGeometry(
                    f"rank {rank}, planes {one.plane.name} and {other.plane.name}",
                    problem.format(_asked(one.plane, other.plane, found)),
                )


def _asked(one: Plane, other: Plane, byte: int) -> str:
    """What to look at where two planes hold the same byte."""
    if one.group != other.group:
        return "Groups that lie over each other share a pool."
    if one.extent == other.extent and one.layer != other.layer:
        return "Are both layers the same tensor?"
    return f"One of them is byte {byte - one.base} from the base of {one.name}."


def _box(plane: Plane, group: Group) -> _Box:
    # Blocks past the group's own are never written.
    axes = [
        (stride, min(count, group.num_blocks) if name == "block_stride" else count)
        for stride, count, name in plane.axes
        if name != "block_stride" or group.num_blocks > 1
    ]
    pool = ("pool", group.pool) if group.pool else ("group", group.name)
    return _Box(plane, pool, plane.base, plane.state_bytes, tuple(axes))


def _suspects(boxes: list[_Box], steps: _Steps) -> Iterator[tuple[_Box, _Box]]:
    """Pairs that may not share a byte, and that are not separated all at once."""
    whole = {box.plane.name: box for box in boxes}
    groups: dict[str, list[_Box]] = {}
    for box in boxes:
        groups.setdefault(box.plane.group, []).append(box)
    for members in groups.values():
        for cluster in _together(members, steps, across_pools=False):
            yield from combinations([whole[box.plane.name] for box in cluster], 2)
    # Separately from each group's own planes: groups of one pool overlap, and would join planes that are apart.
    for cluster in _together(boxes, steps, across_pools=True):
        for one, other in combinations([whole[box.plane.name] for box in cluster], 2):
            if one.pool != other.pool:
                yield one, other


def _together(boxes: list[_Box], steps: _Steps, *, across_pools: bool) -> Iterator[list[_Box]]:
    """Clusters of boxes that cannot be separated by their parts of a period."""
    waiting = [boxes]
    while waiting:
        for cluster in _touching(waiting.pop()):
            if len(cluster) == 1 or (across_pools and len({box.pool for box in cluster}) == 1):
                continue
            if not steps.take(len(cluster)):
                return
            folded = _fold(cluster)
            if folded is None:
                yield cluster
            else:
                waiting.append(folded)


def _touching(boxes: list[_Box]) -> Iterator[list[_Box]]:
    """Boxes in clusters whose extents, holes included, reach into each other."""
    cluster: list[_Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.first):
        if cluster and box.first >= end:
            yield cluster
            cluster = []
        end = max(end, box.end) if cluster else box.end
        cluster.append(box)
    if cluster:
        yield cluster


def _fold(cluster: list[_Box]) -> list[_Box] | None:
    """The boxes within one period of their largest stride, as if each were repeated for ever; None if they do not fit.

    Boxes that are apart then are apart.
    """
    period = max((box.axes[0][0] for box in cluster if box.axes), default=0)
    if period == 0:
        return None
    origin = cluster[0].first
    folded = []
    for box in cluster:
        axes = box.axes
        if axes and axes[0][0] == period:
            axes = axes[1:]
        elif axes and box.extent > period and period % axes[0][0] == 0:
            axes = ((axes[0][0], period // axes[0][0]), *axes[1:])
        inner = replace(box, first=origin + (box.first - origin) % period, axes=axes)
        if inner.end > origin + period:
            return None
        folded.append(inner)
    return folded


def _shared_byte(one: _Box, other: _Box, steps: _Steps) -> int | None:
    """The address of a byte of both boxes; None if there is none, or none was found in time.

    The distance between a cell of the one and a cell of the other is ``one.first - other.first`` plus a multiple of
    each stride; a stride of both counts once, with the difference of the two indices.
    """
    reach: dict[int, tuple[int, int]] = {}
    for stride, count in one.axes:
        reach[stride] = 0, count - 1
    for stride, count in other.axes:
        reach[stride] = 1 - count, reach.get(stride, (0, 0))[1]
    strides = sorted(reach, reverse=True)
    measure = [0] * (len(strides) + 1)
    low, high = [0] * (len(strides) + 1), [0] * (len(strides) + 1)
    for level in range(len(strides) - 1, -1, -1):
        stride = strides[level]
        measure[level] = math.gcd(measure[level + 1], stride)
        low[level] = low[level + 1] + stride * reach[stride][0]
        high[level] = high[level + 1] + stride * reach[stride][1]
    # Cells share a byte if their distance is one of these.
    least, most = 1 - one.cell, other.cell - 1

    def search(level: int, distance: int) -> tuple[int, ...] | None:
        """Multiples of the strides from `level` on that bring the cells together."""
        if not steps.take(1) or distance + high[level] < least or distance + low[level] > most:
            return None
        if level == len(strides):
            return ()
        if least + (distance - least) % measure[level] > most:
            return None
        stride = strides[level]
        begin = max(reach[stride][0], -((distance + high[level + 1] - least) // stride))
        end = min(reach[stride][1], (most - distance - low[level + 1]) // stride)
        for multiple in range(begin, end + 1):
            rest = search(level + 1, distance + stride * multiple)
            if rest is not None:
                return multiple, *rest
            if not steps.take(0):
                return None
        return None

    found = search(0, one.first - other.first)
    if found is None:
        return None
    mine = one.first + sum(stride * max(0, multiple) for stride, multiple in zip(strides, found, strict=True))
    theirs = other.first + sum(stride * max(0, -multiple) for stride, multiple in zip(strides, found, strict=True))
    return max(mine, theirs)
