"""The page that shows a node server in a browser; a script only reloads it. At its head is what is wrong, the worst
first, and what to do next (docs/runbook.md). Values in a template are escaped, unless they are `Html`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from string import Formatter
from typing import Any, NamedTuple
from urllib.parse import urlencode

from kvferry._summaries import RECOVERING, duration, engine_row, ranges, request_row, size, transfer_row
from kvferry.stats import shown
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.admin.node_state import NodeState, Row, last_reads, overview
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.journal import RECENT, BadEnd
from kvferry_server.domain.limits import MAX_NAMED_NODES, MAX_NAMED_RANKS
from kvferry_server.domain.values import LeaseState
from kvferry_server.servicers import introspection

PAGE_SIZE = 50  # Entries of a listing on one page
TICKS = 4
ENDS = ("valid", "failed", "expired", "cancelled")  # How reads end
COLOURED = ("failed", "dead", "lost", "incomplete", "missing", "expired", "cancelled", "valid", "ready")
"""Words of states that have colours, in page.css, the worst first."""

MAX_ENGINES = 50  # That are described; the rest are counted
WORST_FIRST = ("dead", "lost", "incomplete")  # States of engines

LOOK = "Unless it was stopped on purpose, look at its scheduler's log, and start it again."
COMES_BACK = f"Wait whether it comes back. {LOOK}"
RANKS_GONE = "Look at the logs of these ranks and of their nodes, and restart the engine."
RANKS_ABSENT = (
    "Look at the logs of these ranks. Frequent: another token, a node server that cannot reach this one, or one whose "
    "relay_homes does not name it."
)
FAILED = "Look in the log of the reader's rank, which names the source's rank; then at the network between them."
EXPIRED = "Look at the reader: it died, it hangs, or it cannot reach this node server."
NEVER_CAME = "Look at the source: it has not published what the reader waited for."

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


def front(node: NodeState, query: Mapping[str, str]) -> Html:
    """Return the first page. Raises `InvalidField` for a page token that no link of the page has."""
    home = node.home

    def asked(name: str) -> dict[str, Any]:
        return {"page_size": PAGE_SIZE, "page_token": query.get(name, "")}

    engines = introspection.engines(home, ipb.ListEnginesRequest(**asked("engines")))
    reads = introspection.transfers(home, ipb.ListTransfersRequest(**asked("reads")))
    requests = introspection.requests(home, ipb.ListRequestsRequest(**asked("requests")))
    hosts = {(engine.ref.engine_id, engine.ref.incarnation): engine.host for engine in node.engines}
    with_hosts = [
        engine_row(summary) | {"Host": hosts.get((summary.engine.engine_id, summary.engine.incarnation), "")}
        for summary in engines.engines
    ]
    state = overview(node)
    pinned = state["oldest_pin_s"]
    content = html(
        FRONT,
        state=state,
        epoch=state["epoch"][:8],
        problems=_problems(node, recovering=reads.recovering),
        uptime=duration(state["uptime_s"]),
        leases=", ".join(f"{count} {name}" for name, count in state["leases"].items()) or "none",
        oldest="" if pinned is None else f", the oldest for {duration(pinned)}",
        engines=_listing(query, "engines", with_hosts, engines.next_page_token),
        legend=each('<span class="{0}">{0}</span>', ENDS),
        timeline=_timeline(last_reads(node)),
        reads=_listing(query, "reads", [*map(transfer_row, reads.transfers)], reads.next_page_token),
        requests=_listing(query, "requests", [*map(request_row, requests.requests)], requests.next_page_token),
    )
    return html(DOCUMENT, title=f"kvferry: {state['advertise']}", content=content)


def problem_page(problem: str) -> Html:
    """Return a page that explains an error."""
    return html(DOCUMENT, title="kvferry", content=html("<h1>That did not work</h1><p>{}</p>", problem))


def _problems(node: NodeState, *, recovering: bool) -> Html:
    with node.home.turn():
        found, left = problems(node, recovering=recovering)
    if not found:
        return html('<p class="good">Ready. No problem is known.</p>')
    more = html("<p>{} more engines are dead, lost or incomplete.</p>", left) if left else ""
    return html("<h2>Problems</h2><ul>{}</ul>{}", each(PROBLEM, found), more)


def _listing(query: Mapping[str, str], name: str, rows: Sequence[Mapping[str, object]], following: str) -> Html:
    """Draw a page of a list, with a link to the following one; `query` is that of this page."""
    if not rows:
        return html('<p class="none" id="{}">None.</p>', name)
    head = each("{}", (html('<th class="{}">{}</th>', *_column(title)) for title in rows[0]))
    body = each("<tr>{}</tr>", (each("{}", (_cell(*cell) for cell in row.items())) for row in rows))
    table = html(TABLE, name=name, head=head, body=body)
    if not following:
        return table
    return html('{}<p><a href="/?{}">more {}</a></p>', table, urlencode({**query, name: following}), name)


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


class Problem(NamedTuple):
    """One thing that is wrong."""

    state: str  # `dead`, `lost`, `incomplete`, `failed`, `expired`, or one of the node server itself
    what: str
    next_step: str


def problems(node: NodeState, *, recovering: bool) -> tuple[Sequence[Problem], int]:
    """Return the problems, and the number of further engines that are not ready. `recovering`: the home waits for its
    engines, or for their snapshots. Call within a turn."""
    now = node.home.clock.now()
    ill = [engine for engine in node.engines if engine.state in WORST_FIRST]
    ill.sort(key=lambda engine: (WORST_FIRST.index(engine.state), engine.ref.engine_id))
    engines = [_of_engine(engine, now) for engine in ill[:MAX_ENGINES]]
    bad = reversed(node.home.journal.bad_ends.items())
    reads = [_of_reads(kind, count, now - last) for kind, (count, last) in bad if last > now - RECENT]
    return [*_of_node(node, recovering), *engines, *reads], max(0, len(ill) - MAX_ENGINES)


def _of_node(node: NodeState, recovering: bool) -> Iterator[Problem]:
    if why := node.why_not_healthy():
        yield Problem("ill", why, "Restart this node server: its state is soft, and reads under way go on.")
    if why := node.why_not_ready():
        yield Problem("unready", f"it takes no new work: {why}", "Wait, and restart it if this lasts.")
    if recovering:
        yield Problem("recovering", f"it {RECOVERING}", "Wait: engines come back by themselves.")


def _of_engine(engine: Engine, now: float) -> Problem:
    name = engine.ref.engine_id
    if engine.lost_at is None:
        what, next_step = _incomplete(engine)
        return Problem(engine.state, f"{name!r}: {what}", next_step)
    away, ttl = f"its scheduler has been away for {duration(now - engine.lost_at)}", duration(engine.times.engine_ttl)
    if engine.dead:
        return Problem("dead", f"{name!r}: {away}; its publications have ended", LOOK)
    return Problem("lost", f"{name!r}: {away}; it counts as dead after {ttl}", COMES_BACK)


def _incomplete(engine: Engine) -> tuple[str, str]:
    """Return which ranks an engine lacks, and what to do."""
    named = engine.missing_ranks(MAX_NAMED_RANKS)
    gone = [rank for rank in named if rank in engine.lost_ranks]
    absent = [rank for rank in named if rank not in engine.lost_ranks]
    what = [f"gone: {_ranks(gone)}"] if gone else []
    what += [f"not registered: {_ranks(absent)}"] if absent else []
    if left := engine.num_missing - len(named):
        what.append(f"and {left} more")
    if nodes := sorted({engine.nodes[rank] for rank in gone if engine.lost_with_node(rank)}):
        what.append(f"lost nodes: {', '.join(nodes[:MAX_NAMED_NODES])}")
    missing = f"{engine.num_missing} of {engine.num_ranks} ranks are missing; {'; '.join(what)}"
    return missing if what else "no rank has registered", RANKS_GONE if gone else RANKS_ABSENT


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _of_reads(kind: BadEnd, count: int, ago: float) -> Problem:
    """Sum up reads that ended badly; the last of them so many seconds ago."""
    when = f"{count} reads, the last" if count > 1 else "a read,"
    why = f", {kind.reason}" if kind.reason else ", which waited in vain" if kind.in_vain else ""
    what = f"{kind.reader!r} from {kind.source!r}: {when} {duration(ago)} ago{why}"
    ended = FAILED if kind.state is LeaseState.FAILED else EXPIRED
    return Problem(shown(kind.state), what, NEVER_CAME if kind.in_vain else ended)
