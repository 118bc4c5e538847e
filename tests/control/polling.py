"""One engine's acquirer at a home that a test scripts, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

import pytest

from kvferry._clock import now, to_duration
from kvferry._control.acquirer import Acquirer
from kvferry._control.acquisition import Acquired, AcquireRequest, Told
from kvferry._control.cancellation import Cancellation
from kvferry._control.connection import Control
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._wire.reference import parse_reference
from kvferry._wire.token import EngineToken
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import reference
from tests.control.scripted import Scripted, scripted

Kind = TypeVar("Kind")
Poll: TypeAlias = "Callable[[pb.ReadBlocksRequest], pb.ReadBlocksResponse]"
READER = EngineToken("reader", b"r" * 32, "home:1")
FIRST, SECOND = b"1" * 16, b"2" * 16


class Reading:
    """One engine's acquirer at one home, with what came of it."""

    def __init__(self, home: Control) -> None:
        self.home = home
        self.renewals = Renewals()
        self.given_back: list[tuple[bytes, pb.RankOutcome.ValueType]] = []
        self.outcomes: SimpleQueue[Told] = SimpleQueue()
        self.cancellation = Cancellation("read")
        self.acquirer = Acquirer(READER, self.renewals, self._gave_up)

    def start(self, timeout: float = 60.0, text: str = "", *, progressive: bool = False) -> None:
        text = text or reference(self.home.address)
        request = AcquireRequest(
            self.home, parse_reference(text), text, "read", 1, 0, now() + timeout, progressive=progressive
        )
        self.request = request
        self.acquirer.start(request, self.cancellation, lambda _: None, self.outcomes.put)

    def ends_in(self, seconds: float) -> None:
        """Bring the deadline of the read that was started nearer. From its home, once that is asked: no first answer
        is then too late, however long the call was under way."""
        self.request.deadline = now() + seconds

    def told(self) -> Told:
        """What it tells next, and more may follow."""
        return self.outcomes.get(timeout=30)

    def outcome(self) -> Told:
        """What came of it, and nothing else did."""
        found = self.outcomes.get(timeout=30)
        self.acquirer.close(30)
        with pytest.raises(Empty):
            self.outcomes.get(block=False)
        assert isinstance(found, Acquired) or not self.renewals._kept
        return found

    def outcome_of(self, kind: type[Kind]) -> Kind:
        """What came of it after the lease was told of, and nothing else did."""
        found = self.outcomes.get(timeout=30)
        self.acquirer.close(30)
        assert self.outcomes.empty()
        assert isinstance(found, kind), found
        return found

    def _gave_up(self, home: Control, lease: ReaderLease, outcome: pb.RankOutcome.ValueType) -> None:
        assert home is self.home
        self.given_back.append((lease.lease_id, outcome))


@contextmanager
def reading(folder: Path, poll: Poll) -> Iterator[tuple[Scripted, Reading]]:
    with scripted(folder) as (server, control):
        server.read_blocks = poll
        found = Reading(control)
        yield server, found
        found.renewals.close()
        found.acquirer.close(30)


def accepted(lease_id: bytes = FIRST) -> pb.Accepted:
    return pb.Accepted(lease_id=lease_id, remaining=to_duration(60), renew_every=to_duration(20), request_id="told")


def step(number: int, blocks: int = 1) -> pb.Blocks:
    first = number * blocks
    part = pb.GroupBlocks(group="full", first_token=16 * first, end_token=16 * (first + blocks))
    part.run_starts.append(1 + first)
    part.run_counts.append(blocks)
    return pb.Blocks(step=number, groups=[part])


def acquired(outcome: Told) -> Acquired:
    assert isinstance(outcome, Acquired), outcome
    return outcome
