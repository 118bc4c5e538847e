"""The page that shows a node server in a browser. It is made here; a script only reloads it.

Values in a template are escaped, unless they are `Html`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Formatter
from typing import Any
from urllib.parse import urlencode

from kvferry._summaries import duration, engine_row, request_row, size, transfer_row
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.admin.node_state import NodeState, Row, last_reads, overview
from kvferry_server.admin.problems import Problem, problems
from kvferry_server.servicers import introspection

PAGE_SIZE = 50  # Entries of a listing on one page
TICKS = 4
ENDS = ("valid", "failed", "expired", "cancelled")  # How reads end
COLOURED = ("failed", "dead", "lost", "incomplete", "missing", "expired", "cancelled", "valid", "ready")
"""Words of states that have colours, in page.css, the worst first."""

TIMELINE = """<ol class="timeline" aria-label="the last {count} reads"><li class="axis"><span></span>
<svg aria-hidden="true">{ticks}</svg></li>{reads}</ol>"""
TICK = '<text x="{at}%" y="12">{ago} ago</text>'
READ = """<li><span>{name}</span><svg role="img" class="{state}"><title>{tooltip}</title>
<rect x="{left:.2f}%" width="{width:.2f}%"></rect></svg></li>"""
DOCUMENT = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<link rel="stylesheet" href="/page.css"><script src="/page.js" defer=""></script></head>
<body>
<nav><a href="/" class="home">kvferry</a><a href="/statusz">state</a><a href="/metrics">metrics</a>
<label><input type="checkbox" id="live" checked="">live </label><span id="updated"></span></nav>
<main>{content}</main>
</body>
</html>
"""
FRONT = """<h1>Node server {state[advertise]}</h1>
<section id="problems">{problems}</section>
<p>Version {state[version]}, epoch {epoch}, up for {uptime}. Live leases: {leases}. Pinned requests:
{state[pinned]}{oldest}.</p>
<h2>Engines</h2>{engines}
<p class="note">Who would read what from whom: kvferry plan, with --svg as a picture.</p>
<h2>Requests</h2><p class="note">Published, and not yet acknowledged by their engine as released.</p>{requests}
<h2>Reads</h2><p class="note">Under way, and ended ones whose outcome is kept.</p>{reads}
<h2>The last reads</h2><p class="legend">{legend}</p>{timeline}
"""
PROBLEM = """<li class="{0.state}"><p><strong>{0.state}</strong></p><p>{0.what}</p>
<p class="next"><b>Next:</b> {0.next_step}</p></li>"""
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
    """Return the first page: problems, engines, pinned requests, reads and the timeline. Raises `InvalidField` for a
    page token that no link of the page has."""
    home = node.home

    def shown(name: str, rows: Sequence[Mapping[str, object]], following: str) -> Html:
        return _rows(name, rows, f"more {name}", f"/?{urlencode({**query, name: following})}" if following else "")

    def asked(name: str) -> dict[str, Any]:
        return {"page_size": PAGE_SIZE, "page_token": query.get(name, "")}

    engines = introspection.engines(home, ipb.ListEnginesRequest(**asked("engines")))
    reads = introspection.transfers(home, ipb.ListTransfersRequest(**asked("reads")))
    requests = introspection.requests(home, ipb.ListRequestsRequest(**asked("requests")))
    hosts = {(engine.ref.engine_id, engine.ref.incarnation): engine.host for engine in node.engines}
    with_hosts = [
        {
            **engine_row(summary),
            "Host": hosts.get((summary.engine.engine_id, summary.engine.incarnation), ""),
        }
        for summary in engines.engines
    ]
    state = overview(node)
    with home.turn():
        found, left = problems(node, recovering=reads.recovering)
    pinned = state["oldest_pin_s"]
    content = html(
        FRONT,
        state=state,
        epoch=state["epoch"][:8],
        problems=_problems(found, left),
        uptime=duration(state["uptime_s"]),
        leases=", ".join(f"{count} {name}" for name, count in state["leases"].items()) or "none",
        oldest="" if pinned is None else f", the oldest for {duration(pinned)}",
        engines=shown("engines", with_hosts, engines.next_page_token),
        legend=each('<span class="{0}">{0}</span>', ENDS),
        timeline=_timeline(last_reads(node)),
        reads=shown("reads", [*map(transfer_row, reads.transfers)], reads.next_page_token),
        requests=shown("requests", [*map(request_row, requests.requests)], requests.next_page_token),
    )
    return document(f"kvferry: {state['advertise']}", content)


def problem_page(problem: str) -> Html:
    """Return a page that explains an error."""
    return document("kvferry", html("<h1>That did not work</h1><p>{}</p>", problem))


def _problems(found: Sequence[Problem], left: int) -> Html:
    if not found:
        return html('<p class="good">Ready. No problem is known.</p>')
    more = html("<p>{} more engines are dead, lost or incomplete.</p>", left) if left else ""
    return html("<h2>Problems</h2><ul>{}</ul>{}", each(PROBLEM, found), more)


def _rows(name: str, rows: Sequence[Mapping[str, object]], more: str = "", target: str = "") -> Html:
    if not rows:
        return html('<p class="none" id="{}">None.</p>', name)
    head = each("{}", (html('<th class="{}">{}</th>', *_column(title)) for title in rows[0]))
    body = each("<tr>{}</tr>", (each("{}", (_cell(*cell) for cell in row.items())) for row in rows))
    table = html(TABLE, name=name, head=head, body=body)
    return html('{}<p><a href="{}">{}</a></p>', table, target, more) if target else table


def _column(title: str) -> tuple[str, str]:
    """Return the class and the name of a column."""
    return "number" if title.startswith(">") else "", title.lstrip(">")


def _cell(title: str, value: object) -> Html:
    kind, name = _column(title)
    if title == "State":
        kind = next((word for word in COLOURED if word in str(value)), "")
    # `Html` is a `str`, and stays `Html`. The name stands before the value where a screen is narrow.
    return html('<td class="{}" data-name="{}">{}</td>', kind, name, value if isinstance(value, str) else f"{value}")


def _timeline(reads: Sequence[Row]) -> Html:
    """Draw ended reads as bars over time, from the grant of a lease to its end, the latest on top."""
    if not reads:
        return Html('<p class="none">No read has ended yet.</p>')
    begin = max(read["began_s_ago"] for read in reads)
    span = max(begin - min(read["ended_s_ago"] for read in reads), 1e-6)
    ticks = (html(TICK, at=100 * tick / TICKS, ago=_precise(begin - tick * span / TICKS)) for tick in range(TICKS))
    bars = (_bar(read, begin, span) for read in reversed(reads))
    return html(TIMELINE, count=len(reads), ticks=each("{}", ticks), reads=each("{}", bars))


def _bar(read: Row, begin: float, span: float) -> Html:
    took = read["began_s_ago"] - read["ended_s_ago"]
    state = f"{read['state']} ({read['reason']})" if read["reason"] else read["state"]
    tooltip = (
        f"lease {read['lease_number']}: {read['reader']} from {read['source']}, publication {read['publication']}, "
        f"request {read['request_id']}: {state} after {_precise(took)}, {size(read['bytes'])}"
    )
    return html(
        READ,
        name=read["request_id"] or f"publication {read['publication']}",
        state=read["state"],
        left=100 * (begin - read["began_s_ago"]) / span,
        width=100 * took / span,
        tooltip=tooltip,
    )


def _precise(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s"
