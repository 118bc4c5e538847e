"""The timeline: the last reads as bars over time, from the grant of a lease to its end."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry_server.admin.markup import Html, html
from kvferry_server.admin.status import Row

WIDTH = 960
NAMES = 260
BAR = 12
PITCH = 16
AXIS = 24
TICKS = 5
MAX_NAME = 40

COLOURS = {"valid": "#2b8a3e", "failed": "#c92a2a", "expired": "#e8590c", "cancelled": "#868e96"}

PICTURE = """<svg class="timeline" role="img" aria-label="the last {count} reads"
 viewBox="0 0 {width} {height}" width="{width}" height="{height}">{parts}</svg>"""
TICK = """<g><line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#dee2e6"></line>
<text x="{label:.1f}" y="12" font-size="10" fill="#555555">{ago:.3g} s ago</text></g>"""
READ = """<text x="0" y="{text}" font-size="11">{name}</text>
<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{colour}"><title>{tooltip}</title></rect>"""


def timeline(reads: Sequence[Row]) -> Html:
    """Return the picture of ended reads, as `status.last_reads` returns them; the latest is on top."""
    if not reads:
        return Html('<p class="none">No read has ended yet.</p>')
    begin = max(read["began_s_ago"] for read in reads)
    span = max(begin - min(read["ended_s_ago"] for read in reads), 1e-6)
    scale, height = (WIDTH - NAMES) / span, AXIS + PITCH * len(reads)
    parts = []
    for index in range(TICKS):
        x = NAMES + index * (WIDTH - NAMES) / TICKS
        parts.append(html(TICK, x=x, label=x + 3, height=height, ago=begin - index * span / TICKS))
    for row, read in enumerate(reversed(reads)):
        name = read["request_id"] or f"publication {read['publication']}"
        top, left = AXIS + row * PITCH, NAMES + (begin - read["began_s_ago"]) * scale
        took = read["began_s_ago"] - read["ended_s_ago"]
        bar = html(
            READ,
            text=top + BAR - 2,
            name=name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…",
            left=left,
            top=top,
            width=min(max(2.0, took * scale), WIDTH - left),
            height=BAR,
            colour=COLOURS.get(read["state"], "#000000"),
            tooltip=_tooltip(read, took),
        )
        parts.append(bar)
    return html(PICTURE, count=len(reads), width=WIDTH, height=height, parts=Html("".join(parts)))


def _tooltip(read: Row, took: float) -> str:
    state = f"{read['state']} ({read['reason']})" if read["reason"] else read["state"]
    return (
        f"lease {read['lease_number']}: {read['reader']} from {read['source']}, publication {read['publication']}, "
        f"request {read['request_id']}: {state} after {took:.3f} s, {read['bytes']} bytes"
    )
