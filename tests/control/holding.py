"""Readers that hold leases, or are about to, and what a home answers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry._clock import to_duration
from kvferry._control.connection import Control
from kvferry._control.homes import Homes
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.renewals import Renewals
from kvferry._wire.authority import PublicationKeys
from kvferry._wire.reference import format_reference
from kvferry._wire.token import EngineToken
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import on_loop

LEASE = b"l" * 16


READER = EngineToken("reader", b"r" * 32, "home:1")
DONE = pb.NotificationResult(done=pb.Acknowledged())


def reference(home: str) -> str:
    return format_reference(
        pb.Reference(
            home=home,
            engine_id="source",
            incarnation=b"i" * 16,
            publication=1,
            request_id="request",
            key=PublicationKeys(b"s" * 32).key(1),
        )
    )


@contextmanager
def holding(control: Control, rank: int | None = None) -> Iterator[LeaseHolder]:
    """The holder of one engine's leases, or of one of its ranks', on the loop of the connection."""
    loop = control._loop
    homes, renewals = Homes(control.address, loop, None, ()), Renewals(loop)
    holder = LeaseHolder(loop, homes, renewals, READER, rank)
    try:
        yield holder
    finally:
        loop.run(holder.close(0))
        on_loop(loop, renewals.close)
        on_loop(loop, homes.close)


def accepted(renew_every: float = 20.0) -> pb.Accepted:
    return pb.Accepted(lease_id=LEASE, remaining=to_duration(60), renew_every=to_duration(renew_every))
