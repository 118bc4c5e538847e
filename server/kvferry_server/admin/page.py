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
from kvferry_server.admin.limits import MAX_LABEL, PAGE_SIZE
from kvferry_server.admin.node_state import NodeState, Row, last_reads, overview
from kvferry_server.admin.problems import Problem, problems
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.journal import short
from kvferry_server.servicers import introspection

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
PROBLEM = """<li class="{state}"><p><strong>{state}</strong> {engine}</p><p>{what}</p>
<p class="next"><b>Next:</b> {next_step}</p></li>"""
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
    linked = [
        {
            **engine_row(summary),
            "Engine": _link(summary.engine.engine_id, "/engine", engine_id=summary.engine.engine_id),
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
        engines=shown("engines", linked, engines.next_page_token),
        legend=each('<span class="{0}">{0}</span>', ENDS),
        timeline=_timeline(last_reads(node)),
        reads=shown("reads", [*map(transfer_row, reads.transfers)], reads.next_page_token),
        requests=shown("requests", [*map(request_row, requests.requests)], requests.next_page_token),
    )
    return document(f"kvferry: {state['advertise']}", content)


def engine_page(engine: Engine, first: int) -> Html:
    """Return the page of an engine's ranks, from `first` on. Call within a turn."""
    ref = engine.ref
    rows, following = _rank_rows(engine, first)
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


def _rank_rows(engine: Engine, first: int) -> tuple[list[Row], int]:
    """Return a page of an engine's ranks from `first` on, and the first rank of the next page; 0: it is the last."""
    rows: list[Row] = []
    following = first + PAGE_SIZE
    for rank in range(first, min(following, engine.num_ranks)):
        registration = engine.ranks.get(rank)
        state = "missing" if registration is None else "lost" if rank in engine.lost_ranks else "registered"
        rows.append(
            {
                "Rank": rank,
                "State": state,
                "Labels": "" if registration is None else registration.geometry.label[:MAX_LABEL],
                "Planes": 0 if registration is None else len(registration.geometry.planes),
                "Cache": "" if registration is None else size(registration.cache_bytes),
                "Node": engine.nodes.get(rank, ""),
                "Watched": "yes" if rank in engine.watched_ranks else "no",
            }
        )
    return rows, following if following < engine.num_ranks else 0


def state_page(state: Row) -> Html:
    """Return the state of the node server as a table."""
    content = '<h1>State</h1><p><a href="/statusz?format=json">as JSON</a></p>{}'
    rows = [{"What": name, "Value": _human(name, value)} for name, value in state.items()]
    return document("kvferry: state", html(content, _rows("state", rows)))


def problem_page(problem: str) -> Html:
    """Return a page that explains an error."""
    return document("kvferry", html("<h1>That did not work</h1><p>{}</p>", problem))


def _human(name: str, value: object) -> str:
    """Return a value of the state for people, with the unit that its name says; fractions are durations."""
    if isinstance(value, Mapping):
        return ", ".join(f"{each}: {_human(each, inside)}" for each, inside in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool) or value is None:
        return "none" if value is None else "yes" if value else "no"
    if isinstance(value, float) or (isinstance(value, int) and name.endswith("_s")):
        return duration(value)
    return size(value) if isinstance(value, int) and name.endswith(("bytes", "memory")) else str(value)


def _problems(found: Sequence[Problem], left: int) -> Html:
    if not found:
        return html('<p class="good">Ready. No problem is known.</p>')
    items = (
        html(
            PROBLEM,
            state=problem.state,
            engine=_link(problem.engine_id, "/engine", engine_id=problem.engine_id) if problem.engine_id else "",
            what=problem.what,
            next_step=problem.next_step,
        )
        for problem in found
    )
    more = html("<p>{} more engines are dead, lost or incomplete.</p>", left) if left else ""
    return html("<h2>Problems</h2><ul>{}</ul>{}", each("{}", items), more)


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


def _link(text: str, path: str, **query: str) -> Html:
    return html('<a href="{}?{}">{}</a>', path, urlencode(query), text)


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
