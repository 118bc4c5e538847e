"""`kvferry health`: a probe for systemd, Docker and Kubernetes, quick to start.

The messages of grpc.health.v1 are not in the base install. Each has one field, a string and an enum, so protobuf's own
wrappers with the same encoding stand in for them.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, Connection, Server, with_connection

CHECK = "/grpc.health.v1.Health/Check"
STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
"""grpc.health.v1.HealthCheckResponse.ServingStatus, by number."""


@with_connection
def health(
    service: Annotated[
        str, typer.Option("--service", metavar="NAME", help="Full name of a service. Empty: the node server itself.")
    ] = "",
    server: Server = DEFAULT_SERVER,
    *,
    connection: Connection,
) -> None:
    """Probe a node server: exit code 0 if it serves, else 1.

    A draining node server does not.
    """
    from google.protobuf.wrappers_pb2 import Int32Value, StringValue

    with connection.channel(server) as channel:
        check = channel.unary_unary(
            CHECK, request_serializer=StringValue.SerializeToString, response_deserializer=Int32Value.FromString
        )
        number = check(StringValue(value=service), timeout=connection.timeout).value
    status = STATUSES[number] if 0 <= number < len(STATUSES) else str(number)
    print(status)
    if status != "SERVING":
        sys.exit(1)
