"""A read plan as plain values, for `kvferry plan --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.planner.explain import RankLines, ReadLine, explain, layer_order, ranges, source_loads
from kvferry.planner.plan import ReadPlan


def to_json(plans: Sequence[ReadPlan]) -> dict[str, Any]:
    """Return the plans of one pair of engines as plain values, whose shape is kept stable.

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
                **_rank_json(lines.rank, lines.labels),
                "reads": [_read_json(line, order) for line in lines.reads],
                "uncovered": list(lines.uncovered),
            }
            for lines in explained
        ],
        "totals": totals(plans, explained),
    }


def _rank_json(rank: int, labels: Mapping[str, int]) -> dict[str, int]:
    return {"rank": rank, **labels, "tp_rank": labels.get("tp_rank", rank), "pp_rank": labels.get("pp_rank", 0)}


def _read_json(line: ReadLine, order: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "source": _rank_json(line.source_rank, line.source_labels),
        "group": line.group,
        "layers": ranges(order[layer] for layer in line.layers),
        "units": [line.units.begin, line.units.end],
        "components": list(line.components),
        "tokens": {"index": line.tokens.index, "count": line.tokens.count, "interleave": line.tokens.interleave},
        "bytes_per_token": _number(line.bytes_per_token),
        "bytes_per_request": line.bytes_per_request,
        "pieces_per_block": line.pieces_per_block,
        "descriptors_per_block": line.descriptors_per_block,
        "runs_merge": line.runs_merge,
        "path": line.path,
        "path_reason": line.reason,
    }
    if not line.stripe.whole:
        found["stripe"] = {"begin": line.stripe.begin, "end": line.stripe.end, "of": line.stripe.of}
    return found


def totals(plans: Sequence[ReadPlan], explained: Sequence[RankLines]) -> dict[str, Any]:
    """Return the sums over all reads of all ranks."""
    reads = [line for lines in explained for line in lines.reads]
    loads = source_loads(plans[0].source, explained) if plans else {}
    return {
        "reads": len(reads),
        "bytes_per_token": _number(sum(line.bytes_per_token for line in reads)),
        "bytes_per_request": sum(line.bytes_per_request for line in reads),
        "pieces_per_block": sum(line.pieces_per_block for line in reads),
        "descriptors_per_block": sum(line.descriptors_per_block for line in reads),
        "source_ranks": [
            {**_rank_json(rank.rank, rank.labels), "share": round(loads[rank.rank], 6)}
            for rank in (plans[0].source.ranks if plans else ())
        ],
        "imbalance": round(max(loads.values(), default=0.0) * len(loads), 6),
    }


def _number(value: float) -> float | int:
    """Round to six places; whole numbers become integers."""
    return int(value) if value == int(value) else round(value, 6)
