"""The state of a node server as plain values: for `/statusz` and the page. Lists come in pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

import kvferry
from kvferry._wire.status import failures_of, reason_name
from kvferry.stats import shown
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.admin.limits import PAGE_SIZE
from kvferry_server.admin.metrics import engine_state
from kvferry_server.admin.node_state import NodeState
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.event_log import short
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.ordered import Ordered
from kvferry_server.domain.reads import LeaseState
from kvferry_server.servicers import encode
from kvferry_server.servicers.paging import page

Row: TypeAlias = "dict[str, Any]"
Page: TypeAlias = "tuple[list[Row], str]"
"""Rows, and the token of the next page; empty: this is the last page."""


def overview(node: NodeState) -> Row:
    """Return the state of the whole node server, without lists that grow with its load."""
    home, journal = node.home, node.home.journal
    with home.turn() as now:
        states = [engine_state(engine) for engine in node.engines]
        oldest = next(iter(journal.pinned), None)
        certificates = node.certificates
        expiry, authorities = (certificates.expiry, certificates.authorities_expiry) if certificates else (None, None)
        return {
            "version": kvferry.__version__,
            "epoch": home.epoch.hex(),
            "ready": not node.why_not_ready(),
            "why_not_ready": node.why_not_ready(),
            "healthy": not node.why_not_healthy(),
            "why_not_healthy": node.why_not_healthy(),
            "draining": home.draining,
            "uptime_s": round(time.time() - node.started_at, 3),
            "addresses": list(node.addresses),
            "advertise": home.advertise,
            "certificate_ends_in_s": None if expiry is None else round(expiry - time.time()),
            "authority_ends_in_s": None if authorities is None else round(authorities - time.time()),
            "engines": {state: states.count(state) for state in sorted(set(states))},
            "publications": _by_name(journal.stages),
            "pinned": len(journal.pinned),
            "oldest_pin_s": None if oldest is None else round(now - oldest.first_at, 3),
            "leases": _by_name(journal.live_leases),
            "leases_ended": _by_name(journal.ended),
            "released": _by_name(journal.outcomes),
            "memory_bytes": home.memory.used,
            "limits": {field.name: getattr(home.limits, field.name) for field in fields(home.limits)},
            "settings": dict(node.settings),
        }


def _by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    return {shown(key): count for key, count in counts.items() if count}


def engine_rows(node: NodeState, token: str) -> Page:
    """Return a page of the engines that are not dead. Raises `InvalidField`."""
    home = node.home
    with home.turn():
        listed: dict[EngineRef, Ordered[Engine]] = {}
        for engine in home.engines.engines():
            listed[engine.ref] = Ordered[Engine]()
            listed[engine.ref].add((), engine)
        peers = {ref: engine.host for ref, engines in listed.items() for _, engine in engines.after(None)}

        def row(engine: Engine) -> ipb.EngineSummary:
            return encode.engine_summary(engine, *home.records.counts(engine.ref))

        summaries, following = page(listed, row, PAGE_SIZE, token)
    rows = [
        {
            "engine_id": summary.engine.engine_id,
            "incarnation": short(summary.engine.incarnation),
            "state": ipb.EngineState.Name(summary.state).removeprefix("ENGINE_STATE_").lower(),
            "ranks": summary.num_ranks,
            "missing": summary.num_missing,
            "missing_ranks": list(summary.missing_ranks),
            "publications": summary.publications,
            "leases": summary.leases,
            "cache_bytes": summary.cache_bytes,
            "peer": peers.get(EngineRef(summary.engine.engine_id, summary.engine.incarnation), ""),
        }
        for summary in summaries
    ]
    return rows, following


def request_rows(node: NodeState, token: str) -> Page:
    """Return a page of the home's publications. Raises `InvalidField`."""
    with node.home.turn() as now:
        listed = node.home.records.listed_publications()
        summaries, following = page(listed, partial(encode.request_summary, now=now), PAGE_SIZE, token)
    rows = [
        {
            "engine_id": summary.engine.engine_id,
            "publication": summary.publication,
            "request_id": summary.request_id,
            "state": ipb.RequestState.Name(summary.state).removeprefix("REQUEST_STATE_").lower(),
            "blocks": summary.blocks,
            "leases": summary.leases,
            "reads": f"{summary.reads_valid} of {summary.expected_reads}",
            "last_failure": reason_name(summary.last_failure),
            "age_s": round(summary.age.ToTimedelta().total_seconds(), 3),
        }
        for summary in summaries
    ]
    return rows, following


def read_rows(node: NodeState, token: str) -> Page:
    """Return a page of the home's reads. Raises `InvalidField`."""
    with node.home.turn() as now:
        listed = node.home.records.listed_reads()
        summaries, following = page(listed, partial(encode.transfer_summary, now=now), PAGE_SIZE, token)
    rows = [
        {
            "lease_number": summary.read.lease_number,
            "source": summary.source.engine_id,
            "reader": summary.read.reader.engine_id,
            "publication": summary.publication,
            "request_id": summary.request_id,
            "router_key": summary.router_key,
            "state": LeaseState(summary.read.state).name.lower(),
            "reason": failures_of(summary.reports),
            "parts": summary.parts,
            "lease_remaining_s": round(summary.lease_remaining.ToTimedelta().total_seconds(), 3),
            "reported": f"{summary.read.reported} of {summary.read.parties}",
            "bytes": summary.read.bytes,
        }
        for summary in summaries
    ]
    return rows, following


def last_reads(node: NodeState) -> list[Row]:
    """Return the last reads that ended, oldest first; times are seconds before now."""
    with node.home.turn() as now:
        return [
            {
                "lease_number": read.lease_number,
                "source": read.source.engine_id,
                "reader": read.reader.engine_id,
                "publication": read.publication,
                "request_id": read.request_id,
                "state": read.state.name.lower(),
                "reason": read.reason,
                "began_s_ago": round(now - read.granted_at, 6),
                "ended_s_ago": round(now - read.ended_at, 6),
                "bytes": read.bytes,
            }
            for read in node.home.journal.last_reads
        ]


def rank_rows(engine: Engine, first: int) -> tuple[list[Row], int]:
    """Return a page of an engine's ranks from `first` on, and the first rank of the next page; 0: it is the last."""
    rows: list[Row] = []
    for rank in range(first, engine.num_ranks):
        if len(rows) == PAGE_SIZE:
            return rows, rank
        registration = engine.ranks.get(rank)
        state = "missing" if registration is None else "lost" if rank in engine.lost_ranks else "registered"
        rows.append(
            {
                "rank": rank,
                "state": state,
                "labels": "" if registration is None else registration.geometry.label,
                "planes": 0 if registration is None else len(registration.geometry.planes),
                "cache_bytes": 0 if registration is None else registration.cache_bytes,
                "node": engine.nodes.get(rank, ""),
                "watched": rank in engine.watched_ranks,
            }
        )
    return rows, 0
