"""Thin adapters between gRPC and the home: each validates a request, calls the domain and encodes the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import grpc.aio

from kvferry.v1.admin_pb2_grpc import add_AdminServicer_to_server
from kvferry.v1.introspection_pb2_grpc import add_IntrospectionServicer_to_server
from kvferry.v1.kv_transfer_pb2_grpc import add_KVTransferServicer_to_server
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import Worker
from kvferry_server.servicers.admin import Admin
from kvferry_server.servicers.callers import NamesOf, names_of
from kvferry_server.servicers.introspection import Introspection
from kvferry_server.servicers.kv_transfer import KVTransfer
from kvferry_server.servicers.relay import Relays


def add_servicers(
    server: grpc.aio.Server,
    home: Home,
    relays: Relays,
    worker: Worker,
    names_of: NamesOf = names_of,
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    call_limits: Mapping[str, int] | None = None,
) -> None:
    """Add a home's services to a server, which must run on the home's event loop. `drain` makes the node server take no
    new work (None: the home alone); `call_limits` are the node server's limits on calls and connections, by name."""

    add_KVTransferServicer_to_server(KVTransfer(home, relays, worker, names_of), server)
    add_IntrospectionServicer_to_server(Introspection(home, worker, call_limits or {}), server)
    add_AdminServicer_to_server(Admin(home, drain, names_of), server)
