"""Whether planes share bytes, so that a read into both would write those bytes twice.

A plane is a box: it has an address for every choice of block, page, unit and state, each step a stride. First, boxes
are separated all at once: those with separate extents; then those whose parts are separate within one period of the
largest stride; and so on for each smaller stride. That separates thousands of layers, keys and values that interleave
in one storage. For the few boxes left, "is there a byte in both" is an equation in bounded integers, which an exact
search solves. (`numpy.shares_memory` gives up on many pairs of planes of an engine's size.)

The search is bounded, so that no geometry of a peer can keep a server busy. An undecided pair (strides without a common
divisor, which no engine has) passes: a layout that may be right is never refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations

from kvferry.errors import BadGeometry
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane

MOST_STEPS = 200_000
"""Boxes compared, and positions tried, for all planes of a rank: some tenths of a second."""


@dataclass(frozen=True, slots=True)
class _Box:
    """The bytes of a plane, or of its part in one period: from the address `first` on, `Plane.state_bytes` contiguous
    bytes at every address. `axes` are (stride, count) of more than one step, largest stride first; each stride steps
    over all smaller axes (`Plane` checks that). `whole` are the axes of the plane. Planes of different groups of one
    pool may share bytes."""

    plane: Plane
    pool: tuple[str, str]
    first: int
    axes: tuple[tuple[int, int], ...]
    whole: tuple[tuple[int, int], ...]

    @property
    def extent(self) -> int:
        """Bytes from the first to one past the last byte, holes included."""
        return self.plane.state_bytes + sum(stride * (count - 1) for stride, count in self.axes)

    @property
    def end(self) -> int:
        return self.first + self.extent


class _Undecided(Exception):
    """No steps are left: what was not compared passes."""


class _Steps:
    """The rest of `MOST_STEPS`."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def take(self, count: int = 1) -> None:
        """Count this many steps; raises `_Undecided`."""
        self._left -= count
        if self._left < 0:
            raise _Undecided


def check_apart(groups: Iterable[Group], rank: int, planes: Collection[Plane], *, may_share: bool = False) -> None:
    """Raise `BadGeometry`, naming both, if two of a rank's planes share a byte: a read would write it twice.

    Groups of one pool overlap by design. With `may_share`, so may planes that are both `Plane.shared`, as of layers
    that share their cache: a source may declare memory twice.
    """
    if may_share and all(plane.shared for plane in planes):
        return
    by_name = {group.name: group for group in groups}
    spaces: dict[tuple[int, int], list[_Box]] = {}
    for plane in planes:
        box = _box(plane, by_name[plane.group])
        spaces.setdefault((plane.memory_kind, plane.device), []).append(box)
    steps = _Steps()
    advice = "Layers that share a cache on purpose both say shared=True" if may_share else "A read writes them twice"
    with suppress(_Undecided):
        for one, other in chain.from_iterable(_suspects(boxes, steps) for boxes in spaces.values()):
            steps.take()
            if may_share and one.plane.shared and other.plane.shared:
                continue
            if _share_a_byte(one, other, steps):
                problem = f"both hold the same bytes. {_asked(one.plane, other.plane)} {advice}"
                raise BadGeometry(f"rank {rank}, planes {one.plane.name} and {other.plane.name}", problem)


def _asked(one: Plane, other: Plane) -> str:
    """A hint for the error where two planes hold the same byte."""
    if one.group != other.group:
        return "Groups that lie over each other share a pool."
    if one.extent == other.extent and one.layer != other.layer:
        return "Are both layers the same tensor?"
    return f"They begin at {one.base:#x} and {other.base:#x}."


def _box(plane: Plane, group: Group) -> _Box:
    # Blocks past the group's own are never written.
    axes = tuple(
        (stride, min(count, group.num_blocks) if name == "block_stride" else count)
        for stride, count, name in plane.axes
        if name != "block_stride" or group.num_blocks > 1
    )
    pool = ("pool", group.pool) if group.pool else ("group", group.name)
    return _Box(plane, pool, plane.base, axes, axes)


def _suspects(boxes: list[_Box], steps: _Steps) -> Iterator[tuple[_Box, _Box]]:
    """Pairs that may not share a byte, and that cannot be separated all at once."""
    groups: dict[str, list[_Box]] = {}
    for box in boxes:
        groups.setdefault(box.plane.group, []).append(box)
    for members in groups.values():
        for cluster in _together(members, steps, across_pools=False):
            yield from combinations(cluster, 2)
    # Apart from each group's own planes: groups of one pool overlap, and would join separate planes.
    for cluster in _together(boxes, steps, across_pools=True):
        for one, other in combinations(cluster, 2):
            if one.pool != other.pool:
                yield one, other


def _together(boxes: list[_Box], steps: _Steps, *, across_pools: bool) -> Iterator[list[_Box]]:
    """Clusters of boxes that their parts of a period do not separate."""
    waiting = [boxes]
    while waiting:
        for cluster in _touching(waiting.pop()):
            if len(cluster) == 1 or (across_pools and len({box.pool for box in cluster}) == 1):
                continue
            steps.take(len(cluster))
            if folded := _fold(cluster):
                waiting.append(folded)
            else:
                yield cluster


def _touching(boxes: list[_Box]) -> Iterator[list[_Box]]:
    """Clusters of boxes whose extents, holes included, overlap."""
    cluster: list[_Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.first):
        if cluster and box.first >= end:
            yield cluster
            cluster = []
        end = max(end, box.end)
        cluster.append(box)
    yield cluster


def _fold(cluster: list[_Box]) -> list[_Box] | None:
    """The boxes within one period of their largest stride, as if each were repeated for ever; None if they do not fit.

    If these are separate, so are the boxes.
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


def _share_a_byte(one: _Box, other: _Box, steps: _Steps) -> bool:
    """Whether the planes of two boxes have a byte in common; raises `_Undecided`.

    The distance between a cell of one plane and a cell of the other is that of their bases plus a multiple of each
    stride; a stride of both counts once, with the difference of the two indices.
    """
    multiples = {stride: (0, count - 1) for stride, count in one.whole}
    for stride, count in other.whole:
        multiples[stride] = 1 - count, multiples.get(stride, (0, 0))[1]
    strides = sorted(multiples)
    # The lowest and the highest sum of the smallest strides' multiples, of none up to all, and what divides each sum.
    sums = [(0, 0, 0)]
    for stride in strides:
        (low, high, measure), (first, last) = sums[-1], multiples[stride]
        sums.append((low + stride * first, high + stride * last, math.gcd(measure, stride)))
    # Cells share a byte if their distance lies between these.
    least, most = 1 - one.plane.state_bytes, other.plane.state_bytes - 1

    def search(level: int, distance: int) -> bool:
        """Whether multiples of the `level` smallest strides make the cells overlap."""
        low, high, measure = sums[level]
        steps.take()
        if distance + high < least or distance + low > most:
            return False
        if level == 0:
            return True
        if least + (distance - least) % measure > most:
            return False
        stride, (first, last), (low, high, _) = strides[level - 1], multiples[strides[level - 1]], sums[level - 1]
        begin, end = max(first, -((distance + high - least) // stride)), min(last, (most - distance - low) // stride)
        return any(search(level - 1, distance + stride * multiple) for multiple in range(begin, end + 1))

    return search(len(strides), one.plane.base - other.plane.base)
