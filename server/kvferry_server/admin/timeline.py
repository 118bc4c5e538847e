"""The timeline: the last reads as bars over time, from the grant of a lease to its end."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry_server.admin.markup import Html, element
from kvferry_server.admin.status import Row

WIDTH = 960
NAMES = 260
BAR = 12
PITCH = 16
AXIS = 24
TICKS = 5
MAX_NAME = 40

COLOURS = {"valid": "#2b8a3e", "failed": "#c92a2a", "expired": "#e8590c", "cancelled": "#868e96"}


def timeline(reads: Sequence[Row]) -> Html:
    """Return the picture of ended reads, as `status.last_reads` returns them; the latest is on top."""
    if not reads:
        return element("p", "No read has ended yet.", class_="none")
    begin = max(read["began_s_ago"] for read in reads)
    end = min(read["ended_s_ago"] for read in reads)
    span = max(begin - end, 1e-6)
    scale = (WIDTH - NAMES) / span
    height = AXIS + PITCH * len(reads)
    parts = [_tick(index, begin, span, height) for index in range(TICKS)]
    for row, read in enumerate(reversed(reads)):
        y = AXIS + row * PITCH
        left = NAMES + (begin - read["began_s_ago"]) * scale
        width = max(2.0, (read["began_s_ago"] - read["ended_s_ago"]) * scale)
        name = read["request_id"] or f"publication {read['publication']}"
        parts.append(element("text", _cut(name), x=0, y=y + BAR - 2, font_size=11))
        bar = element(
            "rect",
            element("title", _tooltip(read)),
            x=f"{left:.1f}",
            y=y,
            width=f"{min(width, WIDTH - left):.1f}",
            height=BAR,
            fill=COLOURS.get(read["state"], "#000000"),
        )
        parts.append(bar)
    return element(
        "svg",
        *parts,
        class_="timeline",
        role="img",
        aria_label=f"the last {len(reads)} reads",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        height=height,
    )


def _tick(index: int, begin: float, span: float, height: int) -> Html:
    x = NAMES + index * (WIDTH - NAMES) / TICKS
    ago = begin - index * span / TICKS
    line = element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=0, y2=height, stroke="#dee2e6")
    label = element("text", f"{ago:.3g} s ago", x=f"{x + 3:.1f}", y=12, font_size=10, fill="#555555")
    return element("g", line, label)


def _tooltip(read: Row) -> str:
    took = read["began_s_ago"] - read["ended_s_ago"]
    state = f"{read['state']} ({read['reason']})" if read["reason"] else read["state"]
    return (
        f"lease {read['lease_number']}: {read['reader']} from {read['source']}, publication {read['publication']}, "
        f"request {read['request_id']}: {state} after {took:.3f} s, {read['bytes']} bytes"
    )


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
