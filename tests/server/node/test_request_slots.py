"""The request slots of a host."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from kvferry.errors import LimitReached
from kvferry_server.node.limits import LARGE_MESSAGE, SLOW_PEER_TIMEOUT
from kvferry_server.node.requests import Arrivals

LARGE_REQUEST = bytes(LARGE_MESSAGE)


async def test_slots_are_freed_however_a_request_ends() -> None:
    class Peer:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        async def read(self) -> Any:
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

    arrivals = Arrivals(1)
    for failing in (RuntimeError("gone"), asyncio.CancelledError()):
        with pytest.raises((RuntimeError, asyncio.CancelledError)):
            await asyncio.wait_for(arrivals.read(Peer(failing)), 10)
    for small in (grpc.aio.EOF, b"small"):
        assert await asyncio.wait_for(arrivals.read(Peer(small)), 10) == (small, False)
    assert await asyncio.wait_for(arrivals.read(Peer(LARGE_REQUEST)), 10) == (LARGE_REQUEST, True)
    waiting = asyncio.ensure_future(arrivals.read(Peer(b"next")))
    await asyncio.sleep(0)
    assert not waiting.done()
    arrivals.slots.release()
    assert await asyncio.wait_for(waiting, 10) == (b"next", False)


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
    assert await asyncio.wait_for(asyncio.gather(*calls[1:]), 10) == [(b"request", False)] * 2
    # Nothing wakes an idle server. A loop acts on timers in the order in which they are due.
    await asyncio.sleep(2 * SLOW_PEER_TIMEOUT)
    assert arrivals._timer is None
