"""The request slots of a host."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from kvferry.errors import LimitReached
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.home.time_slices import TimeSlices, Worker
from kvferry_server.node.limits import LARGE_MESSAGE, MAX_REQUESTS, SLOW_PEER_TIMEOUT
from kvferry_server.node.requests import KV_TRANSFER, Arrivals, Requests


class Peer:
    """A call whose request has arrived, or has failed."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def read(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


async def test_slots_are_freed_however_a_request_ends() -> None:
    arrivals = Arrivals(1)
    for failing in (RuntimeError("gone"), asyncio.CancelledError()):
        with pytest.raises((RuntimeError, asyncio.CancelledError)):
            await asyncio.wait_for(arrivals.read(Peer(failing)), 10)
    for request in (grpc.aio.EOF, b"small", bytes(LARGE_MESSAGE)):
        assert await asyncio.wait_for(arrivals.read(Peer(request)), 10) == request


async def test_one_timer_serves_all_calls_of_a_host_and_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    come, loop, timers = asyncio.Event(), asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def counted(delay: float, *what: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return call_later(delay, *what)

    class Slow:
        async def read(self) -> bytes:
            await come.wait()
            return b"request"

    arrivals = Arrivals(2)
    monkeypatch.setattr(loop, "call_later", counted)
    calls = [asyncio.ensure_future(arrivals.read(Slow())) for _ in range(3)]
    await asyncio.sleep(0)
    assert timers == [SLOW_PEER_TIMEOUT]
    # The third call waits for a slot, so the first is ended, and no other.
    with pytest.raises(LimitReached):
        await asyncio.wait_for(calls[0], 10)
    come.set()
    assert await asyncio.wait_for(asyncio.gather(*calls[1:]), 10) == [b"request"] * 2
    # Nothing wakes an idle server. A loop acts on timers in the order in which they are due.
    await asyncio.sleep(2 * SLOW_PEER_TIMEOUT)
    assert arrivals._timer is None


async def test_heavy_requests_that_wait_for_their_turn_keep_no_renewal_of_their_host_out() -> None:
    arriving = Requests(Worker(), TimeSlices())

    def read(*notifications: pb.Notification) -> asyncio.Future[Any]:
        peer: Any = Peer(pb.NotifyRequest(notifications=notifications).SerializeToString())
        return asyncio.ensure_future(
            arriving.read(KV_TRANSFER + "Notify", pb.NotifyRequest.FromString, peer, "192.0.2.1")
        )

    heavy = [pb.Notification(decline=pb.Decline(reference="x" * 4096))] * 255
    _, has_turn = await asyncio.wait_for(read(*heavy), 10)
    waiting = [read(*heavy) for _ in range(MAX_REQUESTS)]
    _, renewal = await asyncio.wait_for(read(pb.Notification(renew=pb.Renew())), 10)
    renewal.free()
    assert not any(each.done() for each in waiting)
    has_turn.free()
    for each in waiting:
        _, held = await asyncio.wait_for(each, 10)
        held.free()
    assert not arriving.memory.used


async def test_slow_calls_are_ended_the_sooner_the_more_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0.25 s for each, the last of four thousand would wait for a minute, and a lease lasts for half of one."""

    class Silent:
        async def read(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    loop, looks = asyncio.get_running_loop(), list[float]()
    call_at = loop.call_at

    def noted(when: float, *what: Any, **more: Any) -> asyncio.TimerHandle:
        looks.append(when - loop.time())
        return call_at(when, *what, **more)

    arrivals = Arrivals(MAX_REQUESTS)
    calls = [asyncio.ensure_future(arrivals.read(Silent())) for _ in range(4096)]
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_at", noted)
    with pytest.raises(LimitReached):
        await asyncio.wait_for(calls[0], 10)
    monkeypatch.undo()
    assert looks[-1] <= 2.01 * MAX_REQUESTS / 4096
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
