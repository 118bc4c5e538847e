"""The page that shows a node server in a browser. It is made here; a script only reloads it.

Values in a template are escaped, unless they are `Html`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Formatter
from typing import Any
from urllib.parse import urlencode

from kvferry._summaries import RECOVERING, engine_row, request_row, transfer_row
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.admin import status
from kvferry_server.admin.limits import PAGE_SIZE
from kvferry_server.admin.node_state import NodeState
from kvferry_server.admin.status import Row
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.event_log import short
from kvferry_server.servicers import lists

WIDTH = 960
NAMES = 260
BAR = 12
PITCH = 16
AXIS = 24
TICKS = 5
MAX_NAME = 40

COLOURS = {"valid": "#2b8a3e", "failed": "#c92a2a", "expired": "#e8590c", "cancelled": "#868e96"}

TIMELINE = """<svg class="timeline" role="img" aria-label="the last {count} reads"
 viewBox="0 0 {width} {height}" width="{width}" height="{height}">{parts}</svg>"""
TICK = """<g><line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#dee2e6"></line>
<text x="{label:.1f}" y="12" font-size="10" fill="#555555">{ago:.3g} s ago</text></g>"""
READ = """<text x="0" y="{text}" font-size="11">{name}</text>
<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{colour}"><title>{tooltip}</title></rect>"""
DOCUMENT = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<link rel="stylesheet" href="/page.css"><script src="/page.js" defer=""></script></head>
<body>
<nav><a href="/" class="home">kvferry</a><a href="/statusz">state</a><a href="/metrics">metrics</a>
<label><input type="checkbox" id="live" checked="">live </label><span id="updated"></span></nav>
<main>{content}</main>
</body>
</html>
"""
FRONT = """<h1>Node server {state[advertise]}</h1>
<p class="{how}">{ready}</p>
<p>Version {state[version]}, epoch {epoch}, up for {state[uptime_s]:.0f} s. Live leases: {leases}. Pinned requests:
{state[pinned]}{oldest}.</p>
{recovering}<h2>Engines</h2>{engines}
<p class="note">Who would read what from whom: kvferry plan, with --svg as a picture.</p>
<h2>The last reads</h2><p class="legend">{legend}</p>{timeline}
<h2>Reads</h2><p class="note">Under way, and ended ones whose outcome is kept.</p>{reads}
<h2>Requests</h2><p class="note">Published, and not yet acknowledged by their engine as released.</p>{requests}
"""
ENGINE = """<h1>engine {engine_id}</h1>
<p>Incarnation {incarnation}. {count} ranks. Groups: {groups}.</p>{ranks}"""
TABLE = '<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


class _Escaping(Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        return value if isinstance(value, Html) else escape(format(value, format_spec))


def html(template: str, *values: object, **named: object) -> Html:
    """Fill an HTML template of `str.format`; values are escaped, unless they are `Html`."""
    return Html(_Escaping().vformat(template, values, named))


def each(template: str, values: Iterable[object]) -> Html:
    """Fill a template once for each value, and join the results."""
    return Html("".join(html(template, value) for value in values))


def document(title: str, content: Html) -> Html:
    """Return a whole document."""
    return html(DOCUMENT, title=title, content=content)


def front(node: NodeState, query: Mapping[str, str]) -> Html:
    """Return the first page: engines, reads, pinned requests and the timeline. Raises `InvalidField` for a page token
    that no link of the page has."""
    home = node.home

    def shown(name: str, rows: Sequence[Mapping[str, object]], following: str) -> Html:
        return _rows(name, rows, f"more {name}", f"/?{urlencode({**query, name: following})}" if following else "")

    def asked(name: str) -> dict[str, Any]:
        return {"page_size": PAGE_SIZE, "page_token": query.get(name, "")}

    engines = lists.engines(home, ipb.ListEnginesRequest(**asked("engines")))
    reads = lists.transfers(home, ipb.ListTransfersRequest(**asked("reads")))
    requests = lists.requests(home, ipb.ListRequestsRequest(**asked("requests")))
    hosts = {(engine.ref.engine_id, engine.ref.incarnation): engine.host for engine in node.engines}
    linked = [
        {
            **engine_row(summary),
            "Engine": _link(summary.engine.engine_id, "/engine", engine_id=summary.engine.engine_id),
            "Host": hosts.get((summary.engine.engine_id, summary.engine.incarnation), ""),
        }
        for summary in engines.engines
    ]
    state = status.overview(node)
    pinned = state["oldest_pin_s"]
    content = html(
        FRONT,
        state=state,
        epoch=state["epoch"][:8],
        how="good" if state["ready"] else "bad",
        ready="ready" if state["ready"] else f"not ready: {state['why_not_ready']}",
        leases=", ".join(f"{count} {name}" for name, count in state["leases"].items()) or "none",
        recovering=html('<p class="bad" id="recovering">It {}.</p>', RECOVERING) if reads.recovering else "",
        oldest="" if pinned is None else f", the oldest for {pinned:.0f} s",
        engines=shown("engines", linked, engines.next_page_token),
        legend=each('<span class="{0}">{0}</span>', COLOURS),
        timeline=_timeline(status.last_reads(node)),
        reads=shown("reads", [*map(transfer_row, reads.transfers)], reads.next_page_token),
        requests=shown("requests", [*map(request_row, requests.requests)], requests.next_page_token),
    )
    return document(f"kvferry: {state['advertise']}", content)


def engine_page(engine: Engine, first: int) -> Html:
    """Return the page of an engine's ranks, from `first` on. Call within a turn."""
    ref = engine.ref
    rows, following = status.rank_rows(engine, first)
    more = f"/engine?{urlencode({'engine_id': ref.engine_id, 'first': following})}" if following else ""
    content = html(
        ENGINE,
        engine_id=ref.engine_id,
        incarnation=short(ref.incarnation),
        count=engine.num_ranks,
        groups=", ".join(group.name for group in engine.first.groups) if engine.first is not None else "none",
        ranks=_rows("ranks", rows, "more ranks", more),
    )
    return document(f"engine {ref.engine_id}", content)


