"""Asks the node servers of a fleet at once, and tells their answers from their errors."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from kvferry._cli.connection import Connection, look_up
from kvferry._cli.render import as_dict, safe, sentences

if TYPE_CHECKING:
    from kvferry.errors import KvferryError
    from kvferry.v1 import introspection_pb2

MAX_AT_ONCE = 32
"""Most node servers that are asked at the same time."""


def homes_in(directory: str, timeout: float) -> list[str]:
    """Return the addresses of all homes that a directory lists.

    Raises:
        typer.BadParameter: no directory is given, or its URL cannot be used.
        DirectoryUnavailable: it does not answer.
    """
    if not directory:
        raise typer.BadParameter("--all needs a directory: name it with --directory or KVFERRY_DIRECTORY")
    return sorted(look_up(directory, timeout).homes)


def home_of(engine_id: str, directory: str, timeout: float) -> str:
    """Return the address at which a directory lists an engine. Raises `EngineNotListed`, and as `homes_in`."""
    from kvferry.errors import EngineNotListed

    found = look_up(directory, timeout).find(engine_id)
    if found is None:
        message = f"engine {engine_id!r} is not listed in {directory}"
        raise EngineNotListed(message, engine_id=engine_id, directory=directory)
    return found.home


def ask(server: str, connection: Connection) -> introspection_pb2.ListEnginesResponse:
    """Ask one node server for its engines. Raises as `Connection.introspection`."""
    from kvferry.v1 import introspection_pb2

    with connection.introspection(server) as asker:
        return asker.all_pages(asker.stub.ListEngines, introspection_pb2.ListEnginesRequest(), "engines")


def ask_all(
    servers: list[str], connection: Connection
) -> tuple[list[tuple[str, introspection_pb2.ListEnginesResponse]], list[tuple[str, KvferryError]]]:
    """Ask several node servers at once. Returns what they answer, and why others do not, each in the given order."""
    from concurrent.futures import ThreadPoolExecutor

    from kvferry.errors import KvferryError

    def outcome(server: str) -> introspection_pb2.ListEnginesResponse | KvferryError:
        try:
            return ask(server, connection)
        except KvferryError as error:
            return error

    with ThreadPoolExecutor(MAX_AT_ONCE, "kvferry-fleet") as pool:
        found = list(zip(servers, pool.map(outcome, servers), strict=True))
    answered = [(server, answer) for server, answer in found if not isinstance(answer, KvferryError)]
    return answered, [(server, answer) for server, answer in found if isinstance(answer, KvferryError)]


def print_fleet(
    answered: list[tuple[str, introspection_pb2.ListEnginesResponse]], failed: list[tuple[str, KvferryError]]
) -> None:
    """Print what a fleet answers as JSON: for each node server its response, or its error."""
    homes = [{"server": server, "response": as_dict(response)} for server, response in answered]
    errors = [
        {"server": server, "error": {"name": type(error).__name__, "reason": error.reason, "message": error.message}}
        for server, error in failed
    ]
    print(json.dumps({"homes": [*homes, *errors]}, indent=2))


def end_after(failed: list[tuple[str, KvferryError]]) -> None:
    """Say on stderr which node servers gave no answer, and end with exit code 1; return if there are none."""
    for server, error in failed:
        name = error.reason or type(error).__name__
        message = " ".join(sentences(error).split())
        where = "" if safe(server) in message else f"{safe(server)}: "
        print(f"kvferry: {where}{message} [{name}]", file=sys.stderr)
    if failed:
        raise typer.Exit(1)
