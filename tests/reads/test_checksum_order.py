"""The sums of one publication are sent in the order in which they came, whatever their home takes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import cast

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group, IntegrityOptions
from kvferry._control.connection import Control
from kvferry._memory.rank_memory import RankMemory
from kvferry._reads.checksum_publisher import Checksummer
from kvferry._wire.token import EngineToken
from kvferry.errors import HomeRecovering, InvalidField, KvferryError
from kvferry.geometry import RankGeometry
from kvferry.geometry.tensors import Holding, planes_of
from kvferry.v1 import kv_transfer_pb2 as pb

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

    def notify_one(self, request: pb.NotifyRequest, timeout: float) -> None:
        page = request.notifications[0].checksums
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            # What comes meanwhile comes before the next attempt.
            self.meanwhile()
            raise refusal
        self.taken.append((page.publication, list(page.checksums[0].place_starts), page.last))


def steps(home: Home) -> list[Future[int]]:
    """Sum two steps of a publication, and one of another; what became of them when all have ended."""
    spec, options = EngineSpec("e", (GROUP,)), IntegrityOptions("full")
    token = EngineToken("e", b"0" * 32, "h:1")
    summer = Checksummer(cast(Control, home), spec, token, RankGeometry(0, PLANES), RankMemory(), options)
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


def test_a_later_step_waits_for_one_that_is_repeated_and_others_do_not() -> None:
    home = Home(HomeRecovering("busy", retry_after=0.2))
    assert [future.result() for future in steps(home)] == [8, 4, 4]
    assert home.taken == [(2, [0], True), (1, [0], False), (1, [2], True)]


def test_a_later_step_does_not_fail_with_an_earlier_one() -> None:
    home = Home(InvalidField("page", 1, "another"))
    first, *others = steps(home)
    with pytest.raises(InvalidField):
        first.result()
    assert [future.result() for future in others] == [4, 4]
    assert sorted(home.taken) == [(1, [2], True), (2, [0], True)]
