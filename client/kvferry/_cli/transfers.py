"""`kvferry transfers`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Server, with_connection
from kvferry._cli.render import add_row, console, duration, print_json, read_state, safe, size, table


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
    from kvferry._clock import from_duration
    from kvferry.v1 import introspection_pb2, kv_transfer_pb2

    with connection.introspection(server) as asker:
        asked = introspection_pb2.ListTransfersRequest(
            engine_id=engine_id, request_id=request_id, reader_engine_id=reader
        )
        response = asker.all_pages(asker.stub.ListTransfers, asked, "transfers")
    if as_json:
        print_json(response)
        return
    if not response.transfers:
        console().print(f"Nothing is read from the engines of {safe(server)}.", markup=False)
        return
    rows = table(
        "Source", ">Publication", "Request", "Reader", ">Lease", "State", ">Ranks done", ">Bytes", ">Remaining"
    )
    for transfer in response.transfers:
        read = transfer.read
        remaining = from_duration(transfer.lease_remaining)
        waits = transfer.HasField("waited")
        add_row(
            rows,
            transfer.source.engine_id,
            "none yet" if waits else transfer.publication,
            f"router key {transfer.router_key}" if waits else transfer.request_id,
            read.reader.engine_id,
            "" if waits else read.lease_number,
            read_state(kv_transfer_pb2.ReadState, transfer),
            f"{read.reported}/{read.parties}",
            size(read.bytes),
            f"waits for {duration(from_duration(transfer.waited))}"
            if waits
            else duration(remaining)
            if remaining
            else "ended",
        )
    console().print(rows)
