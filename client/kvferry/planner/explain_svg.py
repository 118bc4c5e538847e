"""A picture of each destination rank's reads from each source rank.

A row is a destination rank, a column a source rank. A cell is darker the more of the row's bytes come from the column's
rank, and shows the units, layers, tokens and blocks read, the bytes, and the path. Where the cell is too small, its
tooltip has the full text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import chain

from kvferry.planner.explain import (
    ReadLine,
    bytes_text,
    explain,
    layer_order,
    layer_ranges,
    source_loads,
)
from kvferry.planner.plan import ReadPlan

CELL_WIDTH = 176
CELL_HEIGHT = 72
LINE_HEIGHT = 14
MARGIN = 16
HEADING = 92
LEGEND = 66
NAME_WIDTH = 124
MIN_WIDTH = 560
"""The width that the legend needs."""

MAX_LINES = 4
MAX_CHARACTERS = 28
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title desc" font-family="{FONT}" font-size="11">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(_description(plans, explained))}</desc>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(MARGIN, MARGIN + 14, title, size=15, weight="bold"),
    ]
    if plans:
        parts.append(_text(left + 6, top - 38, f"source ranks of {plans[0].source.engine_id}", fill="#555555"))
        parts.append(_text(MARGIN, top - 8, "destination ranks", fill="#555555"))
    for column, rank in enumerate(sources):
        x = left + column * CELL_WIDTH
        parts.append(_text(x + 6, top - 22, rank.label, weight="bold"))
        parts.append(_text(x + 6, top - 8, f"serves {100 * loads[rank.rank]:.0f} % of all bytes", fill="#555555"))
    for row, (plan, lines) in enumerate(zip(plans, explained, strict=True)):
        y = top + row * CELL_HEIGHT
        parts.append(_text(MARGIN, y + 18, plan.rank.label, weight="bold"))
        shares = source_loads(plan.source, lines)
        for column, rank in enumerate(sources):
            reads = [line for line in lines if line.source.rank == rank.rank]
            parts.append(_cell(left + column * CELL_WIDTH, y, reads, shares[rank.rank], order))
    parts.extend(_legend(bottom + 24))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _description(plans: Sequence[ReadPlan], explained: Iterable[Sequence[ReadLine]]) -> str:
    """The picture in words: the source ranks that each destination rank reads from."""
    sentences = []
    for plan, lines in zip(plans, explained, strict=True):
        names = dict.fromkeys(line.source.label for line in lines)
        sentences.append(f"{plan.rank.label} reads from {', '.join(names) or 'no rank'}.")
    return " ".join(sentences)


def _legend(y: int) -> list[str]:
    parts = [_text(MARGIN, y, "share of a destination rank's bytes: 0 %", fill="#555555", size=10)]
    x = MARGIN + 248
    for index, share in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        parts.append(
            f'<rect x="{x + index * 18}" y="{y - 10}" width="18" height="12" fill="{_fill(share)}" stroke="#e5e5e5"/>'
        )
    return [
        *parts,
        _text(x + 96, y, "100 %", fill="#555555", size=10),
        _text(MARGIN, y + 16, "[a, b): units a to b - 1, of KV heads or state channels", fill="#555555", size=10),
        _text(MARGIN, y + 32, "staged: by way of staging memory; direct: into the blocks", fill="#555555", size=10),
    ]


def _fill(share: float) -> str:
    """White for nothing, else a blue, the darker the larger the share."""
    if not share:
        return "#ffffff"
    # Not hsl(): some programs that convert pictures do not know it.
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(212 / 360, _lightness(share) / 100, 0.7))


def _lightness(share: float) -> int:
    return round(92 - 50 * share)


def _cell(x: int, y: int, reads: Sequence[ReadLine], share: float, order: dict[str, int]) -> str:
    frame = f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}"'
    if not reads:
        return f'{frame} fill="#ffffff" stroke="#e5e5e5"/>'
    # White text on the dark half.
    ink = "#ffffff" if _lightness(share) < 62 else "#10243e"
    tooltip = "\n".join([f"{100 * share:.0f} % of this rank's bytes", *(_full(line, order) for line in reads)])
    body = "".join(
        _text(x + 6, y + 16 + i * LINE_HEIGHT, _cut(text), fill=ink, size=10)
        for i, text in enumerate(_lines(reads, order))
    )
    return (
        f"<g><title>{escape(tooltip)}</title>"
        f'{frame} fill="{_fill(share)}" stroke="#ffffff" stroke-width="2"/>{body}</g>'
    )


def _lines(reads: Sequence[ReadLine], order: dict[str, int]) -> list[str]:
    """The lines of a cell: its read, or the first of several, and the bytes of all."""
    first, per_token = reads[0], sum(line.bytes_per_token for line in reads)
    per_request = sum(line.bytes_per_request for line in reads)
    if len(reads) == 1:
        texts = [f"units {first.units}", f"layers {layer_ranges(first, order)}", *filter(None, [_part(first)])]
        return [*texts, f"{bytes_text(per_token, per_request)}, {first.path}"]
    texts = [" ".join([str(line.units), f"layers {layer_ranges(line, order)}", _part(line)]) for line in reads]
    if len(texts) > MAX_LINES - 1:
        texts = [*texts[: MAX_LINES - 2], f"and {len(texts) - MAX_LINES + 2} more reads"]
    sums = bytes_text(per_token, 0 if per_token else per_request) + (" + states" if per_token and per_request else "")
    return [*texts, f"{sums}, {' or '.join(sorted({line.path for line in reads}))}"]


def _part(line: ReadLine) -> str:
    """The blocks or tokens read, if not all of them."""
    if not line.stripe.whole:
        return f"blocks {line.stripe}"
    return f"tokens {line.tokens.index}/{line.tokens.count}" if line.tokens.count > 1 else ""


def _full(line: ReadLine, order: dict[str, int]) -> str:
    return (
        f"{line.group}: {' '.join(line.components)}, units {line.units}, layers {layer_ranges(line, order)}, "
        f"{line.tokens}, {'all blocks' if line.stripe.whole else f'blocks {line.stripe}'}, "
        f"{bytes_text(line.bytes_per_token, line.bytes_per_request)}, {line.path}: {line.reason}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1].rstrip()}…"


def _text(x: int, y: int, text: str, *, fill: str = "#111111", size: int = 11, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}" font-weight="{weight}">{escape(text.rstrip())}</text>'
    )
