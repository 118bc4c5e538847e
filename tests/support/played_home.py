"""A home that answers as a test says, in place of a `LeaseHolder`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from kvferry import Prompt
from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry._loop import Loop
from kvferry._tracing import NO_SPAN, Span
from kvferry.v1 import kv_transfer_pb2 as pb

Verdict: TypeAlias = "pb.Verdict.ValueType | None"


class PlayedAcquisition:
    """In place of an `Acquisition`."""

    def __init__(self, home: PlayedHome, text: str, changed: Callable[[], object]) -> None:
        self._home, self._text, self._changed = home, text, changed

    async def first(self) -> Acquired:
        try:
            answer = await self._home.answer_of(self._text)
        except asyncio.CancelledError:
            self._home.say("gave up")
            raise
        if isinstance(answer, Exception):
            raise answer
        answer.lease.changed = self._changed
        return answer

    async def more(self) -> GrantedPart:
        found = await self._home.steps.setdefault(self._text, asyncio.Queue()).get()
        if isinstance(found, Exception):
            raise found
        return found


class PlayedHome:
    """What readers say to homes, and what these answer.

    Attributes:
        said: what a reader has said, in order.
        reports: the ends of the shares of each report.
        answered: gives the home's verdict on each.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.answers: dict[str, Acquired | Exception] = {}
        self.steps: dict[str, asyncio.Queue[GrantedPart | Exception]] = {}
        self.changed = threading.Condition()
        self.said: list[str] = []
        self.reports: list[Sequence[pb.RankReport]] = []
        self.answered: list[Callable[[NotificationAnswer | None], None]] = []
        self._waiting: dict[str, list[asyncio.Future[Acquired | Exception]]] = {}

    # What a test does.

    def answer(self, text: str, answer: Acquired | Exception) -> None:
        """Answer those that acquire this reference, or will."""

        def settle() -> None:
            self.answers[text] = answer
            for waiting in self._waiting.pop(text, ()):
                if not waiting.done():
                    waiting.set_result(answer)

        assert self.loop.call(settle)

    def step(self, text: str, found: GrantedPart | Exception) -> None:
        """Tell the reader of what the source has published since."""
        assert self.loop.call(lambda: self.steps.setdefault(text, asyncio.Queue()).put_nowait(found))

    def judge(self, verdict: Verdict, report: int = 0) -> None:
        """Answer a report with a verdict, or with none, and wait until that was heard."""
        ended = None if verdict is None else pb.NotificationResult(read_ended=pb.ReadEnded(verdict=verdict))
        self.say_of(report, ended)

    def say_of(self, report: int, told: NotificationAnswer | None) -> None:
        """Answer a report, and wait until that was heard."""

        async def answer() -> None:
            self.answered[report](told)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        self.loop.run(answer())

    def heard(self, *what: str) -> bool:
        """Wait until all of this was said; whether it was."""
        with self.changed:
            return self.changed.wait_for(lambda: sorted(self.said) == sorted(what), 20)

    # What readers do.

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
        return AcquireRequest(home, parsed, reference, read_id, parties, expected_reads, self.loop.now() + timeout)

    def hinted(self, _: AcquireRequest) -> None:
        """Its references have no hints."""

    def acquire(self, request: AcquireRequest, changed: Callable[[], object]) -> PlayedAcquisition:
        return PlayedAcquisition(self, request.text, changed)

    async def answer_of(self, text: str) -> Acquired | Exception:
        if text in self.answers:
            return self.answers[text]
        waiting = self.loop.future()
        self._waiting.setdefault(text, []).append(waiting)
        return cast("Acquired | Exception", await waiting)

    def report(
        self,
        _: AcquireRequest,
        lease: ReaderLease,
        shares: Sequence[pb.RankReport],
        answered: Callable[[NotificationAnswer | None], None],
        span: Span = NO_SPAN,
    ) -> None:
        with self.changed:
            self.reports.append(shares)
            self.answered.append(answered)
            self.say("report")

    def reports_first(self, request: AcquireRequest, lease: ReaderLease) -> bool:
        return True

    def drop(self, lease: ReaderLease) -> None:
        self.say("drop")

    def let_go(self, home: Control, lease: ReaderLease) -> None:
        self.drop(lease)
        self.say("cancel")

    async def close(self, timeout: float) -> None:
        self.say("closed")

    def say(self, what: str) -> None:
        with self.changed:
            self.said.append(what)
            self.changed.notify_all()
