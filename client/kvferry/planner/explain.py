"""A read plan in words, as plain values or as text: each rank's sources, and the reads' bytes and descriptors.

A `ReadLine` gathers the plane reads of one destination rank that differ only in layer and component. Bytes are averaged
over all tokens of a request, so that they add up: a stripe of a quarter of the blocks counts a quarter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import Any

import numpy as np

from kvferry.geometry.model import EngineGeometry, GroupKind, RankGeometry
from kvferry.geometry.plane import Interval, TokenShard
from kvferry.planner.coverage import PlaneRead
from kvferry.planner.lane import Lane, build_lanes
from kvferry.planner.line_rule import Stripe
from kvferry.planner.path_choice import RECURRING_LIMIT, Path, work_of
from kvferry.planner.plan import ReadPlan

COUNTS = ("pieces_per_block", "descriptors_per_block")

PIECES = 1 << 16
"""The most pieces, in all lines of a plan together, that an estimate looks at."""


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A destination rank's reads from one source rank, of planes that differ only in layer and component.

    Attributes:
        source: the rank read from.
        group: the group.
        layers: names, in the order of the destination's planes.
        components: names; each of these layers has all of them.
        units: units read.
        tokens: tokens read, before the stripe.
        stripe: share of the request's blocks.
        bytes_per_token: mean over the request's tokens; 0 for state groups.
        bytes_per_request: for state groups, independent of the length; else 0.
        pieces_per_block: contiguous pieces of single planes per block of the destination, rounded up.
        descriptors_per_block: the pieces left after fusing, for a single block.
        runs_merge: whether consecutive blocks become one descriptor.
        path: ``direct`` or ``staged``.
        reason: the reason for the path; several where the planes differ.
    """

    source: RankGeometry
    group: str
    layers: tuple[str, ...]
    components: tuple[str, ...]
    units: Interval
    tokens: TokenShard
    stripe: Stripe
    bytes_per_token: float
    bytes_per_request: int
    pieces_per_block: int
    descriptors_per_block: int
    runs_merge: bool
    path: str
    reason: str


