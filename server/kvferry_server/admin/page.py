"""The page: what a person sees of a node server in a browser. Made here; a script only loads it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from kvferry_server.admin import status
from kvferry_server.admin.markup import Child, Html, element, join, table
from kvferry_server.admin.node_state import NodeState
from kvferry_server.admin.status import Row
from kvferry_server.admin.timeline import COLOURS, timeline
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.event_log import short

MAX_PAIRS = 8
"""Pairs of engines whose plans are linked to."""


def document(title: str, *content: Child) -> Html:
    """Return a whole document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("link", rel="stylesheet", href="/page.css"),
        element("script", src="/page.js", defer=""),
    )
    bar = element(
        "nav",
        element("a", "kvferry", href="/", class_="home"),
        element("a", "state", href="/statusz"),
        element("a", "metrics", href="/metrics"),
        element("label", element("input", type="checkbox", id="live", checked=""), "live "),
        element("span", id="updated"),
    )
    body = element("body", bar, element("main", *content))
    return join(Html("<!doctype html>\n"), element("html", head, body, lang="en"))


def front(node: NodeState, query: Mapping[str, str]) -> Html:
    """Return the first page: engines, reads, pinned requests and the timeline. Raises `InvalidField` for a token that
    none of its links has."""
    engines, more_engines = status.engine_rows(node, query.get("engines", ""))
    reads, more_reads = status.read_rows(node, query.get("reads", ""))
    requests, more_requests = status.request_rows(node, query.get("requests", ""))
    ended = status.last_reads(node)
    state = status.overview(node)
    return document(
        f"kvferry: {state['advertise']}",
        _heading(state),
        element("h2", "Engines"),
        _rows("engines", [_with_link(row) for row in engines]),
        _more("engines", more_engines, query),
        element("h2", "The last reads"),
        element("p", *(element("span", name, class_=name) for name in COLOURS), class_="legend"),
        timeline(ended),
        element("h2", "Reads"),
        element("p", "Under way, and ended ones whose outcome is kept.", class_="note"),
        _rows("reads", reads),
        _more("reads", more_reads, query),
        element("h2", "Requests"),
        element("p", "Published, and not yet acknowledged by their engine as released.", class_="note"),
        _rows("requests", requests),
        _more("requests", more_requests, query),
        element("h2", "Plans"),
        _plans(engines, ended),
    )


def engine_page(engine: Engine, first: int) -> Html:
    """Return the page of one engine's ranks, from one on; within a turn."""
    ref = engine.ref
    rows, following = status.rank_rows(engine, first)
    more = None
    if following:
        target = "/engine?" + urlencode({"engine_id": ref.engine_id, "first": following})
        more = element("p", element("a", "more ranks", href=target))
    title = f"engine {ref.engine_id}"
    groups = ", ".join(group.name for group in engine.first.groups) if engine.first is not None else ""
    return document(
        title,
        element("h1", title),
        element("p", f"Incarnation {short(ref.incarnation)}. {engine.num_ranks} ranks. Groups: {groups or 'none'}."),
        _rows("ranks", rows),
        more,
    )


def plan_page(source: str, destination: str) -> Html:
    """Return the page with the picture of a plan."""
    title = f"{destination} reads from {source}"
    picture = "/plan.svg?" + urlencode({"source": source, "destination": destination})
    return document(
        title,
        element("h1", title),
        element("img", src=picture, alt=f"who reads what from whom: {title}", class_="plan"),
        element("p", element("a", "the picture, or why there is none", href=picture)),
    )


def state_page(state: Row) -> Html:
    """Return the state of the node server as a table."""
    rows: list[tuple[Child, ...]] = [(name, _cell(value)) for name, value in state.items()]
    return document(
        "kvferry: state",
        element("h1", "State"),
        element("p", element("a", "as JSON", href="/statusz?format=json")),
        table(("what", "value"), rows, id="state"),
    )


def problem_page(problem: str) -> Html:
    """Return a page that says what is wrong."""
    return document("kvferry", element("h1", "That did not work"), element("p", problem))


def _heading(state: Row) -> Html:
    ready = "ready" if state["ready"] else f"not ready: {state['why_not_ready']}"
    leases = ", ".join(f"{count} {name}" for name, count in state["leases"].items()) or "none"
    oldest = "" if state["oldest_pin_s"] is None else f", the oldest for {state['oldest_pin_s']:.0f} s"
    return join(
        element("h1", f"Node server {state['advertise']}"),
        element("p", ready, class_="good" if state["ready"] else "bad"),
        element(
            "p",
            f"Version {state['version']}, epoch {state['epoch'][:8]}, up for {state['uptime_s']:.0f} s. "
            f"Live leases: {leases}. Pinned requests: {state['pinned']}{oldest}.",
        ),
    )


def _rows(name: str, rows: Sequence[Row]) -> Html:
    if not rows:
        return element("p", "None.", class_="none", id=name)
    cells: list[tuple[Child, ...]] = [tuple(map(_cell, row.values())) for row in rows]
    return table(tuple(column.replace("_", " ") for column in rows[0]), cells, id=name)


def _cell(value: object) -> Child:
    # `Html` is a `str`, and stays what it is.
    return value if isinstance(value, str) else json.dumps(value)


def _with_link(row: Row) -> Row:
    target = "/engine?" + urlencode({"engine_id": row["engine_id"]})
    return {**row, "engine_id": element("a", row["engine_id"], href=target)}


def _more(name: str, token: str, query: Mapping[str, str]) -> Html | None:
    if not token:
        return None
    return element("p", element("a", f"more {name}", href="/?" + urlencode({**query, name: token})))


def _plans(engines: Sequence[Row], ended: Sequence[Row]) -> Html:
    here = [row["engine_id"] for row in engines if row["state"] == "ready"]
    if not here:
        return element("p", "No engine is complete.", class_="none")
    known = [pair for pair in status.pairs(ended) if set(pair) <= set(here)][:MAX_PAIRS]
    links = [
        element(
            "li",
            element(
                "a",
                f"{reader} reads from {source}",
                href="/plan?" + urlencode({"source": source, "destination": reader}),
            ),
        )
        for source, reader in known
    ]
    options = [element("option", name, value=name) for name in here]
    form = element(
        "form",
        element("select", *options, name="destination", aria_label="destination"),
        " reads from ",
        element("select", *options, name="source", aria_label="source"),
        element("button", "draw"),
        action="/plan",
        method="get",
    )
    note = element(
        "p",
        "Engines whose home is another node server are not listed: kvferry plan takes ID@ADDRESS.",
        class_="note",
    )
    return join(element("ul", *links) if links else None, form, note)
