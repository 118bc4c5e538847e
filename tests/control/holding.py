"""Readers that hold leases, or are about to, and what a home answers them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry._clock import now, to_duration
from kvferry._control.acquirer import Acquirer
from kvferry._control.acquisition import AcquireRequest
from kvferry._control.cancellation import Cancellation
from kvferry._control.connection import Control
from kvferry._control.homes import Homes
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.renewals import Renewals
from kvferry._wire.authority import publication_key
from kvferry._wire.reference import format_reference
from kvferry._wire.token import EngineToken
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.acquiring import acquired

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
            key=publication_key(b"s" * 32, 1),
        )
    )


@contextmanager
def holding(control: Control) -> Iterator[LeaseHolder]:
    homes, renewals = Homes(control.address, None, ()), Renewals()
    holder = LeaseHolder(homes, renewals, READER)
    try:
        yield holder
    finally:
        holder.close(0)
        renewals.close()
        homes.close()


def acquire(
    acquirer: Acquirer, control: Control, cancellation: Cancellation, expected: int = 0
) -> tuple[threading.Thread, list[object]]:
    """Acquire on a thread; what came of it."""
    text = reference(control.address)
    found: list[object] = []
    parsed = pb.Reference(home=control.address, engine_id="source", publication=1)
    request = AcquireRequest(control, parsed, text, "read", 1, expected, now() + 60)

    def run() -> None:
        try:
            found.append(acquired(acquirer, request, cancellation))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def accepted(renew_every: float = 20.0) -> pb.Accepted:
    return pb.Accepted(lease_id=LEASE, remaining=to_duration(60), renew_every=to_duration(renew_every))