def explain(plan: ReadPlan) -> tuple[ReadLine, ...]:
    """The reads of a plan, by source rank and group."""
    gathered: dict[tuple[int, str, Interval, TokenShard, Stripe, Path], dict[str, list[PlaneRead]]] = {}
    chosen = {id(read): choice for lane, choice in zip(plan.lanes, plan.paths, strict=True) for read in lane.reads}
    for read in plan.reads:
        tokens = read.source.token_shard if read.source.token_shard.count > 1 else read.destination.token_shard
        key = (read.source_rank, read.destination.group, read.units, tokens, read.stripe, chosen[id(read)].path)
        gathered.setdefault(key, {}).setdefault(read.destination.component, []).append(read)
    ranks = {rank.rank: rank for rank in plan.source.ranks}
    lines = []
    most = min(RECURRING_LIMIT, 1 + PIECES // len(plan.reads)) if plan.reads else 0
    for (source_rank, group, units, tokens, stripe, path), components in gathered.items():
        by_layers: dict[tuple[str, ...], list[str]] = {}
        for component, reads in components.items():
            by_layers.setdefault(tuple(read.destination.layer for read in reads), []).append(component)
        for layers, names in by_layers.items():
            reads = [read for name in names for read in components[name]]
            planes = ranks[source_rank], group, layers, tuple(names), units, tokens, stripe
            reasons = dict.fromkeys(chosen[id(read)].reason for read in reads)
            lines.append(ReadLine(*planes, *_cost(plan, reads, path, most), path.value, "; ".join(reasons)))
    return tuple(sorted(lines, key=lambda line: line.source.rank))


def _cost(plan: ReadPlan, reads: Sequence[PlaneRead], path: Path, most: int) -> tuple[float, int, int, int, bool]:
    """Bytes per token and request, pieces and descriptors per block, whether runs merge; by `most` pieces at most."""
    per_token, per_request = Fraction(0), 0
    piece_count = descriptor_count = 0
    merges = True
    for lane in build_lanes(reads, *plan.groups_by_name):
        cells = sum(len(read.units) * read.source.state_bytes for read in lane.reads)
        if lane.group.kind is GroupKind.STATE:
            begin, end = lane.stripe.blocks(1)
            per_request += cells * lane.source.held_per_block * (end - begin)
        else:
            share = Fraction(lane.stripe.end - lane.stripe.begin, lane.stripe.of)
            both = _common(lane.source.shard, lane.destination.shard)
            per_token += cells / lane.tokens_per_state * both * share
        work = work_of(lane, most)
        left = work.descriptors if path is Path.DIRECT else work.source_blocks * len(lane.extents)
        piece_count += -(-work.runs * work.step // work.states)
        descriptor_count += -(-left * work.step // work.states)
        merges = merges and _merges(lane, path)
    return float(per_token), per_request, piece_count, descriptor_count, merges


def _common(a: TokenShard, b: TokenShard) -> Fraction:
    """The fraction of all states that two shards have in common: exact, which a sample of a line (`work_of`) is not."""
    if a == b:
        return Fraction(1, a.count)
    periods = a.count * a.interleave, b.count * b.interleave
    common = math.gcd(*periods)
    # Each pair of a state of one period and a state of the other that are equal modulo `common` stands for one state
    # that both shards hold, in each common multiple of the periods.
    mine, theirs = (
        np.bincount((np.arange(shard.interleave) + shard.index * shard.interleave) % common, minlength=common)
        for shard in (a, b)
    )
    return Fraction(int((mine * theirs).sum()), math.lcm(*periods))


def _merges(lane: Lane, path: Path) -> bool:
    if path is Path.STAGED:
        return all(extent.length == lane.source.block_stride for extent in lane.extents)
    if lane.linear_bytes:
        return True
    same_blocks = lane.line.same_tokens and lane.source.block_states == lane.destination.block_states
    if lane.group.kind is GroupKind.STATE or not same_blocks:
        return False
    _, others = lane.block_rows(lane.whole_block)
    return len(others.length) == 0


def layer_order(plans: Sequence[ReadPlan]) -> dict[str, int]:
    """The layer names of the destination engine with their positions: ordered by the numbers in the names, a draft
    model's layers after the model's."""
    names = dict.fromkeys(plane.layer for _, plane in plans[0].destination.planes()) if plans else {}
    prefixes: dict[str, int] = {}

    def place(name: str) -> tuple[int, int]:
        found = re.search(r"[0-9]+", name)
        prefix = name[: found.start()] if found else name
        return prefixes.setdefault(prefix, len(prefixes)), int(found.group()) if found else 0

    # The planes' own order decides between layers with the same number: attention and its indexer, say.
    return {name: index for index, name in enumerate(sorted(names, key=place))}


def layer_ranges(line: ReadLine, order: Mapping[str, int]) -> str:
    """The layers of a read as ``0-15, 31`` or ``0-30 by 2``: positions in `layer_order`, both ends included."""
    places = sorted(order[name] for name in line.layers)
    steps = {after - before for before, after in pairwise(places)}
    if len(places) > 2 and len(steps) == 1 and steps != {1}:
        return f"{places[0]}-{places[-1]} by {steps.pop()}"
    return ranges_text(places)


def bytes_text(per_token: float, per_request: int) -> str:
    """The bytes of a read for people: ``4,096 B/token``, ``48 B/request``, or both."""
    parts = [f"{per_token:,.0f} B/token" if per_token or not per_request else ""]
    parts.append(f"{per_request:,} B/request" if per_request else "")
    return " + ".join(part for part in parts if part)


def source_loads(source: EngineGeometry, reads: Sequence[ReadLine]) -> dict[int, float]:
    """The fraction of the bytes that each source rank serves; of the states' bytes, if only states are read."""
    by_token = any(line.bytes_per_token for line in reads)
    loads = {rank.rank: 0.0 for rank in source.ranks}
    for line in reads:
        loads[line.source.rank] += line.bytes_per_token if by_token else line.bytes_per_request
    total = sum(loads.values()) or 1.0
    return {rank: load / total for rank, load in loads.items()}


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as half-open ranges."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers as ``0-3, 6``: ranges with both ends included."""
    return ", ".join(f"{begin}-{end - 1}" if end > begin + 1 else str(begin) for begin, end in ranges(numbers))


def to_json(plans: Sequence[ReadPlan]) -> dict[str, Any]:
    """The plans of one pair of engines as plain values, whose shape is kept stable.

    ``layers`` of a read are half-open ranges of indices into the top-level ``layers``; a read without ``stripe`` reads
    all blocks.
    """
    order = layer_order(plans)
    explained = [explain(plan) for plan in plans]
    return {
        "source": plans[0].source.engine_id if plans else "",
        "destination": plans[0].destination.engine_id if plans else "",
        "layers": list(order),
        "ranks": [
            {
                **_rank_json(plan.rank),
                "reads": [_read_json(line, order) for line in lines],
                "uncovered": list(plan.uncovered),
            }
            for plan, lines in zip(plans, explained, strict=True)
        ],
        "totals": totals(plans, [*chain(*explained)]),
    }


def _rank_json(rank: RankGeometry) -> dict[str, int]:
    return {"rank": rank.rank, "tp_rank": rank.rank, "pp_rank": 0, **rank.labels}


def _read_json(line: ReadLine, order: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "source": _rank_json(line.source),
        "group": line.group,
        "layers": ranges(order[layer] for layer in line.layers),
        "units": [line.units.begin, line.units.end],
        "components": list(line.components),
        "tokens": asdict(line.tokens),
        "bytes_per_token": _number(line.bytes_per_token),
        **{name: getattr(line, name) for name in ("bytes_per_request", *COUNTS, "runs_merge", "path")},
        "path_reason": line.reason,
    }
    return found if line.stripe.whole else {**found, "stripe": asdict(line.stripe)}


def totals(plans: Sequence[ReadPlan], reads: Sequence[ReadLine]) -> dict[str, Any]:
    """The sums over all reads of all ranks."""
    loads = source_loads(plans[0].source, reads) if plans else {}
    return {
        "reads": len(reads),
        "bytes_per_token": _number(sum(line.bytes_per_token for line in reads)),
        "bytes_per_request": sum(line.bytes_per_request for line in reads),
        **{name: sum(getattr(line, name) for line in reads) for name in COUNTS},
        "source_ranks": [
            {**_rank_json(rank), "share": round(loads[rank.rank], 6)}
            for plan in plans[:1]
            for rank in plan.source.ranks
        ],
        "imbalance": round(max(loads.values(), default=0.0) * len(loads), 6),
    }


def _number(value: float) -> float | int:
    """Round to six places; whole numbers become integers."""
    return int(value) if value == int(value) else round(value, 6)


def to_text(plans: Sequence[ReadPlan]) -> str:
    """The plans of a pair of engines as text: a numbered line for each read, totals, and the reason for each path."""
    if not plans:
        return "no rank to plan for"
    order = layer_order(plans)
    explained = [explain(plan) for plan in plans]
    reads = [*chain(*explained)]
    numbers = {id(line): number for number, line in enumerate(reads, 1)}
    columns = ("read", "rank", "reads from", "group", "layers", "components", "units", "tokens", "blocks")
    rows: list[tuple[str, ...]] = [(*columns, "bytes", "descriptors/block", "path")]
    for plan, lines in zip(plans, explained, strict=True):
        name = plan.rank.label
        for line in lines:
            rows.append((str(numbers[id(line)]), name, *cells_of(line, order)))
            name = ""
        if not lines:
            rows.append(("", name, "nothing", *[""] * 9))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sums = totals(plans, reads)
    merging = [line.runs_merge for line in reads]
    some = "merge in some reads" if any(merging) else "do not merge"
    text += [
        "",
        f"total        {sums['reads']} reads, {bytes_text(sums['bytes_per_token'], sums['bytes_per_request'])}",
        f"descriptors  {sums['descriptors_per_block']} per block after fusing, {sums['pieces_per_block']} before; "
        f"consecutive blocks {'merge' if all(merging) else some}",
        f"imbalance    the busiest source rank serves {sums['imbalance']:.2f} times the mean",
        *_paths(reads),
    ]
    for plan in plans:
        for plane in plan.uncovered:
            text.append(f"uncovered    {plan.rank.label}: the source has no {plane}, which may stay uncovered")
    return "\n".join(text)


def cells_of(line: ReadLine, order: Mapping[str, int]) -> tuple[str, ...]:
    """A read as the cells of a table; the first is the source rank."""
    descriptors = str(line.descriptors_per_block)
    if line.pieces_per_block != line.descriptors_per_block:
        descriptors += f" (of {line.pieces_per_block} pieces)"
    return (
        line.source.label,
        line.group,
        layer_ranges(line, order),
        " ".join(line.components),
        str(line.units),
        "all" if line.tokens.count == 1 else f"{line.tokens.index}/{line.tokens.count} by {line.tokens.interleave}",
        "all" if line.stripe.whole else str(line.stripe),
        bytes_text(line.bytes_per_token, line.bytes_per_request),
        descriptors,
        line.path,
    )


def _paths(reads: Iterable[ReadLine]) -> list[str]:
    """The reason for each path, with the numbers of the reads that take it."""
    chosen: dict[tuple[str, str], list[int]] = {}
    for number, line in enumerate(reads, 1):
        for reason in line.reason.split("; "):
            chosen.setdefault((line.path, reason), []).append(number)
    text = []
    for (path, reason), numbers in chosen.items():
        subject = f"read {numbers[0]} is" if len(numbers) == 1 else f"reads {ranges_text(numbers)} are"
        text.append(f"path         {subject} {path}: {reason}")
    return text
