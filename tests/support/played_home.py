"""A home that answers as a test says, in place of a `LeaseHolder`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from kvferry import Prompt
from kvferry._control.acquisition import Acquired, AcquireRequest
from kvferry._control.cancellation import Cancellation
from kvferry._control.connection import Control
from kvferry._control.judgement import Confirm
from kvferry._control.lease_holder import ReadReport
from kvferry._control.reader_lease import ReaderLease
from kvferry.errors import KvferryError, TransferCancelled
from kvferry.v1 import kv_transfer_pb2 as pb

Verdict: TypeAlias = "pb.Verdict.ValueType | None"


class PlayedHome:
    """What a scheduler says to homes, and what they answer. In place of `LeaseHolder`."""

    def __init__(self, clock: Callable[[], float], confirm: Confirm = Confirm.BEFORE) -> None:
        self.confirm = confirm
        self.clock = clock
        self.leases: dict[str, ReaderLease] = {}
        self.answers: dict[str, Acquired | KvferryError] = {}
        self.changed = threading.Condition()
        self.said: list[str] = []
        self.reports: list[Sequence[pb.RankReport]] = []
        self.answered: list[Callable[[Verdict], None]] = []

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

    def acquire(
        self,
        request: AcquireRequest,
        cancellation: Cancellation,
        renewed: Callable[[float], None],
        ended: Callable[[Acquired | KvferryError], None],
    ) -> None:
        def run() -> None:
            cancellation.interrupt_by(self.wake)
            with self.changed:
                assert self.changed.wait_for(lambda: request.text in self.answers or cancellation.cancelled, 30)
            answer = self.answers.get(request.text)
            if answer is None:
                self.say("gave up")
                answer = TransferCancelled("cancelled")
            ended(answer)

        threading.Thread(target=run, daemon=True).start()

    def report(self, _: Control, reports: Sequence[ReadReport]) -> None:
        with self.changed:
            for report in reports:
                self.reports.append(report.shares)
                self.answered.append(report.answered)
                self.say("report")

    def drop(self, granted: Acquired) -> None:
        self.say("drop")

    def cancel(self, _: Control, lease: ReaderLease) -> None:
        self.say("cancel")

    def let_go(self, home: Control, granted: Acquired) -> None:
        self.drop(granted)
        self.cancel(home, granted.lease)

    def close(self, timeout: float) -> None:
        self.say("closed")

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def say(self, what: str) -> None:
        with self.changed:
            self.said.append(what)
            self.changed.notify_all()

    def heard(self, *what: str) -> bool:
        """Wait until all of this was said; whether it was."""
        with self.changed:
            return self.changed.wait_for(lambda: sorted(self.said) == sorted(what), 20)
