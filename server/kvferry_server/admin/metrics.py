"""The metrics of a node server, all in `METRICS`: the exposition and docs/monitoring.md are made from it. Counts of
events are fields of the home's `Journal`, of `CallCounts` or of `NodeState`; other values are computed at a scrape.

This code fixes the values of labels. Only the signals for autoscalers have engine_ids, of which a home has at most
`Limits.engines`; an engine that starts anew keeps its series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

import kvferry
from kvferry.stats import Metric, metrics_of
from kvferry_server.admin.node_state import CallCounts, NodeState
from kvferry_server.domain.engine import STATES, Engine
from kvferry_server.domain.journal import LIVE, Journal

Value: TypeAlias = Callable[[NodeState], Any]
"""Computes the value of a metric: a number, or numbers by the values of the labels. None: the metric is left out."""

Bounded: TypeAlias = Callable[[NodeState], Mapping[Any, tuple[int, int]]]
"""Computes use and limit, by the values of the labels."""

Row: TypeAlias = tuple[Metric, Value]


def _gauge(name: str, documentation: str, value: Value, **labels: Sequence[str]) -> Row:
    return Metric("gauge", f"kvferry_{name}", documentation, labels), value


def _bounded(used: str, limit: str, documentation: str, value: Bounded, **labels: Sequence[str]) -> tuple[Row, Row]:
    """Return the row of a use and the row of its limit."""
    most = f"The limit of kvferry_{used}."
    return (
        _gauge(used, documentation, lambda node: {key: pair[0] for key, pair in value(node).items()}, **labels),
        _gauge(limit, most, lambda node: {key: pair[1] for key, pair in value(node).items()}, **labels),
    )


def _counted(kind: type, of: Callable[[NodeState], object]) -> Iterator[Row]:
    for name, metric in metrics_of(kind).items():
        yield metric, lambda node, name=name: getattr(of(node), name)  # type: ignore[misc]


def _ranks(node: NodeState) -> Mapping[str, int]:
    missing = sum(engine.num_missing for engine in node.alive)
    return {"registered": sum(engine.num_ranks for engine in node.alive) - missing, "missing": missing}


def _by_engine(name: str, documentation: str, of: Callable[[Engine, float], float]) -> Row:
    """Return the row of a value of each engine that is not dead, from the present, by engine_id. Until an engine's
    snapshot has come, what it has pinned is not known, and 0 would be wrong. Right after a start of the home two
    incarnations may have one name: the larger value counts."""

    def found(node: NodeState) -> Mapping[str, float]:
        now, values = node.home.clock.now(), dict[str, float]()
        for engine in node.alive:
            if engine.recovering:
                continue
            values[engine.ref.engine_id] = max(of(engine, now), values.get(engine.ref.engine_id, 0))
        return values

    return _gauge(name, documentation, found, engine=())


def _leases(node: NodeState) -> Mapping[str, int]:
    home = node.home
    live = {state.name.lower(): home.journal.live_leases[state] for state in LIVE}
    return {**live, "kept": home.records.lease_budget.used - sum(live.values())}


def _budgets(node: NodeState) -> Mapping[str, tuple[int, int]]:
    home = node.home
    used = {"memory": home.memory.used, "leases": home.records.lease_budget.used, "engines": len(node.engines)}
    found = {name: (value, getattr(home.limits, name)) for name, value in used.items()}
    for name in ("answers", "requests"):
        budgets = [listener.budgets[name] for listener in node.listeners]
        found[name] = sum(each.used for each in budgets), sum(each.capacity for each in budgets)
    return found


def _engine_budgets(node: NodeState) -> Mapping[str, tuple[int, int]]:
    engines = node.engines
    used = {
        "publications": max((len(engine.publications) for engine in engines), default=0),
        "checksum_bytes": max((engine.checksum_bytes for engine in engines), default=0),
    }
    return {name: (most, getattr(node.home.limits, name)) for name, most in used.items()}


def _calls(node: NodeState) -> Mapping[tuple[str, str], tuple[int, int]]:
    kinds = {"call": "calls", "stream": "streams"}
    budgets = {
        (listener.name, kind): listener.budgets[name] for kind, name in kinds.items() for listener in node.listeners
    }
    return {labels: (budget.used, budget.capacity) for labels, budget in budgets.items()}


METRICS: tuple[Row, ...] = (
    _gauge(
        "build_info",
        "Always 1; labels say what runs.",
        lambda node: {(kvferry.__version__, grpc.__version__): 1},
        version=(),
        grpc=(),
    ),
    _gauge(
        "process_memory_limit_bytes",
        "Memory that the process may have: the least that its cgroups and its host allow.",
        lambda node: node.memory_limit,
    ),
    _gauge("start_time_seconds", "When the node server started.", lambda node: node.started_at),
    _gauge("ready", "1 if the node server takes new work.", lambda node: not node.why_not_ready()),
    _gauge("draining", "1 if the node server drains.", lambda node: node.home.draining),
    _gauge("engines", "Engines.", lambda node: Counter(one.state for one in node.engines), state=STATES),
    _gauge("ranks", "Ranks of engines that are not dead.", _ranks, state=("registered", "missing")),
    _gauge(
        "watches",
        "Open Watches of engines' processes.",
        lambda node: {
            "scheduler": sum(engine.lost_at is None for engine in node.engines),
            "rank": sum(len(engine.watched_ranks) for engine in node.engines),
        },
        role=("scheduler", "rank"),
    ),
    *_counted(Journal, lambda node: node.home.journal),
    _gauge(
        "oldest_pin_age_seconds",
        "Age of the oldest publication that is not released.",
        lambda node: node.oldest_pin_age() or 0.0,
    ),
    _by_engine(
        "engine_pinned_publications",
        "Publications of an engine that wait for readers, or are being read.",
        lambda engine, _: len(engine.pinned),
    ),
    _by_engine(
        "engine_pinned_bytes",
        "Bytes that they hold on all ranks. A shared block counts once for each: the sum may exceed the cache.",
        lambda engine, _: engine.pinned_bytes,
    ),
    _by_engine(
        "engine_oldest_pin_age_seconds",
        "Age of the oldest of them; 0: there is none.",
        lambda engine, now: now - next((one.first_at for one in engine.pinned), now),
    ),
    _by_engine(
        "engine_cache_bytes",
        "Bytes of the registered caches of an engine; memory that groups of one pool share counts once.",
        lambda engine, _: engine.cache_bytes,
    ),
    _gauge(
        "leases",
        "Live leases (waiting: for blocks), and ended ones whose outcome is kept.",
        _leases,
        state=("waiting", "reading", "kept"),
    ),
    *_bounded(
        *("budget_used", "budget_limit"),
        "Use of a budget of the home; for answers and requests, the bytes that the process works on.",
        _budgets,
        budget=("memory", "leases", "engines", "answers", "requests"),
    ),
    *_bounded(
        *("engine_budget_used", "engine_budget_limit"),
        "Use of a budget that each engine has, by the engine that uses most of it.",
        _engine_budgets,
        budget=("publications", "checksum_bytes"),
    ),
    *_counted(CallCounts, lambda node: node.calls),
    *_bounded(
        *("calls_in_progress", "calls_limit"),
        "Calls in progress.",
        _calls,
        listener=("unix", "tcp"),
        kind=("call", "stream"),
    ),
    *_bounded(
        *("connections", "connections_limit"),
        "Open connections.",
        lambda node: {one.name: (node.connections.get(one.name, 0), one.max_connections) for one in node.listeners},
        listener=(),
    ),
    *_counted(NodeState, lambda node: node),
    _gauge("relayed_homes", "Homes to which the node server relays ranks.", lambda node: node.relays.num_homes),
    (
        Metric(
            "counter",
            "kvferry_tls_handshakes_failed",
            "TLS handshakes that failed, incoming and to other homes; not those that a peer broke off. Only from "
            "kvferryd with TLS: gRPC reports them only in its log, which an embedded server leaves to its process.",
            {"reason": ("no_certificate", "untrusted", "expired", "not_tls", "version", "rejected_by_peer", "other")},
        ),
        lambda node: node.failed_handshakes() if node.certificates and node.failed_handshakes else None,
    ),
    _gauge(
        "certificate_expiry_timestamp_seconds",
        "When the node server's certificate ends. Only with TLS.",
        lambda node: node.certificates and node.certificates.expiry,
    ),
    _gauge(
        "authority_expiry_timestamp_seconds",
        "When the first authority of client certificates ends. Only with `--tls-ca`.",
        lambda node: node.certificates and node.certificates.authorities_expiry,
    ),
)
"""All metrics of a node server, in the order of docs/monitoring.md."""


class NodeCollector(Collector):
    """Collects the metrics of one node server. Belongs to its event loop."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        with self._node.home.turn():
            return generate_latest(self._registry)

    def describe(self) -> Iterator[Family]:
        # Otherwise the registration would collect, before the node server has started.
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Yield the current metrics, within a turn of the home."""
        for metric, value in METRICS:
            found = value(self._node)
            if found is not None:
                yield metric.family([((), found)])
