"""`kvferry requests`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Server, with_connection
from kvferry._cli.render import add_row, console, duration, enum_name, print_json, safe, table

if TYPE_CHECKING:
    from kvferry.v1 import introspection_pb2


@with_connection
def requests(
    engine_id: Annotated[str, typer.Option("--engine", metavar="ID", help="Only requests of this engine.")] = "",
    request_id: Annotated[str, typer.Option("--request", metavar="ID", help="Only requests of this name.")] = "",
    reader: Annotated[
        str, typer.Option("--reader", metavar="ID", help="Only what this engine reads or has read.")
    ] = "",
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    *,
    connection: Connection,
) -> None:
    """List the published requests that are not released yet."""
    from kvferry._clock import from_duration
    from kvferry.v1 import introspection_pb2

    with connection.introspection(server) as asker:
        asked = introspection_pb2.ListRequestsRequest(
            engine_id=engine_id, request_id=request_id, reader_engine_id=reader
        )
        response = asker.all_pages(asker.stub.ListRequests, asked, "requests")
    if as_json:
        print_json(response)
        return
    if not response.requests:
        which = "Nothing that was asked for" if engine_id or request_id or reader else "No request"
        console().print(f"{which} is published at {safe(server)}.", markup=False)
        return
    rows = table("Engine", ">Publication", "Request", "State", ">Blocks", ">Reads", ">Leases", ">Age")
    for request in response.requests:
        add_row(
            rows,
            request.engine.engine_id,
            request.publication,
            request.request_id,
            _state(request),
            request.blocks,
            f"{request.reads_valid}/{request.expected_reads}",
            request.leases,
            duration(from_duration(request.age)),
        )
    console().print(rows)


def _state(request: introspection_pb2.RequestSummary) -> str:
    from kvferry._wire.status import reason_name
    from kvferry.v1 import introspection_pb2 as ipb

    state = enum_name(ipb.RequestState, request.state, "REQUEST_STATE_")
    failure = reason_name(request.last_failure)
    return f"{state}, a read failed: {failure}" if failure else state
