"""Waiting for a change that comes together with the end of the wait."""

from __future__ import annotations

import asyncio

import pytest

from kvferry_server.home.home import Waker


@pytest.mark.parametrize("seconds", [None, 600.0])
@pytest.mark.parametrize("turns", range(5))
async def test_wait_that_is_cancelled_while_it_is_woken_is_cancelled(turns: int, seconds: float | None) -> None:
    waker = Waker()

    async def look() -> None:
        while True:
            waker.clear()
            await waker.wait(seconds)

    looking = asyncio.create_task(look())
    await asyncio.sleep(0)
    waker.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    looking.cancel()
    done, _ = await asyncio.wait([looking], timeout=10)
    assert done
    assert looking.cancelled()


async def test_a_wait_ends_with_its_time() -> None:
    await Waker().wait(0.01)
