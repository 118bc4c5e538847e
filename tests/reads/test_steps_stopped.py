"""A share whose source publishes in steps, stopped at each moment at which it may write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvferry._reads.rank_read import RankRead
from kvferry._transport.transfer import Transfer, TransferState
from kvferry.errors import TransferCancelled
from kvferry.geometry import Blocks
from tests.reads.played_rank import PlayedRank

FIRST, SECOND = {"full": Blocks([2], 0, 16)}, {"full": Blocks([3], 16, 32)}


@pytest.fixture
def world() -> Iterator[PlayedRank]:
    found = PlayedRank()
    yield found
    found.close()


def between_steps(world: PlayedRank) -> RankRead:
    """A share whose first step has arrived, and whose last has not come."""
    world.first = FIRST
    world.answer("a")
    read = world.start("a", complete=False)
    world.until(lambda: world.transfers)
    world.transfers[0].landed(world.size)
    world.worked()
    return read


def test_a_share_that_is_stopped_while_a_later_step_begins_may_write(world: PlayedRank) -> None:
    read = between_steps(world)
    begin, quiet = world.transfer, list[bool]()

    def cancelled_meanwhile(*parts: Any, **how: Any) -> Transfer:
        quiet.append(world.reads.cancel(read))
        return begin(*parts, **how)

    world.transfer = cancelled_meanwhile  # type: ignore[method-assign]
    world.add(read, SECOND, last=False)
    world.until(lambda: world.ended)
    assert quiet == [False]
    assert [transfer.state for transfer in world.transfers] == [TransferState.DONE, TransferState.CANCELLED]
    assert isinstance(read.error, TransferCancelled)
    assert not read.quiet
