"""`kvferry engines`, of one node server or of a whole fleet, and `kvferry engine ID`."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Directory, Server, look_up, with_connection
from kvferry._cli.render import complete, console, facts, listing, print_json, recovering, safe, sentences, table
from kvferry._summaries import Row, engine_row, enum_name
from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.v1 import geometry_pb2, introspection_pb2

    Answers: TypeAlias = list[tuple[str, introspection_pb2.ListEnginesResponse]]
    Failures: TypeAlias = list[tuple[str, KvferryError]]

MAX_AT_ONCE = 32


@with_connection
def engines(
    servers: Annotated[
        list[str],
        typer.Option(
            "--server",
            envvar="KVFERRY_SERVER",
            metavar="ADDRESS",
            help="Node server to ask: unix:/path or host:port. May be given several times.",
        ),
    ] = [DEFAULT_SERVER],  # noqa: B006  typer copies it, and shows it in the help
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
        servers = sorted(look_up(directory, connection.timeout, lambda listed: listed.listed()).homes)
    # A single node server's answer or error is the output itself.
    single = not every and len(servers) == 1
    answered, failed = ([(servers[0], _ask(servers[0], connection))], []) if single else _ask_all(servers, connection)
    if as_json:
        print_json(answered[0][1]) if single else _print_fleet(answered, failed)
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


def _ask(server: str, connection: Connection) -> introspection_pb2.ListEnginesResponse:
    with connection.node(server) as node:
        answer: introspection_pb2.ListEnginesResponse = node.listing("engines")
        return answer


def _ask_all(servers: list[str], connection: Connection) -> tuple[Answers, Failures]:
    """Ask several node servers at once. Returns answers and errors, each in the given order."""

    def outcome(server: str) -> introspection_pb2.ListEnginesResponse | KvferryError:
        try:
            return _ask(server, connection)
        except KvferryError as error:
            return error

    servers = list(dict.fromkeys(servers))
    with ThreadPoolExecutor(MAX_AT_ONCE, "kvferry-fleet") as pool:
        found = list(zip(servers, pool.map(outcome, servers), strict=True))
    answered = [(server, answer) for server, answer in found if not isinstance(answer, KvferryError)]
    return answered, [(server, answer) for server, answer in found if isinstance(answer, KvferryError)]


def _print_fleet(answered: Answers, failed: Failures) -> None:
    homes = [{"server": server, "response": complete(response)} for server, response in answered]
    errors = [
        {"server": server, "error": {"name": type(error).__name__, "reason": error.reason, "message": error.message}}
        for server, error in failed
    ]
    print(json.dumps({"homes": [*homes, *errors]}, indent=2))


def _rows(answered: Answers, *, with_home: bool) -> list[Row]:
    listed = [(summary, server) for server, response in answered for summary in response.engines]
    listed.sort(key=lambda each: (each[0].engine.engine_id, each[1]))
    if not with_home:
        return [engine_row(summary) for summary, _ in listed]
    return [{"Engine": summary.engine.engine_id, "Home": server, **engine_row(summary)} for summary, server in listed]


@with_connection
def engine(
    engine_id: Annotated[str, typer.Argument(metavar="ID", help="engine_id, as `kvferry engines` lists it.")],
    server: Server = DEFAULT_SERVER,
    directory: Directory = "",
    as_json: AsJson = False,
    *,
    connection: Connection,
) -> None:
    """Show one engine: identity, groups, and what each rank holds. With a directory, at the home that it lists."""
    if directory and server == DEFAULT_SERVER:
        server = look_up(directory, connection.timeout, lambda listed: listed.resolve(engine_id)).home
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
