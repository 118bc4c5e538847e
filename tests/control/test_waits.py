"""One wait after the other: what ends a wait ends it once, and a cancel cuts short what waits now, and all later."""

from __future__ import annotations

from functools import partial

from kvferry._control.waits import Waits


def test_a_wait_ends_with_the_first_that_ends_it() -> None:
    waits = Waits()
    first = waits.begin()
    assert waits.ends(first)
    assert not waits.ends(first)
    second = waits.begin()
    # What ended the first comes again.
    assert not waits.ends(first)
    assert waits.ends(second)


def test_an_interrupt_cuts_the_present_wait_short_and_all_later_ones() -> None:
    waits, stopped = Waits(), list[str]()
    wait = waits.begin()
    waits.stop_by(wait, partial(stopped.append, "first"))
    assert not stopped
    waits.interrupt()
    assert stopped == ["first"]
    assert waits.ends(wait)
    for name in ("second", "third"):
        wait = waits.begin()
        waits.stop_by(wait, partial(stopped.append, name))
        assert waits.ends(wait)
    assert stopped == ["first", "second", "third"]


def test_an_interrupt_between_two_waits_stops_neither_the_one_before_nor_nothing() -> None:
    waits, stopped = Waits(), list[str]()
    wait = waits.begin()
    waits.stop_by(wait, partial(stopped.append, "before"))
    assert waits.ends(wait)
    waits.interrupt()
    assert stopped == []
    waits.stop_by(waits.begin(), partial(stopped.append, "after"))
    assert stopped == ["after"]


def test_a_wait_that_has_ended_is_not_cut_short() -> None:
    waits, stopped = Waits(), list[str]()
    ended = waits.begin()
    # The answer came before it was said how to stop the call.
    assert waits.ends(ended)
    waits.stop_by(ended, partial(stopped.append, "ended"))
    waits.interrupt()
    waits.stop_by(ended, partial(stopped.append, "ended"))
    following = waits.begin()
    waits.stop_by(ended, partial(stopped.append, "ended"))
    assert stopped == []
    waits.stop_by(following, partial(stopped.append, "following"))
    assert stopped == ["following"]


def test_a_wait_that_is_not_interrupted_is_not_stopped() -> None:
    waits, stopped = Waits(), list[str]()
    for _ in range(2):
        wait = waits.begin()
        waits.stop_by(wait, partial(stopped.append, "stopped"))
        assert waits.ends(wait)
    assert stopped == []
