"""`kvferry engines` and `kvferry engine ID`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Directory, Server, with_connection
from kvferry._cli.fleet import ask, ask_all, end_after, home_of, homes_in, print_fleet
from kvferry._cli.render import add_row, console, enum_name, print_json, ranges, safe, short, size, table

if TYPE_CHECKING:
    from kvferry.v1 import geometry_pb2, introspection_pb2


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
    if every:
        servers = homes_in(directory, connection.timeout)
    elif len(servers) == 1:
        response = ask(servers[0], connection)
        if as_json:
            print_json(response)
        elif not response.engines:
            console().print(f"No engine has its home at {safe(servers[0])}.", markup=False)
        else:
            console().print(_table([(servers[0], response)], with_home=False))
        return
    answered, failed = ask_all(list(dict.fromkeys(servers)), connection)
    if as_json:
        print_fleet(answered, failed)
    elif any(response.engines for _, response in answered):
        console().print(_table(answered, with_home=True))
    else:
        console().print(f"No engine has its home at the {len(answered)} node servers that answered.", markup=False)
    end_after(failed)


def _table(answered: list[tuple[str, introspection_pb2.ListEnginesResponse]], *, with_home: bool) -> object:
    rows = table(
        "Engine", *(["Home"] if with_home else []), "Incarnation", "State", ">Ranks", ">Requests", ">Leases", ">Cache"
    )
    listed = [(summary, server) for server, response in answered for summary in response.engines]
    for summary, server in sorted(listed, key=lambda each: (each[0].engine.engine_id, each[1])):
        add_row(
            rows,
            summary.engine.engine_id,
            *([server] if with_home else []),
            short(summary.engine.incarnation),
            _state(summary),
            _registered(summary),
            summary.publications,
            summary.leases,
            size(summary.cache_bytes),
        )
    return rows


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
        server = home_of(engine_id, directory, connection.timeout)
    with connection.introspection(server) as asker:
        response = asker.engine(engine_id)
    if as_json:
        print_json(response)
        return
    summary, geometry, out = response.summary, response.geometry, console()
    facts = table("", "")
    facts.show_header = False
    add_row(facts, "engine", summary.engine.engine_id)
    add_row(facts, "incarnation", summary.engine.incarnation.hex())
    add_row(facts, "state", _state(summary))
    add_row(facts, "ranks", _registered(summary))
    add_row(facts, "requests", summary.publications)
    add_row(facts, "leases", summary.leases)
    add_row(facts, "cache", size(summary.cache_bytes))
    for key, value in sorted(geometry.identity.items()):
        add_row(facts, key, value)
    out.print(facts)
    out.print(_groups(geometry), _ranks(geometry), sep="\n")


def _groups(geometry: geometry_pb2.EngineGeometry) -> object:
    from kvferry.v1 import geometry_pb2

    rows = table("Group", "Kind", ">Block tokens", ">Blocks", ">Null block", ">Window", "Pool", title="Groups")
    for group in geometry.groups:
        add_row(
            rows,
            group.name,
            enum_name(geometry_pb2.GroupKind, group.kind, "GROUP_KIND_"),
            group.block_tokens or "-",
            group.num_blocks,
            group.null_block if group.has_null_block else "-",
            group.window_tokens or "-",
            group.pool or "own",
        )
    return rows


def _ranks(geometry: geometry_pb2.EngineGeometry) -> object:
    rows = table(">Rank", "Labels", ">Layers", "Holds", "Format", title="Ranks")
    for rank in geometry.ranks:
        held = {
            f"{plane.component} [{plane.unit_begin}, {plane.unit_end}) of {plane.axis_size}": None
            for plane in rank.planes
        }
        add_row(
            rows,
            rank.rank,
            ", ".join(f"{name} {value}" for name, value in sorted(rank.labels.items())),
            len({plane.layer for plane in rank.planes}),
            ", ".join(held),
            ", ".join(dict.fromkeys(f"{plane.format} {plane.dtype}".strip() for plane in rank.planes)),
        )
    return rows


def _registered(summary: introspection_pb2.EngineSummary) -> str:
    return f"{summary.num_ranks - summary.num_missing}/{summary.num_ranks}"


def _state(summary: introspection_pb2.EngineSummary) -> str:
    from kvferry.v1 import introspection_pb2

    name = enum_name(introspection_pb2.EngineState, summary.state, "ENGINE_STATE_")
    missing, left = summary.missing_ranks, summary.num_missing - len(summary.missing_ranks)
    more = f" and {left} more" if left else ""
    return f"{name} (missing {'rank' if len(missing) == 1 else 'ranks'} {ranges(missing)}{more})" if missing else name
