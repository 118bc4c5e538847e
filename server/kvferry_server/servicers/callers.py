"""Who calls, as gRPC has verified it."""

from __future__ import annotations

import ipaddress
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc.aio

from kvferry_server.identity import NOBODY, Names

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def names_of(context: Context) -> Names:
    """The names in the caller's certificate: its subject alternative names, else its common name. None without mutual
    TLS, and on a UNIX socket."""
    found = context.auth_context()
    for kind in ("x509_subject_alternative_name", "x509_common_name"):
        if names := frozenset(found.get(kind, ())):
            return names
    return NOBODY


def peer_of(context: Context) -> str:
    """The host that calls, for its share of what this server has room for: its address, without the port; of IPv6 the
    network, since a host has as many addresses as it likes. Empty for a caller on this host: processes of a host cannot
    be told apart."""
    kind, _, address = context.peer().partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = unquote(address).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return "" if found.is_loopback else str(ipaddress.ip_network((found, 64), strict=False))
        found = found.ipv4_mapped
    return "" if found.is_loopback else str(found)
