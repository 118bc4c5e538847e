"""Exposes clients' counts and measurements to Prometheus. Needs the package prometheus-client
(``kvferry[prometheus]``).

    from prometheus_client import REGISTRY
    from kvferry.integrations.prometheus import ClientCollector

    REGISTRY.register(ClientCollector(client))

Each scrape calls `Client.stats`; there is no work between scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kvferry import Client
from kvferry.errors import ForkedClient, InvalidField
from kvferry.stats import METRICS, ClientStats


class ClientCollector(Collector):
    """Collects the metrics of clients, their ports and caches included.

    Threading: scraped on any thread. In a child of a fork, where a client cannot be used, it collects no values.

    Args:
        clients: the client; or several clients by name. The name becomes the label ``client`` of their metrics.

    Raises:
        InvalidField: the argument is neither.
    """

    def __init__(self, clients: Client | Mapping[str, Client]) -> None:
        if isinstance(clients, Client):
            self._label: tuple[str, ...] = ()
            self._clients: list[tuple[tuple[str, ...], Client]] = [((), clients)]
            return
        if not isinstance(clients, Mapping) or not all(
            isinstance(name, str) and isinstance(client, Client) for name, client in clients.items()
        ):
            raise InvalidField("clients", type(clients), "a Client, or Clients by name")
        self._label = ("client",)
        self._clients = [((name,), client) for name, client in clients.items()]

    def collect(self) -> Iterable[Family]:
        """Return the present values of all metrics."""
        found = []
        for labels, client in self._clients:
            with suppress(ForkedClient):
                found.append((labels, client.stats()))
        return self._families(found)

    def describe(self) -> Iterable[Family]:
        """Return the metrics without values, by which a registry refuses a second collector of the same names."""
        return self._families([])

    def _families(self, found: Sequence[tuple[tuple[str, ...], ClientStats]]) -> Iterator[Family]:
        for path, metric in METRICS.items():
            value = attrgetter(path)
            yield metric.family([(labels, value(stats)) for labels, stats in found], self._label)
