"""A picture of each destination rank's reads from each source rank.

A row is a destination rank, a column a source rank. A cell is darker the more of the row's bytes come from the column's
rank, and shows the reads, their bytes, and the path. Its tooltip has the full text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import chain

from kvferry.planner.explain import ReadLine, bytes_text, cells_of, explain, layer_order, layer_ranges, source_loads
from kvferry.planner.plan import ReadPlan

CELL_WIDTH = 176
CELL_HEIGHT = 72
LINE_HEIGHT = 14
MARGIN = 16
HEADING = 92
LEGEND = 50
NAME_WIDTH = 124
MIN_WIDTH = 560
"""The width that the legend needs."""

MAX_LINES = 4
MAX_CHARACTERS = 28
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
BLUE = "#1f57a4"
GREY = "#555555"


def to_svg(plans: Sequence[ReadPlan]) -> str:
    """The plans of one pair of engines as an SVG document."""
    explained = [explain(plan) for plan in plans]
    sources = plans[0].source.ranks if plans else ()
    loads = source_loads(plans[0].source, [*chain(*explained)]) if plans else {}
    order = layer_order(plans)
    left, top = MARGIN + NAME_WIDTH, MARGIN + HEADING
    width = max(MIN_WIDTH, left + len(sources) * CELL_WIDTH + MARGIN)
    bottom = top + len(explained) * CELL_HEIGHT
    height = bottom + LEGEND + MARGIN
    title = f"{plans[0].destination.engine_id} reads from {plans[0].source.engine_id}" if plans else "no plan"
    names = (", ".join(dict.fromkeys(line.source.label for line in lines)) or "no rank" for lines in explained)
    described = [f"{plan.rank.label} reads from {name}." for plan, name in zip(plans, names, strict=True)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title desc" font-family="{FONT}" font-size="11">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(" ".join(described) or title)}</desc>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(MARGIN, MARGIN + 14, title, size=15, weight="bold"),
        _text(left + 6, top - 38, "source ranks", fill=GREY),
        _text(MARGIN, top - 8, "destination ranks", fill=GREY),
    ]
    for column, rank in enumerate(sources):
        x = left + column * CELL_WIDTH
        parts.append(_text(x + 6, top - 22, rank.label, weight="bold"))
        parts.append(_text(x + 6, top - 8, f"serves {100 * loads[rank.rank]:.0f} % of all bytes", fill=GREY))
    for row, (plan, lines) in enumerate(zip(plans, explained, strict=True)):
        y = top + row * CELL_HEIGHT
        parts.append(_text(MARGIN, y + 18, plan.rank.label, weight="bold"))
        shares = source_loads(plan.source, lines)
        for column, rank in enumerate(sources):
            reads = [line for line in lines if line.source.rank == rank.rank]
            parts.append(_cell(left + column * CELL_WIDTH, y, reads, shares[rank.rank], order))
    legend = (
        "darker: more of the destination rank's bytes; [a, b): units (KV heads, channels) a to b - 1",
        "staged: by way of staging memory; direct: into the blocks",
    )
    parts += [_text(MARGIN, bottom + 24 + 16 * at, text, fill=GREY, size=10) for at, text in enumerate(legend)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(x: int, y: int, reads: Sequence[ReadLine], share: float, order: dict[str, int]) -> str:
    frame = f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" stroke="#e5e5e5"'
    if not reads:
        return f'{frame} fill="#ffffff"/>'
    full = [", ".join((*cells_of(line, order)[1:], line.reason)) for line in reads]
    tooltip = "\n".join([f"{100 * share:.0f} % of this rank's bytes", *full])
    texts = [f"{line.units} layers {layer_ranges(line, order)} {_part(line)}" for line in reads]
    if len(texts) > MAX_LINES - 1:
        texts = [*texts[: MAX_LINES - 2], f"and {len(texts) - MAX_LINES + 2} more reads"]
    per_token, per_request = (sum(getattr(line, f"bytes_per_{of}") for line in reads) for of in ("token", "request"))
    # The tooltip has the bytes of states that are read beside tokens.
    sums = bytes_text(per_token, 0 if per_token else per_request)
    texts.append(f"{sums}, {' or '.join(sorted({line.path for line in reads}))}")
    # White text on the dark half.
    ink = "#ffffff" if share > 0.5 else "#10243e"
    body = "".join(
        _text(x + 6, y + 16 + at * LINE_HEIGHT, _cut(text), fill=ink, size=10) for at, text in enumerate(texts)
    )
    return (
        f'<g><title>{escape(tooltip)}</title>{frame} fill="{BLUE}" fill-opacity="{0.1 + 0.8 * share:.2f}"/>{body}</g>'
    )


def _part(line: ReadLine) -> str:
    """The blocks or tokens read, if not all of them."""
    if not line.stripe.whole:
        return f"blocks {line.stripe}"
    return f"tokens {line.tokens.index}/{line.tokens.count}" if line.tokens.count > 1 else ""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1].rstrip()}…"


def _text(x: int, y: int, text: str, *, fill: str = "#111111", size: int = 11, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}" font-weight="{weight}">{escape(text.rstrip())}</text>'
    )
