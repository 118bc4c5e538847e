"""An acquisition at a home that a test scripts, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any, TypeAlias, TypeVar

import pytest

from kvferry._clock import now, to_duration
from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.acquisition import Acquisition
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._wire.authority import read_id_of
from kvferry._wire.reference import parse_reference
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import reference
from tests.control.scripted import Scripted, scripted
from tests.support.blocking_control import on_loop

Kind = TypeVar("Kind")
Poll: TypeAlias = "Callable[[pb.ReadBlocksRequest], pb.ReadBlocksResponse]"
Told: TypeAlias = "Acquired | GrantedPart | KvferryError | asyncio.CancelledError"
READER = EngineToken("reader", b"r" * 32, "home:1")
FIRST, SECOND = b"1" * 16, b"2" * 16


class Reading:
    """One acquisition at one home, with what came of it.

    Attributes:
        changes: how often the lease has changed.
        given_back: leases that were given back, and why.
    """

    def __init__(self, home: Control) -> None:
        self.home, self.loop = home, home._loop
        self.renewals = Renewals(self.loop)
        self.given_back: list[tuple[bytes, pb.RankOutcome.ValueType]] = []
        self.changes = 0
        self.outcomes: Queue[Told] = Queue()
        self._aside: set[asyncio.Task[None]] = set()

    def start(
        self,
        timeout: float = 60.0,
        text: str = "",
        *,
        progressive: bool = False,
        expected_reads: int = 0,
        read_id: str = "read",
    ) -> None:
        text = text or reference(self.home.address)
        self.request = AcquireRequest(
            self.home, parse_reference(text), text, read_id, 1, expected_reads, now() + timeout, progressive=progressive
        )
        asked = pb.ReadBlocksRequest(
            reference=text,
            reader=engine_ref(READER),
            read_id=read_id_of(READER.session_secret, read_id),
            parties=1,
            expected_reads=expected_reads,
        )
        self.acquisition = Acquisition(
            *(self.loop, self.request, asked, self.renewals, self._gave_up, self._begin_aside),
            *(asyncio.Semaphore(1), self._changed),
        )
        self._running: Future[None] = self.loop.submit(self._follow())

    def cancel(self) -> None:
        self._running.cancel()

    def ends_in(self, seconds: float) -> None:
        """Bring the deadline of the read that was started nearer. From its home, once that is asked: no first answer
        is then too late, however long the call was under way."""
        self.request.deadline = now() + seconds

    def told(self) -> Told:
        """What comes of it next, and more may follow."""
        return self.outcomes.get(timeout=30)

    def outcome(self) -> Told:
        """What came of it, and nothing else did."""
        found = self._only()
        assert isinstance(found, Acquired) or not self.renewals._kept
        return found

    def outcome_of(self, kind: type[Kind]) -> Kind:
        """What came of it after the lease was told of, and nothing else did."""
        found = self._only()
        assert isinstance(found, kind), found
        return found

    def drop(self, acquired: Acquired) -> None:
        """As the read does when it has ended."""
        on_loop(self.loop, lambda: self.renewals.drop(acquired.lease))

    def close(self) -> None:
        self.cancel()
        on_loop(self.loop, self.renewals.close)

    async def _follow(self) -> None:
        try:
            acquired = await self.acquisition.first()
            self.outcomes.put(acquired)
            part = acquired.part
            while not part.complete:
                part = await self.acquisition.more()
                self.outcomes.put(part)
        except (KvferryError, asyncio.CancelledError) as error:
            self.outcomes.put(error)

    def _only(self) -> Told:
        found = self.outcomes.get(timeout=30)
        self.loop.run(self._ended())
        with pytest.raises(Empty):
            self.outcomes.get(block=False)
        return found

    async def _ended(self) -> None:
        if self._aside:
            await asyncio.wait(self._aside, timeout=30)

    def _begin_aside(self, ending: Coroutine[Any, Any, None]) -> None:
        self._aside.add(self.loop.spawn(ending, "the end of a lease"))

    def _gave_up(self, home: Control, lease: ReaderLease, outcome: pb.RankOutcome.ValueType) -> None:
        assert home is self.home
        self.renewals.drop(lease)
        self.given_back.append((lease.lease_id, outcome))

    def _changed(self) -> None:
        self.changes += 1


@contextmanager
def reading(folder: Path, poll: Poll) -> Iterator[tuple[Scripted, Reading]]:
    with scripted(folder) as (server, control):
        server.read_blocks = poll
        found = Reading(control)
        yield server, found
        found.close()


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
