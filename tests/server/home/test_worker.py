"""The worker thread: hosts take turns on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from kvferry.errors import LimitReached
from kvferry_server.home.time_slices import Worker

WITHIN = 10.0


@pytest.fixture
async def worker() -> Worker:
    return Worker()


async def asked(worker: Worker, host: str, call: Callable[[], object]) -> asyncio.Task[object]:
    """Begin a call, and let it run until it waits."""
    task = asyncio.create_task(worker.run(host, call))
    await asyncio.sleep(0)
    return task


async def test_hosts_take_turns(worker: Worker) -> None:
    go_on, order = threading.Event(), list[str]()
    first = await asked(worker, "greedy", lambda: go_on.wait(WITHIN))
    greedy = [await asked(worker, "greedy", lambda: order.append("greedy")) for _ in range(20)]
    others = [await asked(worker, host, partial(order.append, host)) for host in ("a", "b")]
    go_on.set()
    await asyncio.wait_for(asyncio.gather(first, *greedy, *others), WITHIN)
    assert order[:4] == ["greedy", "a", "b", "greedy"]


async def test_caller_that_leaves_passes_its_turn_on(worker: Worker) -> None:
    """Also a turn that was given a moment ago."""
    go_on, order = threading.Event(), list[str]()
    first = await asked(worker, "a", lambda: go_on.wait(WITHIN))
    leaving = [await asked(worker, "a", lambda: order.append("left")) for _ in range(3)]
    leaving[0].cancel()
    stays = await asked(worker, "b", lambda: order.append("b"))
    first.add_done_callback(lambda _: [task.cancel() for task in leaving])
    go_on.set()
    await asyncio.wait_for(stays, WITHIN)
    await asyncio.wait_for(worker.run("c", lambda: order.append("c")), WITHIN)
    assert order[-2:] == ["b", "c"]


async def test_a_caller_that_leaves_does_not_start_a_second_thread(worker: Worker) -> None:
    """Otherwise a client that asks and leaves, again and again, would have as many threads as it likes."""
    go_on, began = threading.Event(), threading.Event()
    leaves = await asked(worker, "a", lambda: go_on.wait(WITHIN))
    leaves.cancel()
    await asyncio.wait([leaves])
    stays = await asked(worker, "b", began.set)
    assert not began.wait(0.1)
    go_on.set()
    await asyncio.wait_for(stays, WITHIN)


async def test_error_of_a_call_is_raised_and_the_next_call_runs(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.run("a", lambda: 1 // 0)
    assert await worker.run("a", lambda: 1) == 1


async def test_thread_that_the_system_refuses_fails_that_call_only(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LimitReached) as caught:
            await worker.run("a", lambda: None)
    assert caught.value.retryable
    assert await worker.run("a", lambda: 1) == 1


async def test_an_idle_worker_has_no_thread(worker: Worker) -> None:
    running = await worker.run("a", threading.current_thread)
    running.join(WITHIN)
    assert not running.is_alive()


def test_call_that_outlives_its_event_loop_leaves_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    worker, go_on = Worker(), threading.Event()

    async def begin() -> None:
        (await asked(worker, "a", lambda: go_on.wait(WITHIN))).cancel()

    asyncio.run(begin())
    go_on.set()
    worker.join()
    assert not caplog.records
