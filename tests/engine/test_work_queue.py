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
