"""When vLLM needs no steps although publications are held. Needs no vLLM."""

from __future__ import annotations

import pytest

from kvferry.integrations.vllm.idle_steps import AWAKE, Rest


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_engine_does_not_rest_before_most_publications_are_read(clock: Clock) -> None:
    rest = Rest(drains=False, now=clock)
    for _ in range(3):
        rest.did_something()
        clock.now += AWAKE * 0.9
        assert not rest.may_rest(holding=True)
    clock.now += AWAKE
    assert rest.may_rest(holding=True)


def test_an_engine_that_drains_does_not_rest(clock: Clock) -> None:
    """vLLM would end it at once when it is told to, before its publications are read."""
    rest = Rest(drains=True, now=clock)
    rest.did_something()
    clock.now += 100 * AWAKE
    assert not rest.may_rest(holding=True)
    assert rest.may_rest(holding=False)


def test_an_engine_that_drains_is_denied_its_rest(clock: Clock) -> None:
    for drains in (True, False):
        rest = Rest(drains=drains, now=clock)
        rest.did_something()
        assert not rest.denied
        clock.now += 2 * AWAKE
        assert rest.denied == drains
