"""The state of a node server as plain values: for `/statusz` and the page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

import kvferry
from kvferry._summaries import size
from kvferry.stats import shown
from kvferry_server.admin.limits import PAGE_SIZE
from kvferry_server.admin.node_state import NodeState
from kvferry_server.domain.engine import Engine

Row: TypeAlias = "dict[str, Any]"


def overview(node: NodeState) -> Row:
    """Return the state of the whole node server, without lists that grow with its load."""
    home, journal = node.home, node.home.journal
    with home.turn() as now:
        states = [engine.state for engine in node.engines]
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
            "limits": asdict(home.limits),
            "settings": dict(node.settings),
        }


def _by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    return {shown(key): count for key, count in counts.items() if count}


def last_reads(node: NodeState) -> list[Row]:
    """Return the last reads that ended, oldest first; times are seconds before now."""
    with node.home.turn() as now:
        return [
            {
                **asdict(read),
                "began_s_ago": round(now - read.granted_at, 6),
                "ended_s_ago": round(now - read.ended_at, 6),
            }
            for read in node.home.journal.last_reads
        ]


def rank_rows(engine: Engine, first: int) -> tuple[list[Row], int]:
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
                "Labels": "" if registration is None else registration.geometry.label,
                "Planes": 0 if registration is None else len(registration.geometry.planes),
                "Cache": "" if registration is None else size(registration.cache_bytes),
                "Node": engine.nodes.get(rank, ""),
                "Watched": "yes" if rank in engine.watched_ranks else "no",
            }
        )
    return rows, following if following < engine.num_ranks else 0
