"""Thin adapters between gRPC and the home: each validates a request, calls the domain and encodes the answer."""

from __future__ import annotations

import grpc.aio

from kvferry.v1.introspection_pb2_grpc import add_IntrospectionServicer_to_server
from kvferry.v1.kv_transfer_pb2_grpc import add_KVTransferServicer_to_server
from kvferry_server.home.home import Home
from kvferry_server.servicers.callers import NamesOf, names_of
from kvferry_server.servicers.introspection import Introspection
from kvferry_server.servicers.kv_transfer import KVTransfer
from kvferry_server.servicers.relay import Relays
from kvferry_server.servicers.worker import Worker


def add_servicers(
    server: grpc.aio.Server, home: Home, relays: Relays, worker: Worker, names_of: NamesOf = names_of
) -> None:
    """Add a home's KVTransfer and Introspection services to a server, which must run on the home's event loop.
    `names_of` returns the names of the server's callers."""
    add_KVTransferServicer_to_server(KVTransfer(home, relays, worker, names_of), server)
    add_IntrospectionServicer_to_server(Introspection(home, worker), server)
