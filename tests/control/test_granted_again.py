"""A progressive read whose home restarted: the lease that it is granted anew holds for what moves already."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

from kvferry._clock import now, to_duration
from kvferry._control.acquirer import Acquirer
from kvferry._control.acquisition import Acquired, AcquireRequest, MoreBlocks, Told
from kvferry._control.cancellation import Cancellation
from kvferry._control.renewals import Renewals
from kvferry._wire.reference import parse_reference
from kvferry._wire.token import EngineToken
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import reference
from tests.control.scripted import polled, scripted

STEP = pb.Blocks(
    step=0, groups=[pb.GroupBlocks(group="full", first_token=0, end_token=16, run_starts=[1], run_counts=[1])]
)


def test_what_moves_is_told_of_the_deadline_of_a_lease_that_was_granted_again(tmp_path: Path) -> None:
    def accepted(lease_id: bytes, remaining: float) -> pb.Accepted:
        return pb.Accepted(lease_id=lease_id, remaining=to_duration(remaining), renew_every=to_duration(60))

    def poll(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=accepted(b"1" * 16, 20), blocks=[STEP])
        return polled(accepted=accepted(b"2" * 16, 60), blocks=[STEP], complete=pb.Complete(steps=1))

    told, deadlines = SimpleQueue[Told](), list[float]()
    with scripted(tmp_path) as (server, home):
        server.read_blocks = poll
        renewals = Renewals()
        acquirer = Acquirer(EngineToken("reader", b"r" * 32, "home:1"), renewals, lambda *_: None)
        text = reference(home.address)
        until = now() + 60
        request = AcquireRequest(home, parse_reference(text), text, "read", 1, 0, until, progressive=True)
        acquirer.start(request, Cancellation("read"), deadlines.append, told.put)
        first, last = told.get(timeout=30), told.get(timeout=30)
        acquirer.close(30)
        renewals.close()
    assert isinstance(first, Acquired)
    assert isinstance(last, MoreBlocks)
    assert deadlines == [first.lease.deadline]
    assert first.lease.deadline > now() + 30
