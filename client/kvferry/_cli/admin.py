"""`kvferry drain`, `end-lease`, `abort`, `evict`, which ask before they act; and `decline`, as a router does."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from kvferry._cli.connection import Node, with_connection
from kvferry._cli.render import safe
from kvferry._summaries import enum_name, lasting

POLL = 0.5  # Seconds between two questions for the number of live leases

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before.")]
Engine = Annotated[str, typer.Argument(metavar="ENGINE", help="engine_id, as `kvferry engines` lists it.")]


@with_connection
def drain(
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Wait until no lease is live, at most so long.")
    ] = 0.0,
    yes: Yes = False,
    *,
    node: Node,
) -> None:
    """Make a node server take no new work, before it is stopped.

    It stays up for what is live. Only a restart makes it serve again. With --wait the exit code is 1 if leases are
    still live at the end.
    """
    about = node.info()
    _confirm(
        yes, f"Drain {node.server}, which has been up for {lasting(about.uptime)}? Only a restart makes it serve again."
    )
    until = time.monotonic() + wait
    while True:
        answer = node.act("Drain", home_epoch=about.home_epoch)
        left = until - time.monotonic()
        if not answer.leases or left <= 0:
            break
        time.sleep(min(POLL, left))
    node.show(answer, f"{node.server} is draining. {_leases(answer)}")
    if wait and answer.leases:
        sys.exit(1)


@with_connection
def end_lease(
    engine_id: Engine,
    lease_number: Annotated[
        int, typer.Argument(metavar="LEASE", help="Number, as `kvferry transfers` lists it.", min=1)
    ],
    yes: Yes = False,
    *,
    node: Node,
) -> None:
    """Let a lease on an engine's blocks run out.

    It is not renewed any more, and its reader is told to stop. It ends within its ttl and never at once: the reader may
    be reading the blocks at this moment.
    """
    source = node.summary(engine_id).engine
    # Lease number and epoch must come from the same listing.
    listing = node.listing("transfers", engine_id=engine_id)
    for listed in listing.transfers:
        if listed.read.lease_number == lease_number:
            source, reader = listed.source, listed.read.reader.engine_id
            what = f"lease {lease_number} of {reader!r} on request {listed.request_id!r} of {engine_id!r}"
            _confirm(yes, f"Let {what} run out?")
    answer = node.act("EndLease", home_epoch=listing.home_epoch, source=source, lease_number=lease_number)
    lasts = answer.remaining.ToNanoseconds()
    ends = f"ends in {lasting(answer.remaining)}" if lasts else f"has ended as {enum_name(answer)}"
    node.show(answer, f"Lease {lease_number} {ends}.")


@with_connection
def abort(
    engine_id: Engine,
    publication: Annotated[
        int, typer.Argument(metavar="PUBLICATION", help="Number, as `kvferry requests` lists it.", min=1)
    ],
    yes: Yes = False,
    *,
    node: Node,
) -> None:
    """Take a published request back, as its engine would.

    Nobody gets a lease on it any more; its blocks are released with the last live lease.
    """
    source = node.summary(engine_id).engine
    _confirm(yes, f"Abort publication {publication} of {engine_id!r}?")
    answer = node.act("AbortPublication", source=source, publication=publication)
    node.show(answer, f"Publication {publication} is {enum_name(answer)}. {_leases(answer)}")


@with_connection
def evict(engine_id: Engine, yes: Yes = False, *, node: Node) -> None:
    """End a stuck engine at its home, for good.

    Its publications end and its name is free at once; leases on its blocks run out. Its processes do not come back:
    stop them, and start the engine again.
    """
    summary = node.summary(engine_id)
    what = f"{engine_id!r}, incarnation {summary.engine.incarnation.hex()}, with {summary.publications} requests"
    _confirm(yes, f"Evict {what} and {summary.leases} leases? It has to be started again.")
    answer = node.act("EvictEngine", engine=summary.engine)
    node.show(answer, f"{engine_id!r} is evicted. {_leases(answer)}")


def _confirm(yes: bool, question: str) -> None:
    """Ask on the terminal, and exit with 1 unless the answer is yes; without a terminal exit with 2."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on: say --yes")
    typer.confirm(safe(question), abort=True, err=True)


def _leases(answer: Any) -> str:
    if not answer.leases:
        return "No lease is live."
    live = "1 lease is" if answer.leases == 1 else f"{answer.leases} leases are"
    return f"{live} live; the last ends in {lasting(answer.leases_remaining)} at the latest."


@with_connection
def decline(
    given: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="The reference; -: it is read from standard input.")
    ] = "-",
    *,
    node: Node,
) -> None:
    """Say that nobody will read a publication: it is released.

    Any node server takes it, and passes it on to the home. With a reference that a router made it may come before the
    publication: reads that wait for it end.
    """
    from kvferry._control.connection import answers_of
    from kvferry._wire.version import check_server, introduce
    from kvferry.errors import KvferryError
    from kvferry.v1 import kv_transfer_pb2 as pb
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

    # Every user who can list processes sees arguments.
    text = sys.stdin.readline().strip() if given == "-" else given
    request = pb.NotifyRequest(notifications=[pb.Notification(decline=pb.Decline(reference=text))])
    introduce(request)
    answer = node.call(KVTransferStub(node.channel).Notify, request)
    check_server(answer.version, node.server)
    (result,) = answers_of(request, answer, node.server)
    if isinstance(result, KvferryError):
        raise result
    node.show(answer, "Declined: nobody reads it.")
