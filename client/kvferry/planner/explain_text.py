"""A read plan as text, for `kvferry plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.planner.explain import (
    RankLines,
    ReadLine,
    bytes_text,
    explain,
    layer_order,
    layer_ranges,
    ranges,
    rank_name,
)
from kvferry.planner.explain_json import totals
from kvferry.planner.plan import ReadPlan


def to_text(plans: Sequence[ReadPlan]) -> str:
    """Return the plans of a pair of engines as text: a numbered line for each read, totals, and why each path."""
    if not plans:
        return "no rank to plan for"
    order = layer_order(plans)
    explained = [explain(plan) for plan in plans]
    reads = [line for lines in explained for line in lines.reads]
    numbers = {id(line): number for number, line in enumerate(reads, 1)}
    rows: list[tuple[str, ...]] = [
        (
            *("read", "rank", "reads from", "group", "layers", "components", "units", "tokens", "blocks"),
            *("bytes", "descriptors/block", "path"),
        )
    ]
    for lines in explained:
        name = rank_name(lines.rank, lines.labels)
        for line in lines.reads:
            rows.append((str(numbers[id(line)]), name, *_cells(line, order)))
            name = ""
        if not lines.reads:
            rows.append(("", name, "nothing", *[""] * 9))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sums = totals(plans, explained)
    text.append("")
    text.append(f"total        {sums['reads']} reads, {bytes_text(sums['bytes_per_token'], sums['bytes_per_request'])}")
    text.append(
        f"descriptors  {sums['descriptors_per_block']} per block after fusing, {sums['pieces_per_block']} before; "
        f"{_merging(explained)}"
    )
    text.append(f"imbalance    the busiest source rank serves {sums['imbalance']:.2f} times the mean")
    text.extend(_paths(reads))
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
        bytes_text(line.bytes_per_token, line.bytes_per_request),
        descriptors,
        line.path,
    )


def _paths(reads: Iterable[ReadLine]) -> list[str]:
    """Return why each path was chosen, with the numbers of the reads that take it."""
    chosen: dict[tuple[str, str], list[int]] = {}
    for number, line in enumerate(reads, 1):
        for reason in line.reason.split("; "):
            chosen.setdefault((line.path, reason), []).append(number)
    text = []
    for (path, reason), numbers in chosen.items():
        listed = ", ".join(f"{begin}-{end - 1}" if end > begin + 1 else str(begin) for begin, end in ranges(numbers))
        subject = f"read {listed} is" if len(numbers) == 1 else f"reads {listed} are"
        text.append(f"path         {subject} {path}: {reason}")
    return text


def _merging(explained: Iterable[RankLines]) -> str:
    merging = {line.runs_merge for lines in explained for line in lines.reads}
    if merging == {True}:
        return "consecutive blocks merge"
    return "consecutive blocks do not merge" if merging == {False} else "consecutive blocks merge in some reads"
