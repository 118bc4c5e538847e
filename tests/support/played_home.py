"""A home that answers as a test says, in place of a `LeaseHolder`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from kvferry import Prompt
from kvferry._control.acquisition import Acquired, AcquireRequest, MoreBlocks
from kvferry._control.connection import Control
from kvferry._control.judgement import Confirm
from kvferry._control.lease_holder import ReadReport
from kvferry._control.reader_lease import ReaderLease
from kvferry._tracing import NO_SPAN, Span
from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb

Verdict: TypeAlias = "pb.Verdict.ValueType | None"


class PlayedHome:
    """What a scheduler says to homes, and what they answer. In place of `LeaseHolder`.

    A test sets `answers`, and calls `wake`, on any thread.
    """

    def __init__(self, clock: Callable[[], float], confirm: Confirm = Confirm.BEFORE) -> None:
        self.confirm = confirm
        self.clock = clock
        self.leases: dict[str, ReaderLease] = {}
        self.answers: dict[str, Acquired | KvferryError] = {}
        self.changed = threading.Condition()
        self.said: list[str] = []
        self.reports: list[Sequence[pb.RankReport]] = []
        self.answered: list[Callable[[Verdict], None]] = []
        self._acquisitions: list[PlayedAcquisition] = []

    def request(
        self,
        reference: str,
        read_id: str,
        *,
        parties: int,
        expected_reads: int,
        timeout: float,
        traceparent: str = "",
        progressive: bool = False,
        prompt: Prompt = Prompt.unknown,
        request_id: str = "",
    ) -> Any:
        parsed = pb.Reference(home="home:1", publication=7)
        home = cast(Control, None)
        return AcquireRequest(home, parsed, reference, read_id, parties, expected_reads, self.clock() + timeout)

    def acquire(self, request: AcquireRequest, changed: Callable[[], object]) -> PlayedAcquisition:
        made = PlayedAcquisition(self, request.text)
        with self.changed:
            self._acquisitions.append(made)
        return made

    def report(self, _: Control, reports: Sequence[ReadReport], span: Span = NO_SPAN) -> None:
        with self.changed:
            for report in reports:
                self.reports.append(report.shares)
                self.answered.append(report.answered)
                self.say("report")

    def drop(self, granted: Acquired) -> None:
        self.say("drop")

    def let_go(self, home: Control, granted: Acquired) -> None:
        self.drop(granted)
        self.say("cancel")

    async def close(self, timeout: float) -> None:
        self.say("closed")

    def wake(self) -> None:
        """Tell all who wait that there may be answers."""
        with self.changed:
            self.changed.notify_all()
            acquisitions = tuple(self._acquisitions)
        for acquisition in acquisitions:
            acquisition.wake()

    def say(self, what: str) -> None:
        with self.changed:
            self.said.append(what)
            self.changed.notify_all()

    def heard(self, *what: str) -> bool:
        """Wait until all of this was said; whether it was."""
        with self.changed:
            return self.changed.wait_for(lambda: sorted(self.said) == sorted(what), 20)


class PlayedAcquisition:
    """In place of `Acquisition`. Made on the loop of the reads."""

    def __init__(self, home: PlayedHome, text: str) -> None:
        self._home, self._text = home, text
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def first(self) -> Acquired:
        try:
            while (answer := self._home.answers.get(self._text)) is None:
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self._home.say("gave up")
            raise
        if isinstance(answer, KvferryError):
            raise answer
        return answer

    async def more(self) -> MoreBlocks:
        """What a source publishes later never comes."""
        return cast(MoreBlocks, await self._loop.create_future())
