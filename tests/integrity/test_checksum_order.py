"""The sums of one publication are sent in the order in which they came, whatever their home takes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group, IntegrityOptions
from kvferry._control.connection import Control
from kvferry._integrity.checksum_publisher import Checksummer
from kvferry._memory.rank_memory import RankMemory
from kvferry._wire.token import EngineToken
from kvferry.errors import Closed, HomeRecovering, InvalidField, KvferryError
from kvferry.geometry import RankGeometry
from kvferry.geometry.tensors import Holding, planes_of
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.loops import PlayedLoop

SOON = 20.0
GROUP = Group("full", block_tokens=4, num_blocks=8)
MEMORY = np.random.default_rng(5).integers(0, 256, (8, 4, 4, 16), np.uint8)
PLANES = planes_of({"0": MEMORY}, ("block", "head", "token", "content"), GROUP, ("key",), Holding())


class Home:
    """Takes the first page only when it is asked again, or never."""

    def __init__(self, refusal: KvferryError) -> None:
        self.refusal: KvferryError | None = refusal
        self.meanwhile: Callable[[], object] = lambda: None
        self.taken: list[tuple[int, list[int], bool]] = []

    async def notify_one(self, request: pb.NotifyRequest, timeout: float) -> None:
        page = request.notifications[0].checksums
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            # What comes meanwhile comes before the next attempt.
            self.meanwhile()
            raise refusal
        self.taken.append((page.publication, list(page.checksums[0].place_starts), page.last))


@pytest.fixture
def loop() -> Iterator[PlayedLoop]:
    made = PlayedLoop()
    yield made
    made.close()


def summer_for(loop: PlayedLoop, home: Home) -> Checksummer:
    spec, options = EngineSpec("e", (GROUP,)), IntegrityOptions("full")
    token = EngineToken("e", b"0" * 32, "h:1")
    return Checksummer(loop, cast(Control, home), spec, token, RankGeometry(0, PLANES), RankMemory(), options)


def steps(loop: PlayedLoop, home: Home) -> list[Future[int]]:
    """Sum two steps of a publication, and one of another; what became of them when all have ended."""
    summer = summer_for(loop, home)
    found: list[Future[int]] = []

    def more() -> None:
        second = {"full": Blocks([3], first_token=8, end_token=12)}
        found.append(summer.submit(1, second, last=True, timeout=SOON))
        found.append(summer.submit(2, {"full": Blocks([4], end_token=4)}, last=True, timeout=SOON))

    home.meanwhile = more
    try:
        first = summer.submit(1, {"full": Blocks([1, 2], end_token=8)}, last=False, timeout=SOON)
        first.exception(SOON)
        for future in found:
            future.result(SOON)
    finally:
        summer.close()
    return [first, *found]


def test_a_later_step_waits_for_a_repeated_one_of_its_publication_only(loop: PlayedLoop) -> None:
    home = Home(HomeRecovering("busy", retry_after=0.2))
    assert [future.result() for future in steps(loop, home)] == [8, 4, 4]
    assert home.taken == [(2, [0], True), (1, [0], False), (1, [2], True)]


def test_a_later_step_does_not_fail_with_an_earlier_one(loop: PlayedLoop) -> None:
    home = Home(InvalidField("page", 1, "another"))
    first, *others = steps(loop, home)
    with pytest.raises(InvalidField):
        first.result()
    assert [future.result() for future in others] == [4, 4]
    assert sorted(home.taken) == [(1, [2], True), (2, [0], True)]


def test_a_failed_checksum_fails_with_its_own_error_and_no_other(
    loop: PlayedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    summer = summer_for(loop, Home(HomeRecovering("busy", retry_after=0.01)))
    pages, bad = summer._pages, list[bool]([True])

    def fails(*given: Any) -> Iterator[pb.PublishChecksums]:
        if bad.pop() if bad else False:
            raise RuntimeError("a bug")
        yield from pages(*given)

    monkeypatch.setattr(summer, "_pages", fails)
    first = summer.submit(1, {"full": Blocks([1, 2], end_token=8)}, last=False, timeout=SOON)
    second = summer.submit(1, {"full": Blocks([3], first_token=8, end_token=12)}, last=True, timeout=SOON)
    with pytest.raises(RuntimeError, match="a bug"):
        first.result(SOON)
    assert second.result(SOON) == 4
    summer.close()


def test_a_close_waits_for_checksums_in_progress_and_ends_all_waits(
    loop: PlayedLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After it the memory may be unmapped."""
    summer = summer_for(loop, Home(HomeRecovering("busy")))
    computing, goes_on, ended = threading.Event(), threading.Event(), list[str]()

    def pages(*_: Any) -> Iterator[pb.PublishChecksums]:
        computing.set()
        assert goes_on.wait(30)
        ended.append("computed")
        yield pb.PublishChecksums()

    monkeypatch.setattr(summer, "_pages", pages)
    futures = [summer.submit(number, {"full": Blocks([1], end_token=4)}, last=True, timeout=SOON) for number in (1, 2)]
    assert computing.wait(30)
    futures.append(summer.submit(1, {"full": Blocks([3], 4, 8)}, last=True, timeout=SOON))

    def close(summer: Checksummer) -> None:
        summer.close()
        ended.append("closed")

    closing = threading.Thread(target=close, args=(summer,), daemon=True)
    closing.start()
    # One that does not wait has ended by now.
    closing.join(0.2)
    goes_on.set()
    closing.join(30)
    assert ended == ["computed", "closed"]
    for future in futures:
        with pytest.raises(Closed):
            future.result(SOON)
    with pytest.raises(Closed):
        summer.submit(3, {"full": Blocks([1], end_token=4)}, last=True, timeout=SOON)
    # asyncio logs an error of a task that nothing has waited for, when the task is collected.
    monkeypatch.undo()
    del summer
    gc.collect()
    assert not caplog.records


def test_checksums_requested_during_a_close_get_an_end(loop: PlayedLoop) -> None:
    summer, free = summer_for(loop, Home(HomeRecovering("busy"))), threading.Event()
    loop.call(lambda: free.wait(30))
    future = summer.submit(1, {"full": Blocks([1, 2], end_token=8)}, last=True, timeout=SOON)
    closing = threading.Thread(target=summer.close, daemon=True)
    closing.start()
    closing.join(0.1)
    free.set()
    with pytest.raises(Closed):
        future.result(SOON)
    closing.join(30)
    assert not closing.is_alive()


def test_checksums_that_reach_the_loop_after_a_close_get_an_end(
    loop: PlayedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    summer, answer = summer_for(loop, Home(HomeRecovering("busy"))), loop.answer

    def close_first(sending: Coroutine[Any, Any, int], closed: str) -> Future[int]:
        summer.close()
        return answer(sending, closed)

    monkeypatch.setattr(loop, "answer", close_first)
    future = summer.submit(1, {"full": Blocks([1, 2], end_token=8)}, last=True, timeout=SOON)
    with pytest.raises(Closed):
        future.result(SOON)
