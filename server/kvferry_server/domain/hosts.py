"""Whose share a caller's work counts on: that of his host."""

from __future__ import annotations

import ipaddress


def host_of(peer: str) -> str:
    """Who a peer of gRPC's counts as: its host; of IPv6 the network of 64 bits, which one host may have whole. Callers
    on the UNIX socket all look alike, and are empty."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = address.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    return host_of_address(host)


def host_of_address(text: str) -> str:
    """As `host_of`, for an address without a port."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
