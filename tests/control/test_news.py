"""News are told to whoever waits: threads and coroutines, on any event loop, also one that was closed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from kvferry._loop import News

SOON = 20.0
LONG = 3600.0


def test_the_end_stays() -> None:
    """Of two threads, one may have looked before the end, and begin to wait when the other has heard of it."""
    news = News()
    assert not news.wait(0.0)
    news.tell()
    assert news.wait(0.0)
    assert not news.wait(0.0)
    news.end()
    for _ in range(3):
        assert news.wait(LONG)
        assert asyncio.run(news.arrive(LONG))


def test_a_loop_that_was_closed_is_forgotten() -> None:
    news, closed = News(), []
    for _ in range(10):
        loop = asyncio.new_event_loop()
        closed.append(loop.create_task(news.arrive(LONG)))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert len(news._waiting) == 10
    news.tell()
    assert not news._waiting
    assert news.wait(0.0)
    for task in closed:
        # So that asyncio does not complain of them.
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_coroutines_of_several_loops_are_all_woken() -> None:
    news, waiting = News(), threading.Barrier(9)

    async def arrive() -> None:
        asyncio.get_running_loop().call_soon(waiting.wait)
        await news.arrive(LONG)

    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(asyncio.run, arrive()) for _ in range(8)]
        waiting.wait(SOON)
        news.tell()
        for run in runs:
            run.result(SOON)
