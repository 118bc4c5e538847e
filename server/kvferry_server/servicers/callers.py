"""Who calls, as gRPC has verified it."""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import grpc.aio

from kvferry_server.domain.hosts import host_of
from kvferry_server.domain.identity import NOBODY, Names

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

LOOPBACK_6 = "::/64"
"""The network of ::1, as `host_of` says it."""


def names_of(context: Context) -> Names:
    """The names in the caller's certificate: its subject alternative names, else its common name, else its digest. None
    without mutual TLS, and on a UNIX socket."""
    found = context.auth_context()
    for kind in ("x509_subject_alternative_name", "x509_common_name"):
        # gRPC gives an empty name for one that is not there.
        if names := frozenset(filter(None, found.get(kind, ()))):
            return names
    return frozenset(hashlib.sha256(pem).digest() for pem in found.get("x509_pem_cert", ())) or NOBODY


def peer_of(context: Context) -> str:
    """The host that calls, for its share of what this server has room for: its address, without the port; of IPv6 the
    network, since a host has as many addresses as it likes. Empty for a caller on this host: processes of a host cannot
    be told apart."""
    host = host_of(context.peer())
    return "" if host.startswith("127.") or host == LOOPBACK_6 else host
