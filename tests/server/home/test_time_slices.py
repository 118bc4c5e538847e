"""Calls share the event loop: a host that sends much delays another host by one time slice.

The tests assert the order of the work. The clock of these tests counts notifications, and each is as much work as a
slice, however fast the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvferry._wire.reference import format_reference
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.times import BOOT, Times
from kvferry_server.domain.values import NOBODY
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import TIME_SLICE, TimeSlices
from kvferry_server.servicers.notify import notify
from kvferry_server.servicers.relay import Caller, Relays

GREEDY, OTHER = "10.0.0.1", "10.0.0.2"
CALLS, EACH = 64, 1024
RENEWAL = pb.Notification(renew=pb.Renew(lease_id=b"l" * 16))
READER = pb.EngineRef(engine_id="reader", incarnation=b"i" * 16)


class Shared:
    """A home, and its calls in the order in which they come."""

    def __init__(self) -> None:
        self.home = Home(BOOT, Times(), "10.0.0.9:1")
        self.home.time_slices = TimeSlices(lambda: 2 * TIME_SLICE * self.worked())
        self._relays = Relays("10.0.0.9:1", None, anywhere=False)

    def send(self, host: str, *notifications: pb.Notification) -> asyncio.Task[pb.NotifyResponse]:
        request = pb.NotifyRequest(sender=READER, notifications=notifications)
        return asyncio.create_task(notify(self.home, self._relays, request, 60.0, Caller(host, NOBODY)))

    def worked(self) -> int:
        """Return how many notifications were acted on."""
        return sum(self.home.journal.notifications.values())


@pytest.fixture
def shared() -> Shared:
    return Shared()


def invented(number: int) -> pb.Notification:
    """A decline with a made-up reference."""
    reference = pb.Reference(home="10.0.0.9:1", engine_id="e", router_key=f"r{number}", key=b"k" * 16)
    return pb.Notification(decline=pb.Decline(reference=format_reference(reference)))


async def passes(shared: Shared, worked: int) -> None:
    """Let other calls work until `worked` notifications were acted on."""
    while shared.worked() < worked:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def worked_meanwhile(shared: Shared, flood: Sequence[pb.Notification], host: str = GREEDY) -> int:
    """Return how many of the flood's notifications are acted on between a renewal of `OTHER` and its answer."""
    calls = [shared.send(host, *flood) for _ in range(CALLS)]
    await passes(shared, 2 * CALLS)
    before = shared.worked()
    [answer] = (await shared.send(OTHER, RENEWAL)).results
    assert answer.WhichOneof("kind") == "error"
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    # The renewal itself is not part of the flood.
    return shared.worked() - before - 1


async def test_a_flood_of_one_host_delays_a_renewal_of_another_by_one_slice(shared: Shared) -> None:
    assert await worked_meanwhile(shared, [invented(number) for number in range(EACH)]) <= 1


async def test_a_flood_of_renewals_delays_a_renewal_of_another_host_by_one_slice(shared: Shared) -> None:
    # In the rotation of the short calls, as the flood.
    assert await worked_meanwhile(shared, [RENEWAL] * EACH) <= 1


async def test_a_renewal_comes_before_the_large_batches_of_its_own_host(shared: Shared) -> None:
    assert await worked_meanwhile(shared, [invented(number) for number in range(EACH)], OTHER) <= 1


async def test_a_flood_of_renewals_leaves_every_second_slice_to_large_batches(shared: Shared) -> None:
    flood = [shared.send(GREEDY, *[RENEWAL] * EACH) for _ in range(CALLS)]
    large = shared.send(OTHER, *(invented(number) for number in range(50)))
    await asyncio.wait([large])
    renewals = shared.home.journal.notifications["renew"]
    assert 40 <= renewals <= CALLS + 60
    for call in flood:
        call.cancel()
    await asyncio.wait(flood)


async def test_calls_that_come_together_share_one_slice() -> None:
    worked: list[str] = []
    slices = TimeSlices(lambda: 2 * TIME_SLICE * len(worked))

    async def work(host: str) -> None:
        await slices.begin(host, short=False)
        worked.append(host)

    calls = [asyncio.create_task(work(host)) for host in (GREEDY, OTHER)]
    await asyncio.sleep(0)
    assert worked == [GREEDY]
    await asyncio.wait(calls)
    assert worked == [GREEDY, OTHER]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("short", [True, False])
async def test_later_call_does_not_overtake_a_waiting_call(*, short: bool, at_once: bool) -> None:
    """Also if the slice of this pass has time left, and if a waiting call was given the next slice a moment ago."""
    worked: list[str] = []
    slices = TimeSlices(lambda: 2 * TIME_SLICE * ("a" in worked))
    later: list[asyncio.Task[None]] = []

    async def work(host: str) -> None:
        await slices.begin(host, short=short)
        worked.append(host)
        if host == "b" and at_once:
            await work("late")
        elif host == "b":
            later.append(asyncio.create_task(work("late")))

    await asyncio.gather(*(work(host) for host in "abc"))
    await asyncio.gather(*later)
    assert worked == ["a", "b", "c", "late"]


async def test_call_that_leaves_with_a_slice_passes_the_slice_on(shared: Shared) -> None:
    first = shared.send(GREEDY, RENEWAL, RENEWAL)
    leaving, stays = shared.send(GREEDY, RENEWAL), shared.send(OTHER, RENEWAL)
    await passes(shared, 1)
    # The call's turn is next; it was given in this pass of the loop at the earliest.
    leaving.cancel()
    await asyncio.wait([first])
    await asyncio.wait([leaving, stays])
    assert len(stays.result().results) == 1
    assert len((await shared.send(GREEDY, RENEWAL)).results) == 1
