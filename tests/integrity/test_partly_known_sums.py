"""What a reader makes of sums of some units of a block only: those are compared, and the others count as unverified."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from kvferry import Blocks, Group, IntegrityOptions, Interval
from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry._memory.rank_memory import RankMemory
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._reads.verifier import Verifier
from kvferry.errors import DataLoss
from kvferry.geometry import EngineGeometry, RankGeometry
from kvferry.geometry.tensors import Holding, planes_of
from kvferry.planner import plan_read
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.integrity.definition import sum_of
from tests.support.loops import PlayedLoop

HEADS = 4
GROUP = Group("full", block_tokens=4, num_blocks=8)
SOON = 30.0


class PartlyKnowing:
    """A home that has the sums of some heads only; of one of them it may have a wrong one."""

    def __init__(self, heads: Interval, memory: np.ndarray[Any, np.dtype[np.uint8]], wrong: int | None) -> None:
        self.heads, self.memory, self.wrong = heads, memory, wrong

    async def read_checksums(self, request: pb.ReadChecksumsRequest, timeout: float) -> pb.ReadChecksumsResponse:
        found = []
        for query in request.queries:
            for plane in query.planes:
                (start,), (count,) = query.place_starts, query.place_counts
                sums = [
                    sum_of(self.memory[place, head].tobytes()) ^ (head == self.wrong)
                    for place in range(start, start + count)
                    for head in range(self.heads.begin, self.heads.end)
                ]
                found.append(
                    pb.Checksums(
                        plane=plane,
                        unit_begin=self.heads.begin,
                        unit_end=self.heads.end,
                        place_starts=[start],
                        place_counts=[count],
                        sums=sums,
                    )
                )
        return pb.ReadChecksumsResponse(checksums=found)


def verify(heads: Interval, wrong: int | None = None) -> tuple[int, int]:
    """Verified and unverified sums of three blocks that have arrived as they were."""
    memory = np.random.default_rng(5).integers(0, 256, (8, HEADS, 4, 16), np.uint8)
    planes = planes_of({"0": memory}, ("block", "head", "token", "content"), GROUP, ("key",), Holding())
    made = EngineGeometry("e", (GROUP,), (RankGeometry(0, planes),))
    blocks = {"full": Blocks([0, 1, 2], end_token=12)}
    home, lease = cast(Control, PartlyKnowing(heads, memory, wrong)), ReaderLease.without_end(b"lease")
    order = RankOrder(
        "read", "r", home, "e", b"i" * 16, 1, "a", lease, GrantedPart(blocks), Wanted(blocks), now() + SOON
    )
    plan, loop = plan_read(made, made, 0), PlayedLoop()
    read = RankRead(loop, order)
    read.parts = plan.in_parts(blocks)
    read.parts.next(blocks, last=True)
    try:
        verifier = Verifier(loop, pb.EngineRef(engine_id="e"), RankMemory(), IntegrityOptions("full"))
        found = loop.run(verifier.verify(read, plan))
    finally:
        loop.close()
    return found.verified, found.unverified


@pytest.mark.parametrize("heads", [Interval(0, 4), Interval(0, 2), Interval(1, 3), Interval(3, 4)])
def test_known_sums_are_verified_and_the_others_counted(heads: Interval) -> None:
    assert verify(heads) == (3 * len(heads), 3 * (HEADS - len(heads)))


@pytest.mark.parametrize("heads", [Interval(0, 4), Interval(0, 2), Interval(1, 3)])
def test_a_wrong_sum_of_a_block_that_is_known_in_part_is_data_loss(heads: Interval) -> None:
    with pytest.raises(DataLoss) as caught:
        verify(heads, wrong=1)
    assert (caught.value.values["unit"], caught.value.values["mismatches"]) == ("1", "3")
