"""Pauses between attempts: they double up to the longest, are never shorter than the peer asked for, and jitter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry._control.backoff import BACKOFF_FIRST, BACKOFF_LAST, Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_success_begins_with_the_first_pause_again() -> None:
    backoff = Backoff(1.0, 5.0)
    for _ in range(3):
        backoff.next()
    backoff.reset()
    assert (backoff.pause, backoff.next(), backoff.next()) == (1.0, 1.0, 2.0)


def test_a_peer_that_asks_for_a_longer_pause_gets_it_and_the_next_one_is_not_longer_for_it() -> None:
    backoff = Backoff(1.0, 5.0)
    assert backoff.next(30.0) == 30.0
    assert backoff.next(0.5) == 2.0


def test_jitter_makes_a_pause_shorter_by_at_most_its_share_and_leaves_the_doubling_alone() -> None:
    backoff = Backoff(1.0, 8.0, jitter=0.5)
    for nominal in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert backoff.pause == nominal
        assert nominal / 2 <= backoff.next() <= nominal
    assert len({Backoff(1.0, 8.0, jitter=0.5).next() for _ in range(20)}) > 1


def test_forked_processes_do_not_pause_alike() -> None:
    """The ranks of an engine, which has forked them, lose their home in the same instant."""
    program = """
import os
from kvferry._control.backoff import Backoff

for _ in range(2):
    if os.fork() == 0:
        os.write(1, b"%r " % Backoff(1.0, 1.0, jitter=0.5).next())
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    first, second = map(float, done.stdout.split())
    assert first != second


def test_jitter_never_goes_below_what_the_peer_asked_for() -> None:
    assert all(Backoff(1.0, 1.0, jitter=0.5).next(0.9) >= 0.9 for _ in range(50))


def test_retries_begin_after_20_ms_and_are_never_more_than_a_second_apart() -> None:
    backoff = Backoff()
    pauses = [backoff.next() for _ in range(10)]
    assert (pauses[0], pauses[-1]) == (BACKOFF_FIRST, BACKOFF_LAST) == pytest.approx((0.02, 1.0))
