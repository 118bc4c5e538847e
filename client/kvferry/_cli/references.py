"""What routers do, by hand: `kvferry reference` and `kvferry decline`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Server, with_connection
from kvferry._cli.render import print_json


def reference(
    engine_id: Annotated[str, typer.Argument(metavar="ENGINE", help="engine_id of the source, or its deployment.")],
    home: Annotated[
        str, typer.Argument(metavar="HOME", help="host:port of the source's home; empty: readers have a directory.")
    ] = "",
    router_key: Annotated[
        str, typer.Option("--router-key", metavar="KEY", help="Name of the request; without it a random one.")
    ] = "",
    data_parallel_rank: Annotated[
        int, typer.Option("--data-parallel-rank", metavar="N", min=0, help="Which engine of the deployment.")
    ] = 0,
) -> None:
    """Make a reference as a router does.

    For routers that ask source and destination at once: the source publishes under it, and the destination reads with
    it; `kvferry transfers` lists who waits. It is a secret, made anew at each call.
    """
    from kvferry._wire.reference import router_reference

    print(router_reference(home, engine_id, router_key=router_key, data_parallel_rank=data_parallel_rank))


@with_connection
def decline(
    given: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="The reference; -: it is read from standard input.")
    ] = "-",
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    *,
    connection: Connection,
) -> None:
    """Say that nobody will read a publication: it is released.

    Any node server takes it, and passes it on to the home. With a reference that a router made it may come before the
    publication: reads that wait for it end.
    """
    from kvferry._control.connection import checked_results
    from kvferry._wire.version import check_server, introduce
    from kvferry.v1 import kv_transfer_pb2 as pb
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

    # As an argument it would be seen by everybody who can list processes.
    text = sys.stdin.readline().strip() if given == "-" else given
    request = pb.NotifyRequest(notifications=[pb.Notification(decline=pb.Decline(reference=text))])
    introduce(request)
    with connection.node(server) as node:
        answer = node.call(KVTransferStub(node.channel).Notify, request)
        check_server(answer.version, server)
        checked_results(request, list(answer.results), server)
    if as_json:
        print_json(answer)
    else:
        print("Declined: nobody reads it.")
