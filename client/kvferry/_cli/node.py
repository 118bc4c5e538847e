"""Commands that ask one node server, `kvferry info`, `health`, `requests` and `transfers`; and `kvferry version`."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kvferry import __version__
from kvferry._cli.connection import DEFAULT_SERVER, Connection, Node, Server, with_connection
from kvferry._cli.render import console, facts, listing, print_json, recovering, safe, table
from kvferry._summaries import Row, lasting, request_row, transfer_row

if TYPE_CHECKING:
    from kvferry.v1 import introspection_pb2 as ipb

    Listed: TypeAlias = ipb.ListRequestsResponse | ipb.ListTransfersResponse

MOST_ROWS = 200
"""Most rows of a table of requests or transfers. A home may have a quarter of a million leases: to ask for them all and
to draw them would take minutes."""
PACKAGES = ("grpcio", "protobuf", "nixl", "torch")  # Packages whose versions a bug report needs

OfEngine = Annotated[str, typer.Option("--engine", metavar="ID", help="Only of this engine.")]
OfRequest = Annotated[str, typer.Option("--request", metavar="ID", help="Only of requests of this name.")]
OfReader = Annotated[str, typer.Option("--reader", metavar="ID", help="Only what this engine reads or has read.")]


@with_connection
def info(*, node: Node) -> None:
    """Show a node server: its version, times and limits."""
    from kvferry._wire.version import OURS, Version

    answer = node.info()
    if node.as_json:
        print_json(answer)
        return
    theirs = Version(answer.contract_revision, answer.oldest_revision, answer.version)
    how = "works with it" if OURS.works_with(theirs) else "does not work with it: one refuses the other"
    times = {field.name: lasting(value) for field, value in answer.times.ListFields()}
    shown = {
        "version": answer.version,
        "contract": f"kvferry.v1, revision {answer.contract_revision}",
        "this kvferry": f"release {OURS.release}, revision {OURS.revision}, {how}",
        "state": "draining" if answer.draining else "serving",
        "advertises": answer.advertise,
        "epoch": answer.home_epoch.hex(),
        "uptime": lasting(answer.uptime),
        "capabilities": ", ".join(answer.capabilities),
    }
    limits = table("Limit", ">At most", rows=sorted(answer.limits.items()), title="Limits")
    console().print(facts([*shown.items(), *times.items()]), limits, sep="\n")


@with_connection
def health(
    service: Annotated[
        str, typer.Option(metavar="NAME", help="Full name of a service. Empty: the node server itself.")
    ] = "",
    server: Server = DEFAULT_SERVER,
    *,
    connection: Connection,
) -> None:
    """Probe a node server: exit code 0 if it serves, else 1.

    A draining node server does not.
    """
    from google.protobuf.wrappers_pb2 import StringValue

    from kvferry._doctor.peer import HEALTH, STATUSES

    with connection.node(server) as node:
        # The base install does not have grpc.health.v1.HealthCheckRequest: StringValue has the same encoding.
        check: Any = node.channel.unary_unary(HEALTH, StringValue.SerializeToString)
        answer: bytes = node.call(check, StringValue(value=service))
    status = STATUSES.get(answer, answer[:16].hex())
    print(status)
    if status != "SERVING":
        sys.exit(1)


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: versions by package, null if missing.")] = False,
) -> None:
    """Show the versions of kvferry and of the packages it uses."""
    from kvferry._doctor.software import version_of

    found: dict[str, str | None] = {"kvferry": __version__, "python": platform.python_version()}
    found |= {package: version_of(package) or None for package in PACKAGES}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, number in found.items():
        print(f"{name:<10} {number or 'not installed'}")


@with_connection
def requests(engine_id: OfEngine = "", request_id: OfRequest = "", reader: OfReader = "", *, node: Node) -> None:
    """List the published requests that are not released yet."""
    which = "Nothing that was asked for" if engine_id or request_id or reader else "No request"
    found = _listed(node, "requests", engine_id, request_id, reader)
    _show(node, found, [request_row(each) for each in found.requests], f"{which} is published at {node.server}.")


@with_connection
def transfers(engine_id: OfEngine = "", request_id: OfRequest = "", reader: OfReader = "", *, node: Node) -> None:
    """List reads from a node server's engines, and their leases."""
    found = _listed(node, "transfers", engine_id, request_id, reader)
    none = f"Nothing is read from the engines of {node.server}."
    _show(node, found, [transfer_row(each) for each in found.transfers], none)


def _listed(node: Node, kind: str, engine_id: str, request_id: str, reader: str) -> Any:
    """Return a list: whole as JSON, and for people as much as they read."""
    most = math.inf if node.as_json else MOST_ROWS
    return node.listing(kind, rows=most, engine_id=engine_id, request_id=request_id, reader_engine_id=reader)


def _show(node: Node, found: Listed, rows: Sequence[Row], none: str) -> None:
    if node.as_json:
        print_json(found)
        return
    console().print(listing(rows[:MOST_ROWS]) if rows else safe(none), markup=False)
    if found.next_page_token or len(rows) > MOST_ROWS:
        more = "There are more: --engine, --request and --reader choose some of them, and --json lists all."
        print(f"kvferry: {more}", file=sys.stderr)
    if found.recovering:
        console().print(recovering(node.server), markup=False)
