"""The thread that does what an engine's step must not wait for outlives whatever it is given."""

from __future__ import annotations

import threading

import pytest

from kvferry._work_queue import WorkQueue
from kvferry.errors import LimitReached


def test_work_and_ticks_that_raise_do_not_end_it() -> None:
    ticks: list[None] = []
    done = threading.Event()

    def tick() -> float:
        ticks.append(None)
        if len(ticks) < 3:
            raise RuntimeError("a bug")
        done.set()
        return 60.0

    def work() -> None:
        raise ValueError("a bug of the work")

    desk = WorkQueue("kvferry-test", tick)
    desk.do(work)
    desk.do(work)
    assert done.wait(30)
    seen = threading.Event()
    desk.do(seen.set)
    assert seen.wait(30)
    desk.close(30)
    desk.close(30)
    assert not any(thread.name == "kvferry-test" for thread in threading.enumerate())


def test_closing_from_its_own_work_ends_it() -> None:
    desk = WorkQueue("kvferry-test")
    desk.do(lambda: desk.close(30))
    desk._thread.join(30)
    assert not desk._thread.is_alive()


def test_a_thread_that_cannot_be_had_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(LimitReached) as caught:
        WorkQueue("kvferry-test")
    assert caught.value.values["limit"] == "threads"


def test_later_work_is_done_by_its_time_and_work_that_raises_ends_nothing() -> None:
    desk = WorkQueue("kvferry-test")
    done: list[str] = []
    over = threading.Event()

    def work() -> None:
        done.append("raises")
        raise ValueError("a bug of the work")

    def last() -> None:
        done.append("last")
        over.set()

    desk.do_later(0.3, last)
    desk.do_later(0.1, work)
    desk.do_later(0.1, lambda: done.append("as late, asked later"))
    desk.do_later(3600.0, lambda: done.append("never"))
    desk.do(lambda: done.append("at once"))
    assert over.wait(30)
    assert done == ["at once", "raises", "as late, asked later", "last"]
    desk.close(30)
    assert not desk._thread.is_alive()
    assert "never" not in done


def test_later_work_and_ticks_do_not_keep_each_other_waiting() -> None:
    ticked = threading.Event()
    ticks: list[None] = []

    def tick() -> float:
        ticks.append(None)
        if len(ticks) >= 3:
            ticked.set()
        return 0.05

    desk = WorkQueue("kvferry-test", tick)
    done = threading.Event()
    desk.do_later(3600.0, lambda: None)
    assert ticked.wait(30)
    desk.do_later(0.1, done.set)
    assert done.wait(30)
    desk.close(30)
