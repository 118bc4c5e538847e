"""Who calls, as gRPC has verified it."""

from __future__ import annotations

from typing import Any, TypeAlias

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
