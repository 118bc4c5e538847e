"""Steps that come before their turn, or before their read was started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.engine.values import GrantStep
from kvferry.engine.worker import MAX_EARLY, StepOrders
from kvferry.errors import InvalidField


def step(read_id: str, index: int) -> GrantStep:
    return GrantStep(read_id, index, (), last=False)


def test_steps_are_taken_in_their_order_and_once() -> None:
    orders = StepOrders()
    for index in (3, 1, 1):
        orders.put(step("r", index), {"r"})
    assert [one.index for one in orders.take("r")] == [1]
    orders.put(step("r", 1), {"r"})
    orders.put(step("r", 2), {"r"})
    assert [one.index for one in orders.take("r")] == [2, 3]
    assert orders.take("r") == []


def test_reads_that_never_start_do_not_push_out_a_started_one() -> None:
    orders = StepOrders()
    orders.put(step("started", 2), {"started"})
    for number in range(MAX_EARLY + 10):
        orders.put(step(f"early {number}", 1), {"started"})
    orders.put(step("started", 1), {"started"})
    assert [one.index for one in orders.take("started")] == [1, 2]
    # Of the others, the latest are kept.
    assert orders.take("early 0") == []
    assert [one.index for one in orders.take(f"early {MAX_EARLY + 9}")] == [1]


def test_early_reads_are_kept_up_to_their_limit() -> None:
    orders = StepOrders()
    for number in range(MAX_EARLY):
        orders.put(step(f"early {number}", 1), ())
    assert [one.index for one in orders.take("early 0")] == [1]


def test_a_forgotten_read_begins_anew() -> None:
    orders = StepOrders()
    orders.put(step("r", 1), {"r"})
    orders.forget("r")
    assert orders.take("r") == []


@pytest.mark.parametrize("index", [0, -1])
def test_a_step_with_an_index_that_never_comes_is_refused(index: int) -> None:
    """Such a step would count as a repeated one, and its read would wait for it until its deadline."""
    with pytest.raises(InvalidField, match="at least 1"):
        replace(step("r", 1), index=index)
