"""A read plan as text, for `kvferry plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.planner.explain import RankLines, ReadLine, explain, layer_order, layer_ranges, rank_name
from kvferry.planner.explain_json import totals
from kvferry.planner.plan import ReadPlan


def to_text(plans: Sequence[ReadPlan]) -> str:
    """Plans of one pair of engines for people: a line per read, then totals."""
    if not plans:
        return "no rank to plan for"
    order = layer_order(plans)
    explained = [explain(plan) for plan in plans]
    rows: list[tuple[str, ...]] = [
        ("", "from", "group", "layers", "components", "units", "tokens", "blocks", "bytes", "descriptors/block", "path")
    ]
    for lines in explained:
        name = rank_name(lines.rank, lines.labels)
        for line in lines.reads:
            rows.append((name, *_cells(line, order)))
            name = ""
        if not lines.reads:
            rows.append((name, "nothing", *[""] * 9))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sums = totals(plans, explained)
    bytes_ = _bytes(float(sums["bytes_per_token"]), int(sums["bytes_per_request"]))
    text.append("")
    text.append(f"total        {sums['reads']} reads, {bytes_}")
    text.append(
        f"descriptors  {sums['descriptors_per_block']} per block after fusing, {sums['pieces_per_block']} before; "
        f"{_merging(explained)}"
    )
    text.append(f"imbalance    the busiest source rank serves {sums['imbalance']:.2f} times the mean")
    text.extend(_paths(explained))
    for lines in explained:
        for plane in lines.uncovered:
            name = rank_name(lines.rank, lines.labels)
            text.append(f"uncovered    {name}: the source has no {plane}, which may stay uncovered")
    return "\n".join(text)


def _cells(line: ReadLine, order: Mapping[str, int]) -> tuple[str, ...]:
    stripe = line.stripe
    descriptors = str(line.descriptors_per_block)
    if line.pieces_per_block != line.descriptors_per_block:
        descriptors += f" (of {line.pieces_per_block} pieces)"
    return (
        rank_name(line.source_rank, line.source_labels),
        line.group,
        layer_ranges(line, order),
        " ".join(line.components),
        str(line.units),
        "all" if line.tokens.count == 1 else f"{line.tokens.index}/{line.tokens.count} by {line.tokens.interleave}",
        "all" if stripe.whole else f"[{stripe.begin}, {stripe.end}) of {stripe.of}",
        _bytes(line.bytes_per_token, line.bytes_per_request),
        descriptors,
        line.path,
    )


def _bytes(per_token: float, per_request: int) -> str:
    parts = [f"{per_token:,.0f} B/token" if per_token or not per_request else ""]
    parts.append(f"{per_request:,} B/request" if per_request else "")
    return " + ".join(part for part in parts if part)


def _paths(explained: Iterable[RankLines]) -> list[str]:
    """Every path that is taken, with its reasons."""
    reads = (line for lines in explained for line in lines.reads)
    reasons = dict.fromkeys((line.path, reason) for line in reads for reason in line.reason.split("; "))
    return [f"path         {path}: {reason}" for path, reason in sorted(reasons)]


def _merging(explained: Iterable[RankLines]) -> str:
    merging = {line.runs_merge for lines in explained for line in lines.reads}
    if merging == {True}:
        return "consecutive blocks merge"
    return "consecutive blocks do not merge" if merging == {False} else "consecutive blocks merge in some reads"
