"""The collector: reads the numbers of a node server when somebody scrapes it, and names them for Prometheus.

Labels are states, reasons, methods and the like, which this code fixes: no label has an engine, a request or a host, so
the number of series does not grow with the fleet. What each engine does is on the page, and in `kvferry engines`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import TypeVar

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import kvferry
from kvferry.stats import Measured
from kvferry_server.admin.node_state import ListenerLoad, NodeState
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.publications import PublicationOutcome, PublicationStage
from kvferry_server.domain.reads import LeaseState, Verdict

ENGINE_EVENTS = (
    "engine_opened",
    "engine_complete",
    "engine_lost",
    "engine_back",
    "engine_dead",
    "engine_replaced",
    "engine_evicted",
    "engine_retired",
    "engine_forgotten",
    "rank_registered",
    "rank_back",
    "rank_lost",
)
"""What happens to engines and ranks: the names of the events in the log."""

ENGINE_STATES = ("ready", "incomplete", "lost", "dead")


def engine_state(engine: Engine) -> str:
    """Return one of `ENGINE_STATES`."""
    if engine.dead:
        return "dead"
    if engine.lost_at is not None:
        return "lost"
    return "incomplete" if engine.num_missing or engine.first is None else "ready"


class NodeCollector(Collector):
    """Collects the metrics of one node server. Belongs to its event loop.

    Args:
        node: the node server.
    """

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._loads: Sequence[ListenerLoad] = ()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, loads: Sequence[ListenerLoad]) -> bytes:
        """Return all metrics in Prometheus' text format.

        Args:
            loads: what the listeners carry, as `NodeState.loads` returned it.
        """
        self._loads = loads
        with self._node.home.turn():
            return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise registering would collect, before the node server has started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as of now, within a turn of the home."""
        yield from self._of_the_process()
        yield from self._of_engines()
        yield from self._of_publications()
        yield from self._of_leases()
        yield from self._of_budgets()
        yield from self._of_calls()

    def _of_the_process(self) -> Iterator[Metric]:
        node, home = self._node, self._node.home
        build = GaugeMetricFamily("kvferry_build_info", "Always 1; labels say what runs.", labels=("version", "grpc"))
        build.add_metric((kvferry.__version__, grpc.__version__), 1)
        yield build
        yield GaugeMetricFamily("kvferry_start_time_seconds", "When the node server started.", node.started_at)
        yield GaugeMetricFamily("kvferry_ready", "1: it takes new work.", not node.why_not_ready())
        yield GaugeMetricFamily("kvferry_draining", "1: it drains.", home.draining)
        yield _histogram("kvferry_loop_lag_seconds", "How late timers of the event loop are.", node.lag.seen)
        help_text = "Memory that the process may have: the least of what its cgroups and its host allow."
        yield GaugeMetricFamily("kvferry_process_memory_limit_bytes", help_text, node.memory_limit)
        yield GaugeMetricFamily("kvferry_relayed_homes", "Homes that it relays ranks to.", node.relayed_homes())
        begun = node.handshakes()
        if begun is not None:
            yield CounterMetricFamily("kvferry_tls_handshakes", "TLS handshakes that have begun.", begun)
            if node.failed_handshakes is not None:
                failed = dict(sorted(node.failed_handshakes.items()))
                help_text = "TLS handshakes that failed, of connections to it and of its own to other homes."
                yield _counters("kvferry_tls_handshakes_failed", help_text, "reason", failed)
        expiry = node.certificate_expiry()
        if expiry is not None:
            name = "kvferry_certificate_expiry_timestamp_seconds"
            yield GaugeMetricFamily(name, "When the node server's certificate ends.", expiry)
        expiry = node.authorities_expiry()
        if expiry is not None:
            name = "kvferry_authority_expiry_timestamp_seconds"
            yield GaugeMetricFamily(name, "When the first authority ends that clients are checked against.", expiry)

    def _of_engines(self) -> Iterator[Metric]:
        home = self._node.home
        engines = home.engines.all_engines()
        states = Counter(engine_state(engine) for engine in engines)
        yield _gauges("kvferry_engines", "Engines by state.", "state", {name: states[name] for name in ENGINE_STATES})
        alive = [engine for engine in engines if not engine.dead]
        missing = sum(engine.num_missing for engine in alive)
        registered = sum(engine.num_ranks for engine in alive) - missing
        ranks = {"registered": registered, "missing": missing}
        yield _gauges("kvferry_ranks", "Ranks of engines that are not dead.", "state", ranks)
        watches = {
            "scheduler": sum(engine.lost_at is None for engine in engines),
            "rank": sum(len(engine.watched_ranks) for engine in engines),
        }
        yield _gauges("kvferry_watches", "Open Watches of engines' processes.", "role", watches)
        events = {name: home.journal.engine_events[name] for name in ENGINE_EVENTS}
        yield _counters("kvferry_engine_events", "What happened to engines and ranks.", "event", events)
        size = sum(engine.cache_bytes for engine in alive)
        yield GaugeMetricFamily("kvferry_cache_bytes", "Bytes of the registered caches.", size)

    def _of_publications(self) -> Iterator[Metric]:
        home, journal = self._node.home, self._node.home.journal
        stages = {stage.value: journal.stages[stage] for stage in PublicationStage if stage is not _FORGOTTEN}
        yield _gauges("kvferry_publications", "Publications by state.", "state", stages)
        help_text = "Publications that had all their blocks."
        yield CounterMetricFamily("kvferry_publications_published", help_text, journal.published)
        outcomes = _by_name(PublicationOutcome, journal.outcomes)
        yield _counters("kvferry_released", "Released publications by outcome.", "outcome", outcomes)
        oldest = next(iter(journal.pinned), None)
        age = 0.0 if oldest is None else home.clock.now() - oldest.first_at
        yield GaugeMetricFamily("kvferry_oldest_pin_age_seconds", "Age of the oldest publication not released.", age)
        help_text = "How long publications were pinned, from the first step to the release."
        yield _histogram("kvferry_hold_seconds", help_text, journal.hold)

    def _of_leases(self) -> Iterator[Metric]:
        home, journal = self._node.home, self._node.home.journal
        live = {state.name.lower(): journal.live_leases[state] for state in (LeaseState.WAITING, LeaseState.READING)}
        kept = home.records.lease_budget.used - sum(live.values())
        help_text = "Live leases by state, and ended ones whose outcome is kept."
        yield _gauges("kvferry_leases", help_text, "state", {**live, "kept": kept})
        help_text = "Reads that wait for a publication under a router's key, without a lease."
        yield GaugeMetricFamily("kvferry_router_waits", help_text, journal.waiting)
        yield CounterMetricFamily("kvferry_leases_granted", "Leases granted.", journal.granted)
        ended = {name: count for name, count in _by_name(LeaseState, journal.ended).items() if name not in live}
        yield _counters("kvferry_leases_ended", "Leases that ended, by state.", "state", ended)
        yield _histogram("kvferry_lease_seconds", "How long leases lasted.", journal.lasted)
        renewals = {result: journal.renewals[result] for result in ("extended", "refused")}
        yield _counters("kvferry_renewals", "Renewals by result.", "result", renewals)
        verdicts = _by_name(Verdict, journal.verdicts)
        yield _counters("kvferry_verdicts", "Verdicts on reports.", "verdict", verdicts)
        help_text = "Bytes of reads that ended valid, as their readers report."
        yield CounterMetricFamily("kvferry_read_bytes", help_text, journal.read_bytes)

    def _of_budgets(self) -> Iterator[Metric]:
        home, answers, requests = self._node.home, self._node.answers(), self._node.requests()
        budgets = {
            "memory": (home.memory.used, home.limits.memory),
            "leases": (home.records.lease_budget.used, home.limits.leases),
            "engines": (len(home.engines.all_engines()), home.limits.engines),
            "answers": (sum(budget.used for budget in answers), sum(budget.capacity for budget in answers)),
            "requests": (sum(budget.used for budget in requests), sum(budget.capacity for budget in requests)),
        }
        used = {name: used for name, (used, _) in budgets.items()}
        yield _gauges("kvferry_budget_used", "What is used of a budget: bytes, leases, engines.", "budget", used)
        most = {name: limit for name, (_, limit) in budgets.items()}
        yield _gauges("kvferry_budget_limit", "How large a budget is.", "budget", most)
        yield from self._of_engine_budgets()

    def _of_engine_budgets(self) -> Iterator[Metric]:
        home, limits = self._node.home, self._node.home.limits
        kept = [home.records.books.get(engine.ref) for engine in home.engines.all_engines()]
        books = [book for book in kept if book is not None]
        used = {
            "waiting_reads": max((book.waiting_reads.used for book in books), default=0),
            "waiting_declines": max((len(book.declined) for book in books), default=0),
            "publications": max((book.num_arrived for book in books), default=0),
            "checksum_bytes": max((book.checksum_bytes for book in books), default=0),
        }
        help_text = "What the engine that uses most of a budget of its own uses of it."
        yield _gauges("kvferry_engine_budget_used", help_text, "budget", used)
        most = {name: int(getattr(limits, name)) for name in used}
        yield _gauges("kvferry_engine_budget_limit", "How large a budget of one engine is.", "budget", most)

    def _of_calls(self) -> Iterator[Metric]:
        calls, journal = self._node.calls, self._node.home.journal
        results = CounterMetricFamily("kvferry_calls", "Calls by result.", labels=("method", "result"))
        for (method, result), count in sorted(calls.results.items()):
            results.add_metric((method, result), count)
        yield results
        taken = HistogramMetricFamily("kvferry_call_seconds", "How long calls take.", labels=("method",))
        for method, measured in sorted(calls.taken.items()):
            taken.add_metric((method,), *_buckets(measured))
        yield taken
        sent = dict(sorted(journal.notifications.items()))
        yield _counters("kvferry_notifications", "Notifications in calls of Notify.", "kind", sent)
        refused = CounterMetricFamily(
            "kvferry_notifications_refused", "Notifications that were refused.", labels=("kind", "reason")
        )
        for (kind, reason), count in sorted(journal.refused.items()):
            refused.add_metric((kind, reason), count)
        yield refused
        yield from self._of_listeners()

    def _of_listeners(self) -> Iterator[Metric]:
        labels = ("listener", "kind")
        running = GaugeMetricFamily("kvferry_calls_in_progress", "Calls and streams in progress.", labels=labels)
        most = GaugeMetricFamily("kvferry_calls_limit", "Calls and streams that may be in progress.", labels=labels)
        connections = GaugeMetricFamily("kvferry_connections", "Open connections.", labels=("listener",))
        limit = GaugeMetricFamily("kvferry_connections_limit", "Connections that may be open.", labels=("listener",))
        for load in self._loads:
            running.add_metric((load.name, "call"), load.calls)
            running.add_metric((load.name, "stream"), load.streams)
            most.add_metric((load.name, "call"), load.max_calls)
            most.add_metric((load.name, "stream"), load.max_streams)
            connections.add_metric((load.name,), load.connections)
            limit.add_metric((load.name,), load.max_connections)
        yield from (running, most, connections, limit)


_FORGOTTEN = PublicationStage.FORGOTTEN

Named = TypeVar("Named", bound=Enum)


def _by_name(names: type[Named], counts: Counter[Named]) -> dict[str, int]:
    """Return the counts of all members of an enum by their names in lower case, zeros included: a rate needs a value
    to start from."""
    return {member.name.lower(): counts[member] for member in names}


def _gauges(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    return _labelled(GaugeMetricFamily(name, help_text, labels=(label,)), values)


def _counters(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    return _labelled(CounterMetricFamily(name, help_text, labels=(label,)), values)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: dict[str, int]) -> Metric:
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def _histogram(name: str, help_text: str, measured: Measured) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, help_text, *_buckets(measured))


def _buckets(measured: Measured) -> tuple[list[tuple[str, float]], float]:
    """Return what was measured as Prometheus counts it, and its sum."""
    found = measured.distribution()
    return [("+Inf" if bound == math.inf else f"{bound:g}", count) for bound, count in found.up_to()], found.sum
