"""The thread that does what an engine's step must not wait for outlives whatever it is given."""

from __future__ import annotations

import threading

import pytest

from kvferry._work_queue import WorkQueue
from kvferry.errors import LimitReached
from tests.support.waiting import until


def test_work_that_raises_does_not_end_it() -> None:
    def work() -> None:
        raise ValueError("a bug of the work")

    queue = WorkQueue("kvferry-test")
    queue.do(work)
    queue.do_later(0.0, work)
    seen = threading.Event()
    queue.do_later(0.01, seen.set)
    assert seen.wait(30)
    queue.close(30)
    queue.close(30)
    assert not any(thread.name == "kvferry-test" for thread in threading.enumerate())


def test_later_work_is_done_in_the_order_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    # Real time may pass while the work is queued, and would make some of it due before the rest is there.
    time = 0.0
    monkeypatch.setattr("kvferry._work_queue.now", lambda: time)
    done: list[int] = []
    ended = threading.Event()
    queue = WorkQueue("kvferry-test")
    queue.do_later(0.2, ended.set)
    for number, seconds in enumerate((0.1, 0.05, 0.0, 0.0)):
        queue.do_later(seconds, lambda number=number: done.append(number))  # type: ignore[misc]
    until(lambda: len(done) == 2)
    time = 0.2
    assert ended.wait(30)
    assert done == [2, 3, 1, 0]
    queue.close(30)


def test_later_work_is_done_where_there_is_always_other_work() -> None:
    seen = threading.Event()
    queue = WorkQueue("kvferry-test")

    def again() -> None:
        if not seen.is_set():
            queue.do(again)

    queue.do(again)
    queue.do_later(0.01, seen.set)
    assert seen.wait(30)
    queue.close(30)


def test_later_work_is_not_done_once_it_is_closed() -> None:
    seen = threading.Event()
    queue = WorkQueue("kvferry-test")
    queue.do_later(60.0, seen.set)
    queue.close(30)
    assert not queue._thread.is_alive()
    assert not seen.is_set()


def test_what_is_asked_while_it_closes_is_done_and_nothing_after() -> None:
    queue, done = WorkQueue("kvferry-test"), list[str]()
    goes_on = threading.Event()

    def work() -> None:
        assert goes_on.wait(30)
        assert queue.do(lambda: done.append("meanwhile"))

    assert queue.do(work)
    queue.close(0)
    goes_on.set()
    queue._thread.join(30)
    assert done == ["meanwhile"]
    assert not queue.do(lambda: done.append("after"))


def test_closing_from_its_own_work_ends_it() -> None:
    queue = WorkQueue("kvferry-test")
    queue.do(lambda: queue.close(30))
    queue._thread.join(30)
    assert not queue._thread.is_alive()


def test_a_thread_that_cannot_be_had_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(LimitReached) as caught:
        WorkQueue("kvferry-test")
    assert caught.value.values["limit"] == "threads"
