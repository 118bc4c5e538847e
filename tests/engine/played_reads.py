"""The reads of a scheduler whose clock and home answer as a test says, since no test can have a rank's report come at
the very end of a lease."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import count
from typing import cast

from kvferry import Blocks, EngineSpec, Group
from kvferry._control.acquire_request import Acquired
from kvferry._control.block_use import BlockUse
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.reader_lease import ReaderLease
from kvferry._reads.meters import ReadMeter
from kvferry._wire.publication import Told
from kvferry.engine.scheduler_reads import Reads
from kvferry.engine.values import RankEnd, ReadEnd, WorkerOutput
from kvferry.errors import (
    BadBlock,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.loops import PlayedLoop
from tests.support.played_home import PlayedHome

RANKS = 2
SPEC = EngineSpec("decode", (Group("full", block_tokens=16, num_blocks=32),), RANKS)
BLOCKS = {"full": Blocks([3, 4], end_token=32)}
BEGAN, TIMEOUT, LEASE = 1000.0, 60.0, 30.0


class World:
    """A scheduler's reads, and a clock that stands still."""

    def __init__(self, *, hold_until_quiet: bool = False, max_waiting: int = 4) -> None:
        self.loop = PlayedLoop(BEGAN)
        self.home = PlayedHome(self.loop)
        self.use = BlockUse(SPEC.groups)
        self.meter = ReadMeter()
        self.reads = Reads(
            self.loop,
            SPEC,
            cast(LeaseHolder, self.home),
            self.use.writes(),
            max_waiting,
            hold_until_quiet=hold_until_quiet,
            meter=self.meter,
        )
        self.lease = ReaderLease(b"l" * 16, BEGAN, LEASE, 10.0)
        self.numbers = count(1)

    @property
    def now(self) -> float:
        return self.loop.now()

    @now.setter
    def now(self, time: float) -> None:
        self.loop.still = time

    def answer(
        self, answer: Acquired | Exception | None = None, text: str = "reference", *, complete: bool = True
    ) -> None:
        source = pb.EngineRef(engine_id="prefill", incarnation=b"i" * 16)
        part = GrantedPart(dict(BLOCKS), Told(payload=b"payload"), complete=complete)
        granted = Acquired(self.lease, source, "theirs", part)
        self.home.answer(text, answer or granted)

    def acquire(self, request_id: str, reference: str) -> None:
        read_id = f"read {next(self.numbers)}"
        asked = self.home.request(reference, read_id, parties=RANKS, expected_reads=0, timeout=TIMEOUT)
        self.reads.acquire(request_id, asked)

    def stages(self) -> Counter[str]:
        """The number of reads in progress, by stage."""
        return +self.meter.stats().stages

    def granted(self, request: str = "mine", *, complete: bool = True) -> None:
        self.acquire(request, "reference")
        self.answer(complete=complete)
        self.look()
        assert self.stages()["granted"]

    def reading(self) -> str:
        """A read that all ranks have begun; its id."""
        self.granted()
        return self.reads.attach("mine", {"full": Blocks([20, 7], end_token=32)}, None, allow_overlap=False).read_id

    def three_reading(self) -> list[str]:
        """Three reads that all ranks have begun; their ids."""
        found = []
        for number in range(3):
            self.granted(f"request {number}")
            blocks = {"full": Blocks([10 * number + 10, 10 * number + 11], end_token=32)}
            found.append(self.reads.attach(f"request {number}", blocks, None, allow_overlap=False).read_id)
        return found

    def busy(self) -> threading.Event:
        """The loop does nothing else until the event is set."""
        free = threading.Event()
        self.loop.call(lambda: free.wait(30))
        return free

    def ends(self, read_id: str, rank: int, error: str = "", *, quiet: bool = True, size: int = 10) -> None:
        end = RankEnd(read_id, "mine", not error, quiet, size, error_name=error, message=error)
        self.reads.collect(WorkerOutput(rank, (end,) if end.ok else (), () if end.ok else (end,)))

    def look(self) -> None:
        """Have everything happen that is due."""
        self.loop.turn()

    def finished(self) -> list[ReadEnd]:
        self.look()
        return list(self.reads.finished().reads)

    def free(self) -> bool:
        """Whether another may write to the blocks."""
        try:
            self.use.pin({"full": Blocks([20, 7]).ids})
        except BadBlock:
            return False
        return True
