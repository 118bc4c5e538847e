"""What is asked of one node server, and of this installation: `kvferry info`, `health` and `version`."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from typing import Annotated

import typer

from kvferry import __version__
from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Server, with_connection
from kvferry._cli.render import console, duration, facts, print_json, table

CHECK = "/grpc.health.v1.Health/Check"
STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
"""grpc.health.v1.HealthCheckResponse.ServingStatus, by number."""
PACKAGES = ("grpcio", "protobuf", "nixl", "torch")
"""Packages whose versions a bug report needs."""


@with_connection
def info(server: Server = DEFAULT_SERVER, as_json: AsJson = False, *, connection: Connection) -> None:
    """Show a node server: its version, times and limits."""
    from kvferry._clock import from_duration
    from kvferry._wire.version import OURS, Version

    with connection.node(server) as node:
        answer = node.info()
    if as_json:
        print_json(answer)
        return
    theirs = Version(answer.contract_revision, answer.oldest_revision, answer.version)
    how = "works with it" if OURS.works_with(theirs) else "does not work with it: one refuses the other"
    times = {field.name: duration(from_duration(value)) for field, value in answer.times.ListFields()}
    shown = {
        "version": answer.version,
        "contract": f"kvferry.v1, revision {answer.contract_revision}",
        "this kvferry": f"release {OURS.release}, revision {OURS.revision}, {how}",
        "state": "draining" if answer.draining else "serving",
        "advertises": answer.advertise,
        "epoch": answer.home_epoch.hex(),
        "uptime": duration(from_duration(answer.uptime)),
        "capabilities": ", ".join(answer.capabilities),
    }
    limits = table("Limit", ">At most", rows=sorted(answer.limits.items()), title="Limits")
    console().print(facts([*shown.items(), *times.items()]), limits, sep="\n")


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
    # The messages of grpc.health.v1 are not in the base install. Each has one field, a string and an enum, so
    # protobuf's own wrappers with the same encoding stand in for them.
    from google.protobuf.wrappers_pb2 import Int32Value, StringValue

    with connection.node(server) as node:
        check = node.channel.unary_unary(
            CHECK, request_serializer=StringValue.SerializeToString, response_deserializer=Int32Value.FromString
        )
        number = node.call(check, StringValue(value=service)).value
    status = STATUSES[number] if 0 <= number < len(STATUSES) else str(number)
    print(status)
    if status != "SERVING":
        sys.exit(1)


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: versions by package, null if missing.")] = False,
) -> None:
    """Show the versions of kvferry and of the packages it uses."""
    found: dict[str, str | None] = {"kvferry": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, number in found.items():
        print(f"{name:<10} {number or 'not installed'}")
