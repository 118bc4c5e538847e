"""`kvferry plan`: shows which ranks would read what from which, without reading."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry._cli.connection import Connection, with_connection
from kvferry._cli.render import safe, sentences
from kvferry.errors import Incompatible, InvalidInput, KvferryError

if TYPE_CHECKING:
    from kvferry.geometry.model import EngineGeometry

IMPOSSIBLE = 2  # Exit code if one engine cannot read the other. As for wrong usage: repeating does not help


@with_connection
def plan(
    source: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Geometry file of the engine that is read from.")
    ] = None,
    destination: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Geometry file of the engine that reads.")
    ] = None,
    source_engine: Annotated[
        str, typer.Option(metavar="ID@ADDRESS", help="A live engine at its home, instead of --source.")
    ] = "",
    destination_engine: Annotated[
        str, typer.Option(metavar="ID@ADDRESS", help="A live engine at its home, instead of --destination.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; its shape is kept stable.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the plan.")] = None,
    *,
    connection: Connection,
) -> None:
    """Show who would read what from whom, without reading it.

    Each engine is either a geometry file (see docs/geometry.schema.json and examples/geometry) or a live engine, as
    ID@ADDRESS of its home. The plan has the bytes and descriptors of each read, and its path: direct, into the blocks;
    or staged, by way of staging memory. Exits with 2 if the destination cannot read the source's cache.
    """
    from kvferry.planner.coverage import Indexed, check_complete, diff
    from kvferry.planner.explain import to_json, to_text
    from kvferry.planner.plan import plan_read

    try:
        theirs = _engine("source", source, source_engine, connection)
        mine = _engine("destination", destination, destination_engine, connection)
        for engine in (theirs, mine):
            check_complete(Indexed(engine))
        if mismatches := diff(theirs, mine):
            # Of all ranks.
            raise Incompatible(mismatches)
        plans = [plan_read(theirs, mine, rank.rank) for rank in mine.ranks]
    except (Incompatible, InvalidInput) as error:
        _refuse(error, as_json)
        raise typer.Exit(IMPOSSIBLE) from None
    if svg is not None:
        from kvferry.planner.explain_svg import to_svg

        try:
            svg.write_text(to_svg(plans))
        except OSError as error:
            raise typer.BadParameter(f"cannot write {svg}: {error.strerror}", param_hint="--svg") from None
    if as_json:
        print(json.dumps(to_json(plans), indent=2))
    else:
        print("\n".join(safe(line) for line in to_text(plans).splitlines()))


def _engine(side: str, file: Path | None, live: str, connection: Connection) -> EngineGeometry:
    if (file is None) == (not live):
        raise typer.BadParameter(f"give either --{side} FILE or --{side}-engine ID@ADDRESS", param_hint=f"--{side}")
    if file is not None:
        from kvferry.geometry.file import load

        if "@" in str(file) and not file.exists():
            problem = f"there is no file {str(file)!r}; if it is a live engine, say --{side}-engine {file}"
            raise typer.BadParameter(problem, param_hint=f"--{side}")
        return load(file)
    engine_id, at, address = live.rpartition("@")
    if not at or not engine_id or not address:
        raise typer.BadParameter(f"{live!r} is not ID@ADDRESS", param_hint=f"--{side}-engine")
    with connection.node(address) as node:
        return node.geometry(engine_id)


def _refuse(error: KvferryError, as_json: bool) -> None:
    if not as_json:
        print(f"kvferry: {sentences(error)}", file=sys.stderr)
        return
    found: dict[str, Any] = {"values": error.values}
    if isinstance(error, Incompatible):
        found = {"mismatches": list(map(dataclasses.asdict, error.mismatches))}
    print(json.dumps({"error": {"reason": error.reason, "message": error.message, **found}}, indent=2))
