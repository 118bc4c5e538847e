"""The path of a lane's bytes: directly into the destination's blocks, or through staging memory.

Every descriptor costs some microseconds, however short it is. Where a change of layout leaves short pieces, it is often
cheaper to read whole rows of the source's blocks into staging memory and to permute them on the cache's own device:
that moves more bytes with far fewer descriptors. The costs are estimated with five constants, which are measured
(`kvferry._transport.calibration`) or configured. Pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from kvferry.errors import InvalidField
from kvferry.geometry.plane import MemoryKind
from kvferry.planner.lane import Lane

RECURRING_LIMIT = 512
"""Pieces per period up to which all pieces of a lane are looked at. With more, a stretch of them stands for all."""

RECURRING_CELLS = 1 << 23
"""States times units per period, over all planes of a lane, up to which all pieces are looked at."""


class Path(enum.Enum):
    """The path of a lane's bytes."""

    DIRECT = "direct"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that moving takes. The defaults were measured between two processes on one host (CMA).

    Attributes:
        descriptor: per NIXL descriptor, whatever its length.
        byte: per byte that NIXL reads into the destination's blocks.
        staged_byte: per byte that NIXL reads into staging memory, including the costs of each batch.
        cell: per contiguous run that the permutation copies.
        copied_byte: per byte that the permutation copies.
    """

    descriptor: float = 2.5e-6
    byte: float = 2e-10
    staged_byte: float = 2e-10
    cell: float = 6e-9
    copied_byte: float = 1e-10

    def __post_init__(self) -> None:
        for field in ("descriptor", "byte", "staged_byte", "cell", "copied_byte"):
            if not 0 <= getattr(self, field) < 1:
                raise InvalidField(field, getattr(self, field), "seconds from 0 to below 1")


@dataclass(frozen=True, slots=True)
class PathRule:
    """How paths are chosen.

    Attributes:
        path: the path wherever it is possible; None: the cheaper path.
        costs: the constants.
        slot_bytes: staging memory of one batch; rows that do not fit are read directly.
        device_memory: devices whose memory can be permuted, because tensors on them are known; host memory always can
            be.
    """

    path: Path | None = None
    costs: Costs = Costs()
    slot_bytes: int = 4 << 20
    device_memory: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The path of a lane, with the reason for people. `direct` and `staged` are estimated seconds per block of the
    destination, equal where nothing was compared; `measurable`: whether other constants could change the path."""

    path: Path
    reason: str
    direct: float = 0.0
    staged: float = 0.0
    measurable: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """The counts that decide the costs of both paths, for `states` of a lane; a destination block has `step` states."""

    states: int
    step: int
    bytes: int
    descriptors: int
    runs: int
    source_blocks: int


def choose_path(lane: Lane, rule: PathRule) -> PathChoice:
    """The path of a lane."""
    only_direct = _only_direct(lane, rule)
    if only_direct:
        return PathChoice(Path.DIRECT, only_direct)
    if rule.path is Path.STAGED:
        return PathChoice(Path.STAGED, "as configured")
    work = work_of(lane)
    costs, descriptors = rule.costs, max(1, work.descriptors)
    staged_descriptors = max(1, work.source_blocks * len(lane.extents))
    staged_bytes = work.source_blocks * sum(extent.length for extent in lane.extents)
    direct = descriptors * costs.descriptor + work.bytes * costs.byte
    staged = staged_descriptors * costs.descriptor + staged_bytes * costs.staged_byte
    staged += work.runs * costs.cell + work.bytes * costs.copied_byte
    pieces = f"{work.bytes // descriptors:,} B"
    rows = f"{staged_bytes // staged_descriptors:,} B"
    # A staged row costs as much as a direct one: unless staging has fewer rows, it is never cheaper.
    measurable = staged_descriptors < descriptors
    by_pieces, by_rows = f"reading pieces of {pieces}", f"reading rows of {rows} and permuting them"
    if staged < direct:
        path, reason = Path.STAGED, f"{by_rows} takes {staged / direct:.2f} of the time of {by_pieces}"
    elif measurable:
        path, reason = Path.DIRECT, f"{by_pieces} takes {direct / staged:.2f} of the time of {by_rows}"
    else:
        return PathChoice(Path.DIRECT, f"staging would not save descriptors (pieces of {pieces})")
    return PathChoice(path, reason, direct * work.step / work.states, staged * work.step / work.states, measurable)


def _only_direct(lane: Lane, rule: PathRule) -> str:
    """The reason why a lane's bytes go directly, whatever the costs; else empty."""
    kind, device = lane.memory.destination
    if rule.path is Path.DIRECT:
        return "as configured"
    if kind is MemoryKind.VRAM and device not in rule.device_memory:
        return f"permuting on device {device} needs a tensor there, and none is registered"
    if rule.path is None and lane.linear_bytes:
        return "whole blocks are contiguous on both sides"
    longest = max(extent.length for extent in lane.extents)
    if longest > rule.slot_bytes:
        return f"a row of {longest:,} B does not fit in {rule.slot_bytes:,} B of staging memory"
    return ""


def work_of(lane: Lane, most: int = RECURRING_LIMIT) -> Work:
    """The work of a typical stretch of a lane, of about `most` pieces at most: a period of its line; if that is too
    long, a block of the destination; if even that has more pieces, the beginning of a block."""
    line = lane.line
    cells = line.period * sum(len(read.units) for read in lane.reads)
    if line.pieces_per_period <= min(most, RECURRING_LIMIT) and cells <= RECURRING_CELLS:
        end = line.period
    else:
        end = min(line.destination_step, most * line.steps[0])
    found = line.pieces(0, end)
    rows = [(lane.rows(alike.cut), len(alike.source)) for alike in found]
    return Work(
        states=end,
        step=line.destination_step,
        bytes=max(1, sum(int(row.length.sum()) * count for row, count in rows)),
        descriptors=sum(len(row) * count for row, count in rows),
        runs=sum(row.unfused * count for row, count in rows),
        source_blocks=len(np.unique(np.concatenate([alike.source for alike in found]))) if found else 0,
    )
