"""Leases live as long as they are renewed, with any number of leases and readers."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group
from kvferry._clock import from_duration, now, to_duration
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.notifier import BATCH
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.scripted import scripted
from tests.support.blocking_control import BlockingControl, on_loop
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import until

TTL = 8.0
PER_PUBLICATION = BATCH + 8
AXES = ("kv", "block", "head", "token", "content")
READERS = [pb.EngineRef(engine_id=f"reader-{index}", incarnation=bytes([index]) * 16) for index in range(2)]


def acquired(home: BlockingControl, reference: str, reader: pb.EngineRef, read: int) -> ReaderLease:
    """A lease, as a read of a publication gets it."""
    sent_at = now()
    asked = pb.ReadBlocksRequest(reference=reference, reader=reader, read_id=read.to_bytes(16, "big"), parties=1)
    accepted = home.read_blocks(asked).accepted
    remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
    return ReaderLease(accepted.lease_id, sent_at, remaining, every)


def remaining_at(home: BlockingControl, lease: ReaderLease, reader: pb.EngineRef) -> float:
    """Seconds that the home says a lease has."""
    request = pb.NotifyRequest(sender=reader, notifications=[pb.Notification(renew=pb.Renew(lease_id=lease.lease_id))])
    return from_duration(home.notify_one(request).renewed.remaining)


@pytest.mark.slow
def test_renewals_of_two_readers_with_more_leases_than_a_call_holds(tmp_path: Path) -> None:
    with NodeServerProcess(tmp_path / "home", ttl=TTL, max_ttl=TTL) as server, Client(server.address) as client:
        spec = EngineSpec(unique_id("source"), (Group("full", block_tokens=16, num_blocks=8),))
        tensors = {"layers.0": np.zeros((2, 8, 1, 16, 8), np.uint8)}
        session = client.register_cache(spec, tensors=tensors, axes=AXES, serve=False).session
        home = BlockingControl(server.address)
        renewals = Renewals(home.loop)
        lost, extensions = list[ReaderLease](), list[ReaderLease]()
        leases: list[tuple[ReaderLease, pb.EngineRef]] = []
        for number, reader in enumerate(READERS):
            reference = session.publish(f"request {number}", {"full": Blocks([1])}, expected_reads=1000).reference
            for read in range(PER_PUBLICATION):
                lease = acquired(home, reference, reader, read)
                lease.changed = partial(extensions.append, lease)
                is_lost = partial(lost.append, lease)
                on_loop(home.loop, partial(renewals.keep, lease, home.control, reader, f"read {read}", is_lost))
                leases.append((lease, reader))
        # All are due together from now on, and each outlives its term by several renewals.
        extensions.clear()
        together = now()

        def due() -> None:
            for lease, _ in leases:
                lease.not_renewed(together)
            renewals._news.set()

        on_loop(home.loop, due)
        until(lambda: now() > together + TTL)
        until(lambda: min(Counter(tuple(extensions))[lease] for lease, _ in leases) >= 3)
        assert not lost
        assert all(lease.live(now()) for lease, _ in leases)
        assert min(remaining_at(home, lease, reader) for lease, reader in leases[:: len(leases) // 20]) > 0
        on_loop(home.loop, renewals.close)
        home.close()


def renewed(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
    answer = pb.NotificationResult(renewed=pb.Renewed(remaining=to_duration(60)))
    return [answer for _ in request.notifications]


def kept(renewals: Renewals, home: Control, count: int) -> list[ReaderLease]:
    """Leases that are due in a moment, all of them at once."""
    began = now()
    leases = [ReaderLease(index.to_bytes(16, "big"), began, 60.0, 0.2) for index in range(count)]

    def keep() -> None:
        for index, lease in enumerate(leases):
            renewals.keep(lease, home, READERS[0], f"read number {index}", lambda: None)

    on_loop(home._loop, keep)
    return leases


def test_a_batch_that_is_refused_goes_again_in_halves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with scripted(tmp_path) as (server, home):
        poison = (77).to_bytes(16, "big")

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if any(notification.renew.lease_id == poison for notification in request.notifications):
                raise InvalidField("notifications", len(request.notifications), "none that this home dislikes")
            return renewed(request)

        server.notify = notify
        renewals = Renewals(server.loop)
        leases = kept(renewals, home, 200)
        first = leases[0].deadline

        def all_but_one() -> bool:
            return sum(lease.deadline > first + 0.1 for lease in leases) == 199

        until(all_but_one)
        until(lambda: "read number 77" in caplog.text)
        on_loop(server.loop, renewals.close)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len([record for record in warned if "the first for read number 77" in record.getMessage()]) == 1
    assert poison.hex() not in caplog.text


def test_a_renewal_that_a_home_leaves_out_is_repeated(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, home):
        server.notify = lambda request: renewed(request)[:2]
        renewals = Renewals(server.loop)
        leases = kept(renewals, home, 3)
        first = leases[2].deadline
        until(lambda: leases[2].deadline > first + 0.5)
        on_loop(server.loop, renewals.close)


def test_a_home_whose_renewals_cannot_be_sent_stops_no_other(tmp_path: Path) -> None:
    class Broken(Control):
        async def notify(self, *_: object) -> list[NotificationAnswer]:
            raise RuntimeError("a bug")

    with scripted(tmp_path) as (server, home):
        server.notify = renewed
        renewals = Renewals(server.loop)
        kept(renewals, Broken("127.0.0.1:1", None, server.loop), 1)
        (lease,) = kept(renewals, home, 1)
        first = lease.deadline
        until(lambda: lease.deadline > first + 1)
        on_loop(server.loop, renewals.close)


def test_a_lease_whose_read_has_ended_is_not_renewed_when_it_was_acquired_again(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, home):
        server.notify = renewed
        renewals = Renewals(server.loop)
        (other,) = kept(renewals, home, 1)
        ended = ReaderLease(b"x" * 16, now(), 60.0, 0.05)
        on_loop(server.loop, lambda: renewals.drop(ended))
        on_loop(server.loop, lambda: renewals.keep(ended, home, READERS[0], "ended", lambda: None))
        first = other.deadline
        until(lambda: other.deadline > first + 0.5)
        on_loop(server.loop, renewals.close)
    sent = {told.renew.lease_id for request in server.notified for told in request.notifications}
    assert sent == {other.lease_id}


def test_batches_are_small_enough_that_all_may_fail() -> None:
    error = pb.NotificationResult(error=pb.NotificationError(message="x" * 512, metadata={"value": "x" * 3072}))
    assert pb.NotifyResponse(results=[error] * BATCH).ByteSize() < 4 << 20
