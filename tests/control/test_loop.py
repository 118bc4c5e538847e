"""The event loop of a client: every caller learns the end of its work, whatever happens to the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry._clock import now
from kvferry._loop import Loop, News, Signal
from kvferry.errors import Closed, LimitReached, WrongState
from tests.support.blocking_control import looping, on_loop, turns
from tests.support.waiting import until

SOON = 30.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    with looping() as made:
        yield made


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_the_thread_starts_with_the_first_work_and_ends_with_the_loop() -> None:
    made = Loop("kvferry-test-one")
    assert not threads("kvferry-test-one")
    assert made.run(asyncio.sleep(0, "done")) == "done"
    assert len(threads("kvferry-test-one")) == 1
    made.close()
    assert not threads("kvferry-test-one")
    made.close()


def test_a_loop_without_a_thread_starts_nothing_until_there_is_one(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(LimitReached):
            loop.call(lambda: done.append(1))
        with pytest.raises(LimitReached):
            loop.run(forever())
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    assert done == []


def test_a_closed_loop_refuses_work() -> None:
    for used in (False, True):
        made = Loop()
        if used:
            made.run(asyncio.sleep(0))
        made.close()
        assert not made.call(lambda: pytest.fail("it was done"))
        with pytest.raises(Closed):
            made.run(forever())


def test_the_end_of_a_loop_ends_every_wait_on_the_loop() -> None:
    """However deep coroutines wait for each other, and whatever they begin when they are cancelled."""
    made, began = Loop(), threading.Barrier(9)

    async def deep(level: int) -> None:
        if level:
            await asyncio.wait([made.spawn(deep(level - 1), "deeper")])
            return
        try:
            made.call(lambda: None)
            await forever()
        finally:
            made.spawn(forever(), "what goes on")
            await asyncio.sleep(0)

    def wait() -> type[BaseException] | None:
        began.wait(SOON)
        try:
            made.run(deep(8))
        except BaseException as error:
            return type(error)
        return None

    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(wait) for _ in range(8)]
        began.wait(SOON)
        until(lambda: len(made._tasks) >= 8 * 8)
        made.close()
        assert [each.result(SOON) for each in waits] == [Closed] * 8


def test_work_handed_over_while_the_loop_ends_is_done_or_refused() -> None:
    """No caller waits for ever."""
    for _ in range(20):
        made = Loop()
        made.run(asyncio.sleep(0))

        def run(loop: Loop = made) -> bool:
            for _ in range(1000):
                try:
                    loop.run(asyncio.sleep(0.001))
                except Closed:
                    return True
            return False

        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(run) for _ in range(4)]
            made.close()
            assert all(each.result(SOON) for each in runs)


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
def test_the_loop_goes_on_after_any_exception_of_its_work(loop: Loop, raised: type[BaseException]) -> None:
    def fail() -> None:
        raise raised

    async def fails() -> None:
        raise raised

    loop.call(fail)
    on_loop(loop, lambda: loop.soon(fail))
    on_loop(loop, lambda: loop.at(0.0, fail))
    on_loop(loop, lambda: loop.spawn(fails(), "what fails"))
    assert loop.run(asyncio.sleep(0.01, "done")) == "done"


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
def test_turns_go_on_after_any_exception(
    loop: Loop, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    taken = [0]

    async def turn() -> bool:
        taken[0] += 1
        if taken[0] < 3:
            raise raised("a turn")
        return False

    task = on_loop(loop, lambda: loop.spawn_turns(turn, "what is repeated"))
    until(task.done)
    assert taken == [3]
    assert caplog.text.count("a turn of what is repeated failed") == 2


def test_turns_end_when_they_are_cancelled(loop: Loop) -> None:
    began = threading.Event()

    async def turn() -> bool:
        began.set()
        await forever()
        return True

    task = on_loop(loop, lambda: loop.spawn_turns(turn, "what is repeated"))
    assert began.wait(SOON)
    on_loop(loop, task.cancel)
    until(task.done)


def test_a_thread_runs_work_that_takes_long_and_a_cancelled_caller_does_not_wait(loop: Loop) -> None:
    release, ended = threading.Event(), threading.Event()

    def work() -> str:
        release.wait(SOON)
        ended.set()
        return "done"

    def fail() -> None:
        raise ValueError("work")

    first = loop.submit(loop.on_thread(work, "kvferry-test-work"))
    second = loop.submit(loop.on_thread(work, "kvferry-test-work"))
    second.cancel()
    turns(loop)
    with pytest.raises(ValueError, match="work"):
        loop.run(loop.on_thread(fail, "kvferry-test-work"))
    release.set()
    assert first.result(SOON) == "done"
    assert ended.wait(SOON)


def test_timers_follow_a_clock_that_counts_the_time_of_a_suspend() -> None:
    """The thread does not wake when the host does: it looks at its timers from time to time."""
    suspended, rang = [0.0], threading.Event()
    with looping(lambda: now() + suspended[0]) as loop:
        on_loop(loop, lambda: loop.at(loop.now() + 3600, rang.set))
        suspended[0] = 4000.0
        assert rang.wait(SOON)


@pytest.mark.parametrize("when", ["before", "during", "never"])
def test_a_signal_ends_one_wait(when: str) -> None:
    clock = [1000.0]
    with looping(lambda: clock[0]) as loop:
        signal = Signal(loop)
        if when == "before":
            signal.set()
            signal.set()
        wait = loop.submit(signal.wait(1010.0))
        turns(loop)
        assert wait.done() == (when == "before")
        if when == "during":
            signal.set()
        elif when == "never":
            clock[0] = 1010.0
            turns(loop)
        wait.result(SOON)
        # The next wait is for what comes then.
        again = loop.submit(signal.wait(1020.0))
        turns(loop)
        assert not again.done()
        signal.set()
        again.result(SOON)


def test_a_failure_in_a_callback_beside_the_running_coroutine_is_logged(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise ValueError("a bug")

    with caplog.at_level(logging.ERROR):
        task = on_loop(loop, lambda: loop.spawn(fails(), "what fails"))
        until(task.done)
        turns(loop)
    assert "what fails failed" in caplog.text


def test_a_loop_that_stops_before_its_closer_goes_on_does_not_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Loop("kvferry-test-stopping")
    made.run(asyncio.sleep(0))
    call = made._events.call_soon_threadsafe

    def stop_first(work: Any, *given: Any) -> asyncio.Handle:
        handle = call(work, *given)
        # The loop's thread ends before the closer goes on.
        if made._thread is not None:
            made._thread.join(SOON / 10)
        return handle

    monkeypatch.setattr(made._events, "call_soon_threadsafe", stop_first)
    made.close(SOON / 10)
    assert not threads("kvferry-test-stopping")


def test_who_waits_on_the_thread_of_the_loop_for_the_loop_hears_of_it(loop: Loop) -> None:
    """As a handler of a logger that closes its client."""

    def wait() -> type[BaseException] | None:
        try:
            loop.run(forever())
        except WrongState as error:
            return type(error)
        return None

    assert on_loop(loop, wait) is WrongState


async def test_a_wait_for_news_leaves_no_timer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine waits in each of its steps, for as long as it likes."""
    running, timers, news = asyncio.get_running_loop(), list[asyncio.TimerHandle](), News()
    call_later = running.call_later

    def noted(*what: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*what))
        return timers[-1]

    monkeypatch.setattr(running, "call_later", noted)
    for _ in range(3):
        news.tell()
        assert await news.arrive(SOON)
    assert [timer.cancelled() for timer in timers] == [True] * 3
