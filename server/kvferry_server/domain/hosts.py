"""Hosts, against which limits and budgets count calls."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def host_of(peer: str) -> str:
    """Return the host of a gRPC peer, such as ``ipv4:10.0.0.1:4711``. An IPv6 address counts as its 64-bit network,
    because one host may own all its addresses. Callers on the UNIX socket cannot be told apart: their host is empty."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = address.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    return host_of_address(host)


def host_of_address(text: str) -> str:
    """Return the host of an IP address without a port, as `host_of` does."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
