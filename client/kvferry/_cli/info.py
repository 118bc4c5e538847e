"""`kvferry info`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry._cli.connection import DEFAULT_SERVER, AsJson, Connection, Server, with_connection
from kvferry._cli.render import add_row, console, duration, print_json, table

if TYPE_CHECKING:
    from kvferry.v1 import introspection_pb2


@with_connection
def info(server: Server = DEFAULT_SERVER, as_json: AsJson = False, *, connection: Connection) -> None:
    """Show a node server: its version, times and limits."""
    from kvferry._clock import from_duration
    from kvferry.v1.introspection_pb2 import GetServerInfoRequest

    with connection.introspection(server) as asker:
        answer = asker.stub.GetServerInfo(GetServerInfoRequest(), timeout=asker.timeout)
    if as_json:
        print_json(answer)
        return
    facts = table("", "")
    facts.show_header = False
    add_row(facts, "version", answer.version)
    add_row(facts, "contract", f"kvferry.v1, revision {answer.contract_revision}")
    add_row(facts, "this kvferry", _together(answer))
    add_row(facts, "state", "draining" if answer.draining else "serving")
    add_row(facts, "advertises", answer.advertise)
    add_row(facts, "epoch", answer.home_epoch.hex())
    add_row(facts, "uptime", duration(from_duration(answer.uptime)))
    add_row(facts, "capabilities", ", ".join(answer.capabilities))
    for field, value in answer.times.ListFields():
        add_row(facts, field.name, duration(from_duration(value)))
    console().print(facts)
    limits = table("Limit", ">At most", title="Limits")
    for name, most in sorted(answer.limits.items()):
        add_row(limits, name, most)
    console().print(limits)


def _together(answer: introspection_pb2.GetServerInfoResponse) -> str:
    """Whether engines and readers of this release work with a node server."""
    from kvferry._wire.version import OURS, Version

    theirs = Version(answer.contract_revision, answer.oldest_revision, answer.version)
    how = "works with it" if OURS.works_with(theirs) else "does not work with it: one refuses the other"
    return f"release {OURS.release}, revision {OURS.revision}, {how}"
