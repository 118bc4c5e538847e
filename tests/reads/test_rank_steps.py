"""A share whose source publishes in steps: one transfer after the other, each of all that has come, one end for all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry._reads.rank_read import RankRead
from kvferry.errors import PublicationTimeout, TransferCancelled, TransferFailed, TransferStuck
from kvferry.geometry import Blocks
from tests.reads.played_rank import LONG, SOURCE, PlayedRank


@pytest.fixture
def world() -> Iterator[PlayedRank]:
    made = PlayedRank()
    made.known_sources[SOURCE] = made.peer()
    yield made
    made.close()


@pytest.fixture
def careful() -> Iterator[PlayedRank]:
    made = PlayedRank(verifies=True)
    made.known_sources[SOURCE] = made.peer()
    yield made
    made.close()


def more(place: int) -> dict[str, Blocks]:
    """The block of the request at this place."""
    return {"full": Blocks([2 + place], 16 * place)}


def begun(world: PlayedRank, **options: object) -> RankRead:
    """A share whose first step moves."""
    world.first = {"full": Blocks([2], 0, 16)}
    read = world.start(complete=False, **options)  # type: ignore[arg-type]
    world.until(lambda: world.transfers)
    return read


def told(world: PlayedRank) -> list[list[int]]:
    """The blocks of each expansion."""
    return [expanded[0]["full"].ids.tolist() for expanded in world.expanded]  # type: ignore[index]


def test_steps_that_come_while_one_moves_are_moved_together_afterwards(world: PlayedRank) -> None:
    read = begun(world)
    for place in (1, 2, 3):
        world.add(read, {"full": Blocks([2 + place], 16 * place, 16 * place + 16)}, last=False)
    world.worked()
    assert (told(world), world.lasts) == ([[2]], [False])
    world.transfers[0].landed(10)
    world.until(lambda: len(world.transfers) == 2)
    assert (told(world), world.lasts) == ([[2], [3, 4, 5]], [False, False])
    assert not world.ended
    assert (read.bytes, read.bytes_total, read.expanded) == (10, 20, False)
    world.add(read, {}, last=True)
    world.transfers[1].landed(10)
    world.until(lambda: len(world.transfers) == 3)
    assert world.lasts == [False, False, True]
    assert not world.ended
    world.transfers[2].landed(10)
    world.until(lambda: world.ended)
    assert (read.error, read.quiet, read.bytes, read.expanded) == (None, True, 30, True)
    assert read.ended_at == world.transfers[2].ended_at
    assert (read.work.descriptors, read.work.pieces) == (9, 15)


def test_a_step_with_too_few_tokens_starts_no_transfer(world: PlayedRank) -> None:
    world.reaches = 0
    read = world.start(complete=False)
    world.until(lambda: world.expanded)
    world.worked()
    assert world.transfers == []
    assert read.transfer is None
    world.reaches = 1
    world.add(read, {}, last=False)
    world.until(lambda: world.transfers)


def test_steps_that_come_before_the_handshake_are_moved_together() -> None:
    world = PlayedRank()
    world.first = {"full": Blocks([2], 0, 16)}
    read = world.start(complete=False)
    world.until(lambda: world.asked)
    world.add(read, more(1), last=True)
    world.worked()
    world.answer("a")
    world.until(lambda: world.transfers)
    assert (told(world), world.lasts) == ([[2, 3]], [True])
    world.close()


def test_a_step_that_fails_ends_the_share_and_nothing_more_is_moved(world: PlayedRank) -> None:
    read = begun(world)
    world.add(read, more(1), last=True)
    world.worked()
    world.transfers[0].fail(TransferFailed("the source is gone"))
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferFailed)
    assert not read.quiet
    world.add(read, {}, last=True)
    world.worked()
    assert len(world.transfers) == 1
    world.transfers[0].fenced()
    world.until(lambda: world.quiesced)


def test_a_share_cancelled_between_two_steps_ends_at_once_and_is_quiet(world: PlayedRank) -> None:
    read = begun(world)
    world.transfers[0].landed(10)
    world.worked()
    assert not world.ended
    assert world.reads.cancel(read)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled)
    assert read.quiet


def test_blocks_that_do_not_follow_end_the_share_before_they_are_touched(world: PlayedRank) -> None:
    read = begun(world)
    world.transfers[0].landed(10)
    world.add(read, more(2), last=True)
    world.until(lambda: world.ended)
    assert "tokens from 16" in str(read.error)
    assert len(world.transfers) == 1


@pytest.mark.parametrize("moving", [False, True])
def test_a_share_at_its_deadline_names_what_is_late(world: PlayedRank, moving: bool) -> None:
    read = begun(world)
    if not moving:
        world.transfers[0].landed(10)
        world.worked()
    world.loop.pass_time(2 * LONG)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferStuck if moving else PublicationTimeout)
    assert read.quiet is not moving


def test_blocks_of_all_steps_are_compared_at_the_end(careful: PlayedRank) -> None:
    read = begun(careful)
    careful.transfers[0].landed(10)
    careful.add(read, {"full": Blocks([5], 16, 32)}, last=True)
    careful.until(lambda: len(careful.transfers) == 2)
    assert careful.verified == []
    careful.transfers[1].landed(10)
    careful.until(lambda: careful.ended)
    (arrived,) = careful.verified
    assert arrived.granted == {"full": Blocks([2, 5], 0, 32)}
