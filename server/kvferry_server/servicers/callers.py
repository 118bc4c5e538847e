"""Callers, as gRPC has verified them."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, TypeAlias

import grpc.aio

from kvferry._tracing import calling_under, passed_on
from kvferry_server.domain.values import NOBODY, Names

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_TRACEPARENT = 512  # Characters of a traceparent; longer ones are ignored
LOOPBACK_6 = "::/64"  # The network of ::1, as `host_of` writes it


def on_end(context: Context, act: Callable[[], None]) -> None:
    """Call `act` when a call has ended: its answer was sent, or its caller has left."""
    # The stubs want a callback without arguments, but gRPC passes the context.
    added: Any = context
    added.add_done_callback(lambda _: act())


NamesOf: TypeAlias = Callable[[Context], Names]
"""A function that returns a caller's names: `names_of` where callers may have certificates, else `nobody`."""


def nobody(_: Context) -> Names:
    """Return no names: for addresses without TLS. Asking gRPC costs as much as a small request."""
    return NOBODY


def names_of(context: Context) -> Names:
    """Return the names in the caller's certificate: its subject alternative names, else its common name, else its
    digest. Empty without mutual TLS and on a UNIX socket."""
    found = context.auth_context()
    for kind in ("x509_subject_alternative_name", "x509_common_name"):
        # gRPC gives an empty name for a missing one.
        if names := frozenset(filter(None, found.get(kind, ()))):
            return names
    return frozenset(hashlib.sha256(pem).digest() for pem in found.get("x509_pem_cert", ())) or NOBODY


def identities_of(context: Context) -> tuple[str, ...]:
    """Return the caller's identities for a policy: the DNS names and URIs among the subject alternative names of its
    certificate. Empty without mutual TLS and on a UNIX socket."""
    found = context.auth_context()
    names = (("peer_dns", False), ("peer_uri", True))
    # A name of the wrong form could be taken for a name of the other kind.
    return tuple(
        name.decode()
        for kind, is_uri in names
        for name in found.get(kind, ())
        if name.isascii() and name.decode().isprintable() and name and (b":" in name) == is_uri
    )


def traceparent_of(context: Context) -> str:
    """Return a call's traceparent; empty: none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and len(value) <= MAX_TRACEPARENT:
            return value
    return ""


def relaying(context: Context) -> AbstractContextManager[None]:
    """Make calls to other node servers within the ``with`` block part of the call's trace."""
    return calling_under(passed_on(traceparent_of(context)))


def caller(context: Context, names: Names) -> str:
    """Return the caller for the audit log: the names in the certificate if there is one, and the address. Names are
    chosen by the certificate's issuer, so they are escaped."""
    where = "the UNIX socket" if context.peer().startswith("unix:") else context.peer()
    who = ", ".join(sorted(repr(name.decode(errors="backslashreplace")) for name in names))
    return f"{who} at {where}" if who else where


def remote_host(context: Context) -> str:
    """Return the host that budgets count a call against; empty for this host, whose processes cannot be told apart."""
    host = host_of(context.peer())
    return "" if host.startswith("127.") or host == LOOPBACK_6 else host


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
