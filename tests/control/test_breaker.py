"""A peer that fails is asked seldom; one success, and it is asked as ever."""

from __future__ import annotations

from kvferry._control.backoff import Breaker


def failing(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        assert breaker.ask(now) == 0.0
        breaker.failed(now)


def test_a_breaker_opens_after_the_threshold_and_returns_the_pause() -> None:
    breaker = Breaker(3, 1.0, 4.0)
    failing(breaker, 3)
    assert breaker.ask(0.25) == 0.75


def test_an_open_breaker_admits_one_attempt_per_pause_and_each_failure_doubles_the_pause() -> None:
    breaker = Breaker(2, 1.0, 4.0)
    failing(breaker, 2)
    now, pauses = 0.0, []
    for _ in range(5):
        pause = breaker.ask(now)
        pauses.append(pause)
        now += pause
        assert breaker.ask(now) == 0.0
        assert breaker.ask(now) > 0.0, "a second one went through"
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_failures_of_attempts_from_before_the_pause_make_no_pause_longer() -> None:
    breaker = Breaker(1, 1.0, 8.0)
    failing(breaker, 1)
    for _ in range(50):
        breaker.failed(0.5)
    assert breaker.ask(0.5) == 0.5


def test_an_attempt_without_an_end_does_not_keep_the_breaker_open() -> None:
    breaker = Breaker(1, 1.0, 8.0)
    failing(breaker, 1)
    assert breaker.ask(1.0) == 0.0
    assert breaker.ask(2.0) == 0.0


def test_a_success_closes_the_breaker() -> None:
    breaker = Breaker(2, 1.0, 8.0)
    failing(breaker, 2)
    assert breaker.failing_for(5.0) == 5.0
    breaker.succeeded()
    assert breaker.failing_for(6.0) == 0.0
    failing(breaker, 1, 6.0)
    assert breaker.ask(6.0) == 0.0
