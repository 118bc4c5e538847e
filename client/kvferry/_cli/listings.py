"""What a node server lists: `kvferry requests` and `kvferry transfers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Server, with_connection
from kvferry._cli.render import console, duration, enum_name, print_json, read_state, safe, size, table

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
    from kvferry.v1.introspection_pb2 import ListRequestsRequest

    asked = ListRequestsRequest(engine_id=engine_id, request_id=request_id, reader_engine_id=reader)
    with connection.node(server) as node:
        response = node.listing(node.introspection.ListRequests, asked, "requests")
    if as_json:
        print_json(response)
    elif not response.requests:
        which = "Nothing that was asked for" if engine_id or request_id or reader else "No request"
        console().print(f"{which} is published at {safe(server)}.", markup=False)
    else:
        columns = "Engine", ">Publication", "Request", "State", ">Blocks", ">Reads", ">Leases", ">Age"
        console().print(table(*columns, rows=map(_request, response.requests)))


def _request(request: introspection_pb2.RequestSummary) -> tuple[object, ...]:
    from kvferry._clock import from_duration
    from kvferry._wire.status import reason_name
    from kvferry.v1 import introspection_pb2 as ipb

    state = enum_name(ipb.RequestState, request.state, "REQUEST_STATE_")
    failure = reason_name(request.last_failure)
    return (
        *(request.engine.engine_id, request.publication, request.request_id),
        f"{state}, a read failed: {failure}" if failure else state,
        *(request.blocks, f"{request.reads_valid}/{request.expected_reads}", request.leases),
        duration(from_duration(request.age)),
    )


@with_connection
def transfers(
    engine_id: Annotated[str, typer.Option("--engine", metavar="ID", help="Only reads from this engine.")] = "",
    request_id: Annotated[str, typer.Option("--request", metavar="ID", help="Only reads of this request.")] = "",
    reader: Annotated[str, typer.Option("--reader", metavar="ID", help="Only reads by this engine.")] = "",
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    *,
    connection: Connection,
) -> None:
    """List reads from a node server's engines, and their leases."""
    from kvferry.v1.introspection_pb2 import ListTransfersRequest

    asked = ListTransfersRequest(engine_id=engine_id, request_id=request_id, reader_engine_id=reader)
    with connection.node(server) as node:
        response = node.listing(node.introspection.ListTransfers, asked, "transfers")
    if as_json:
        print_json(response)
    elif not response.transfers:
        console().print(f"Nothing is read from the engines of {safe(server)}.", markup=False)
    else:
        columns = "Source", ">Publication", "Request", "Reader", ">Lease", "State", ">Ranks done", ">Bytes"
        console().print(table(*columns, ">Remaining", rows=map(_transfer, response.transfers)))


def _transfer(transfer: introspection_pb2.TransferSummary) -> tuple[object, ...]:
    from kvferry._clock import from_duration

    read, remaining = transfer.read, from_duration(transfer.lease_remaining)
    waits = transfer.HasField("waited")
    return (
        transfer.source.engine_id,
        "none yet" if waits else transfer.publication,
        f"router key {transfer.router_key}" if waits else transfer.request_id,
        read.reader.engine_id,
        "" if waits else read.lease_number,
        read_state(transfer),
        f"{read.reported}/{read.parties}",
        size(read.bytes),
        f"waits for {duration(from_duration(transfer.waited))}" if waits else duration(remaining, none="ended"),
    )
