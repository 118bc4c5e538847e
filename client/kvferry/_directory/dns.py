"""A directory in DNS: the headless service of the node servers, whose records Kubernetes makes from its EndpointSlices.

SRV records of ``_kvferry._tcp.NAME`` have host and port of each home. The first label of a host is also taken as an
engine_id: in a StatefulSet that is the pod's name. Without SRV records, the A and AAAA records of NAME are the homes,
at one port, and no engine is listed.
"""

from __future__ import annotations

from typing import Any

import dns.exception
import dns.resolver

from kvferry._directory.directory import Directory, Listed, Listing, unavailable
from kvferry._wire.channel import Address

SERVICE = "_kvferry._tcp"
"""Service and protocol of the SRV records: the port in a Kubernetes Service is named ``kvferry``."""

ASK_AT_LEAST, ASK_AT_MOST = 1.0, 30.0  # Seconds between questions; between them, the answers' TTL decides
QUESTION_TIMEOUT = 5.0  # Seconds for one question, repetitions included


class DnsDirectory(Directory):
    """A name in DNS, `domain`, asked again when its records' TTL has passed. `port` is for homes without an SRV record.
    `server` is the IP address and port of the name server; None: those of ``/etc/resolv.conf``."""

    def __init__(self, name: str, domain: str, port: int, server: tuple[str, int] | None) -> None:
        super().__init__(name)
        self._domain = domain
        self._port = port
        self._server = server

    def _follow(self) -> float:
        try:
            listed, ttl = self._ask()
        except dns.exception.DNSException as error:
            raise unavailable(self.name, str(error) or type(error).__name__) from None
        self._learn(listed)
        return min(max(ttl, ASK_AT_LEAST), ASK_AT_MOST)

    def _ask(self) -> tuple[Listed, float]:
        """Return what DNS lists now, and for how many seconds that is valid."""
        resolver = dns.resolver.Resolver(configure=self._server is None)
        if self._server is not None:
            resolver.nameservers, resolver.port = [self._server[0]], self._server[1]
        resolver.lifetime = QUESTION_TIMEOUT
        # Without the pod's search path, and without cached answers.
        resolver.search, resolver.cache = [], None
        services, ttl = _records(resolver, f"{SERVICE}.{self._domain}", "SRV")
        if not services:
            addresses, ttl = _records(resolver, self._domain, "A", "AAAA")
            if not addresses:
                # Kubernetes answers the same for a misspelt name and for a service without pods.
                raise unavailable(self.name, "no SRV, A or AAAA record")
            return Listed(frozenset(str(Address(host=str(address), port=self._port)) for address in addresses)), ttl
        homes: dict[str, Listing] = {}
        aliases: set[str] = set()
        for record in services:
            host = record.target.to_text(omit_final_dot=True)
            home = str(Address(host=host, port=record.port))
            homes[home] = Listing(host.partition(".")[0], home)
            # References have the value of --advertise, which may be the address instead of the name.
            addresses, lasts = _records(resolver, host, "A", "AAAA")
            aliases.update(str(Address(host=str(address), port=record.port)) for address in addresses)
            ttl = min(ttl, lasts)
        return Listed(frozenset(homes), tuple(homes[home] for home in sorted(homes)), frozenset(aliases)), ttl


def _records(resolver: dns.resolver.Resolver, name: str, *kinds: str) -> tuple[list[Any], float]:
    """Return the records of these kinds of a name, and for how many seconds all are valid."""
    found: list[Any] = []
    ttls: list[float] = []
    for kind in kinds:
        try:
            answer = resolver.resolve(name, kind)
        except (dns.resolver.NoAnswer, dns.resolver.NXDOMAIN):
            continue
        found += answer
        ttls.append(answer.rrset.ttl if answer.rrset is not None else 0.0)
    return found, min(ttls, default=0.0)
