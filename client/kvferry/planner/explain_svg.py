"""A picture of who reads what from whom: destination ranks against source ranks.

A row is a destination rank, a column a source rank; a cell is darker the more of the row's bytes come from there, and
says which units, layers, tokens and blocks those are. Everything is in the cell's tooltip, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvferry.planner.explain import RankLines, ReadLine, explain, layer_order, layer_ranges, rank_name, source_loads
from kvferry.planner.plan import ReadPlan

CELL_WIDTH = 116
CELL_HEIGHT = 58
LINE_HEIGHT = 14
MARGIN = 16
HEADING = 74
NAME_WIDTH = 110
MAX_LINES = 3
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def to_svg(plans: Sequence[ReadPlan]) -> str:
    """Plans of one pair of engines as an SVG document."""
    explained = [explain(plan) for plan in plans]
    sources = plans[0].source.ranks if plans else ()
    loads = source_loads(plans[0].source, explained) if plans else {}
    order = layer_order(plans)
    left, top = MARGIN + NAME_WIDTH, MARGIN + HEADING
    width = left + max(len(sources), 2) * CELL_WIDTH + MARGIN
    height = top + len(explained) * CELL_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONT}" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    if plans:
        title = f"{plans[0].destination.engine_id} reads from {plans[0].source.engine_id}"
        parts.append(_text(MARGIN, MARGIN + 14, title, size=15, weight="bold"))
    for column, rank in enumerate(sources):
        x = left + column * CELL_WIDTH
        parts.append(_text(x + 6, top - 22, rank_name(rank.rank, rank.labels), weight="bold"))
        parts.append(_text(x + 6, top - 8, f"serves {100 * loads[rank.rank]:.0f} %", fill="#555555"))
    for row, lines in enumerate(explained):
        y = top + row * CELL_HEIGHT
        parts.append(_text(MARGIN, y + 18, rank_name(lines.rank, lines.labels), weight="bold"))
        for column, rank in enumerate(sources):
            reads = [line for line in lines.reads if line.source_rank == rank.rank]
            parts.append(_cell(left + column * CELL_WIDTH, y, reads, _share(lines, reads), order))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _share(lines: RankLines, reads: Sequence[ReadLine]) -> float:
    """The part of a destination rank's bytes that some of its reads are."""
    by_token = any(line.bytes_per_token for line in lines.reads)

    def weight(of: Sequence[ReadLine]) -> float:
        return sum(line.bytes_per_token if by_token else line.bytes_per_request for line in of)

    return weight(reads) / (weight(lines.reads) or 1.0)


def _cell(x: int, y: int, reads: Sequence[ReadLine], share: float, order: dict[str, int]) -> str:
    frame = f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}"'
    if not reads:
        return f'{frame} fill="#ffffff" stroke="#e5e5e5"/>'
    # From a light to a full blue; white text on the dark half.
    light = round(92 - 50 * share)
    ink = "#ffffff" if light < 62 else "#10243e"
    texts = [_short(line, order) for line in reads]
    shown = texts if len(texts) <= MAX_LINES else [*texts[: MAX_LINES - 1], f"and {len(texts) - MAX_LINES + 1} more"]
    tooltip = "\n".join([f"{100 * share:.0f} % of this rank's bytes", *(_full(line, order) for line in reads)])
    body = "".join(_text(x + 6, y + 16 + i * LINE_HEIGHT, text, fill=ink, size=10) for i, text in enumerate(shown))
    return (
        f"<g><title>{escape(tooltip)}</title>"
        f'{frame} fill="hsl(212 70% {light}%)" stroke="#ffffff" stroke-width="2"/>{body}</g>'
    )


def _short(line: ReadLine, order: dict[str, int]) -> str:
    """What a cell shows of a read: units and layers, and what is special."""
    special = ""
    if not line.stripe.whole:
        special = f" {line.stripe.begin}-{line.stripe.end}/{line.stripe.of}"
    elif line.tokens.count > 1:
        special = f" t{line.tokens.index}/{line.tokens.count}"
    return f"u{line.units.begin}-{line.units.end - 1} L{layer_ranges(line, order)}{special}"


def _full(line: ReadLine, order: dict[str, int]) -> str:
    blocks = (
        "all blocks" if line.stripe.whole else f"blocks {line.stripe.begin} to {line.stripe.end} of {line.stripe.of}"
    )
    return (
        f"{line.group}: {' '.join(line.components)}, units {line.units}, layers {layer_ranges(line, order)}, "
        f"{line.tokens}, {blocks}"
    )


def _text(x: int, y: int, text: str, *, fill: str = "#111111", size: int = 11, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