def state_page(state: Row) -> Html:
    """Return the state of the node server as a table."""
    content = '<h1>State</h1><p><a href="/statusz?format=json">as JSON</a></p>{}'
    rows = [{"what": name, "value": value} for name, value in state.items()]
    return document("kvferry: state", html(content, _rows("state", rows)))


def problem_page(problem: str) -> Html:
    """Return a page that explains an error."""
    return document("kvferry", html("<h1>That did not work</h1><p>{}</p>", problem))


def _rows(name: str, rows: Sequence[Mapping[str, object]], more: str = "", target: str = "") -> Html:
    if not rows:
        return html('<p class="none" id="{}">None.</p>', name)
    head = each("<th>{}</th>", (title.lstrip(">") for title in rows[0]))
    body = each("<tr>{}</tr>", (each("<td>{}</td>", _cells(row.values())) for row in rows))
    table = html(TABLE, name=name, head=head, body=body)
    return html('{}<p><a href="{}">{}</a></p>', table, target, more) if target else table


def _cells(values: Iterable[object]) -> Iterable[str]:
    # `Html` is a `str`, and stays `Html`.
    return (value if isinstance(value, str) else json.dumps(value) for value in values)


def _link(text: str, path: str, **query: str) -> Html:
    return html('<a href="{}?{}">{}</a>', path, urlencode(query), text)


def _timeline(reads: Sequence[Row]) -> Html:
    """Draw ended reads as bars over time, from the grant of a lease to its end, the latest on top."""
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
        state = f"{read['state']} ({read['reason']})" if read["reason"] else read["state"]
        tooltip = (
            f"lease {read['lease_number']}: {read['reader']} from {read['source']}, publication {read['publication']}, "
            f"request {read['request_id']}: {state} after {took:.3f} s, {read['bytes']} bytes"
        )
        bar = html(
            READ,
            text=top + BAR - 2,
            name=name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…",
            left=left,
            top=top,
            width=min(max(2.0, took * scale), WIDTH - left),
            height=BAR,
            colour=COLOURS.get(read["state"], "#000000"),
            tooltip=tooltip,
        )
        parts.append(bar)
    return html(TIMELINE, count=len(reads), width=WIDTH, height=height, parts=Html("".join(parts)))
