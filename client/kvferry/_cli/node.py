"""Commands that show what node servers know: `kvferry info`, `health`, `engines`, `engine`, `requests`, `transfers`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry._cli.connection import LOCAL, AsJson, Connection, Directory, Node, Server, Servers, with_connection
from kvferry._cli.render import complete, console, facts, listing, print_json, recovering, safe, sentences, table
from kvferry._summaries import Row, engine_row, enum_name, lasting, request_row, transfer_row
from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.v1 import geometry_pb2
    from kvferry.v1 import introspection_pb2 as ipb


MAX_AT_ONCE = 32  # Most node servers that are asked at once
MOST_ROWS = 200  # Of a table of requests or transfers. To ask for a quarter of a million leases would take minutes

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
    server: Server = LOCAL,
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


@with_connection
def engines(
    servers: Servers = [LOCAL],  # noqa: B006  typer copies it, and shows it in the help
    every: Annotated[bool, typer.Option("--all", help="Ask all homes that the directory lists.")] = False,
    directory: Directory = "",
    as_json: AsJson = False,
    *,
    connection: Connection,
) -> None:
    """List the engines of one node server, of several, or of a fleet."""
    if every and not directory:
        raise typer.BadParameter("--all needs a directory: name it with --directory or KVFERRY_DIRECTORY")
    if every:
        servers = sorted(connection.look_up(directory, lambda listed: listed.listed()).homes)
    servers = list(dict.fromkeys(servers))
    with ThreadPoolExecutor(MAX_AT_ONCE, "kvferry-fleet") as pool:
        found = list(zip(servers, pool.map(partial(_ask, connection), servers), strict=True))
    answered = [(server, answer) for server, answer in found if not isinstance(answer, KvferryError)]
    failed = [(server, answer) for server, answer in found if isinstance(answer, KvferryError)]
    # A single node server's answer or error is the output itself.
    single = not every and len(servers) == 1
    if single and failed:
        raise failed[0][1]
    if as_json:
        homes = [_home(*each) for each in found]
        print_json(answered[0][1]) if single else print(json.dumps({"homes": homes}, indent=2))
    elif any(response.engines for _, response in answered):
        console().print(listing(_rows(answered, with_home=not single)))
    else:
        where = safe(servers[0]) if single else f"the {len(answered)} node servers that answered"
        console().print(f"No engine has its home at {where}.", markup=False)
    if not as_json:
        for asked in (name for name, response in answered if response.recovering):
            console().print(recovering(asked), markup=False)
    for server, error in failed:
        message = " ".join(sentences(error).split())
        where = "" if safe(server) in message else f"{safe(server)}: "
        print(f"kvferry: {where}{message} [{error.reason or type(error).__name__}]", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _ask(connection: Connection, server: str) -> ipb.ListEnginesResponse | KvferryError:
    try:
        with connection.node(server) as node:
            answer: ipb.ListEnginesResponse = node.listing("engines")
            return answer
    except KvferryError as error:
        return error


def _home(server: str, answer: ipb.ListEnginesResponse | KvferryError) -> dict[str, Any]:
    if isinstance(answer, KvferryError):
        error = {"name": type(answer).__name__, "reason": answer.reason, "message": answer.message}
        return {"server": server, "error": error}
    return {"server": server, "response": complete(answer)}


def _rows(answered: list[tuple[str, ipb.ListEnginesResponse]], *, with_home: bool) -> list[Row]:
    listed = [(summary, server) for server, response in answered for summary in response.engines]
    listed.sort(key=lambda each: (each[0].engine.engine_id, each[1]))
    if not with_home:
        return [engine_row(summary) for summary, _ in listed]
    return [{"Engine": summary.engine.engine_id, "Home": server, **engine_row(summary)} for summary, server in listed]


@with_connection
def engine(
    engine_id: Annotated[str, typer.Argument(metavar="ID", help="engine_id, as `kvferry engines` lists it.")],
    server: Server = LOCAL,
    directory: Directory = "",
    as_json: AsJson = False,
    *,
    connection: Connection,
) -> None:
    """Show one engine: identity, groups, and what each rank holds. With a directory, at the home that it lists."""
    if directory and server == LOCAL:
        server = connection.look_up(directory, lambda listed: listed.resolve(engine_id)).home
    with connection.node(server) as node:
        response = node.engine(engine_id)
    if as_json:
        print_json(response)
        return
    summary, geometry = response.summary, response.geometry
    shown = {title.lstrip(">").lower(): cell for title, cell in engine_row(summary).items()}
    shown["incarnation"] = summary.engine.incarnation.hex()
    groups = "Group", "Kind", ">Block tokens", ">Blocks", ">Null block", ">Window", "Pool"
    console().print(
        facts([*shown.items(), *sorted(geometry.identity.items())]),
        table(*groups, rows=map(_group, geometry.groups), title="Groups"),
        table(">Rank", "Labels", ">Layers", "Holds", "Format", rows=map(_rank, geometry.ranks), title="Ranks"),
        sep="\n",
    )


def _group(group: geometry_pb2.Group) -> tuple[object, ...]:
    null = group.null_block if group.has_null_block else "-"
    sizes = group.block_tokens or "-", group.num_blocks, null, group.window_tokens or "-"
    return group.name, enum_name(group, "kind"), *sizes, group.pool or "own"


def _rank(rank: geometry_pb2.RankGeometry) -> tuple[object, ...]:
    held = (f"{each.component} [{each.unit_begin}, {each.unit_end}) of {each.axis_size}" for each in rank.planes)
    return (
        rank.rank,
        ", ".join(f"{name} {value}" for name, value in sorted(rank.labels.items())),
        len({plane.layer for plane in rank.planes}),
        ", ".join(dict.fromkeys(held)),
        ", ".join(dict.fromkeys(f"{plane.format} {plane.dtype}".strip() for plane in rank.planes)),
    )


@with_connection
def requests(engine_id: OfEngine = "", request_id: OfRequest = "", reader: OfReader = "", *, node: Node) -> None:
    """List the published requests that are not released yet."""
    which = "Nothing that was asked for" if engine_id or request_id or reader else "No request"
    none = f"{which} is published at {node.server}."
    _list(node, "requests", request_row, none, engine_id=engine_id, request_id=request_id, reader_engine_id=reader)


@with_connection
def transfers(engine_id: OfEngine = "", request_id: OfRequest = "", reader: OfReader = "", *, node: Node) -> None:
    """List reads from a node server's engines, and their leases."""
    none = f"Nothing is read from the engines of {node.server}."
    _list(node, "transfers", transfer_row, none, engine_id=engine_id, request_id=request_id, reader_engine_id=reader)


def _list(node: Node, kind: str, row: Callable[[Any], Row], none: str, **asked: Any) -> None:
    """Show a list: whole as JSON, and for people as much as they read."""
    found = node.listing(kind, rows=math.inf if node.as_json else MOST_ROWS, **asked)
    if node.as_json:
        print_json(found)
        return
    rows = [row(each) for each in getattr(found, kind)]
    console().print(listing(rows[:MOST_ROWS]) if rows else safe(none), markup=False)
    if found.next_page_token or len(rows) > MOST_ROWS:
        more = "There are more: --engine, --request and --reader choose some of them, and --json lists all."
        print(f"kvferry: {more}", file=sys.stderr)
    if found.recovering:
        console().print(recovering(node.server), markup=False)
