"""Callers that leave while they wait for a turn: no turn is lost, and none is given twice."""

from __future__ import annotations

import asyncio

import pytest

from kvferry_server.home.time_slices import Rotation


@pytest.mark.parametrize("woken", [True, False])
async def test_caller_that_leaves_passes_on_only_its_own_turn(*, woken: bool) -> None:
    """A lost turn would stop a node server's worker thread for ever; a turn too many would give it to two calls."""
    handed_on: list[bool] = []
    rotation = Rotation(lambda: handed_on.append(rotation.wake()))
    leaving, stays = (asyncio.create_task(rotation.wait(host)) for host in ("a", "b"))
    await asyncio.sleep(0)
    if woken:
        assert rotation.wake()
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    assert handed_on == [True] * woken
    if not woken:
        assert rotation.wake()
    await asyncio.wait([stays])
    assert not rotation
