"""What a home is to hear although it may not answer at once: told without waiting, and told again until it has answered
or it is of no use any more."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.batches import batches
from kvferry._control.connection import Control
from kvferry._threads import start_thread
from kvferry._wire.status import from_notification_error
from kvferry.errors import InternalError, KvferryError, LimitReached
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

TELL_TIMEOUT = 5.0
"""Seconds for one attempt."""

MAX_WAITING = 16_384
MAX_WAITING_AT_HOME = 4096
"""Notifications that wait for another attempt, of all homes and of one; beyond it a new one is given up. A home that
takes nothing must not leave the others without room."""

LONGEST_SLEEP = 1.0
"""Seconds after which they are looked at again: what a thread sleeps does not count suspends."""

Answered = Callable[["pb.NotificationResult | None"], None]


@dataclass(slots=True, eq=False)
class _Told:
    """A notification until it is answered.

    Attributes:
        until: when it is of no use any more.
        answered: gets its result, or None for each attempt that failed.
        again_at: when to tell it again.
        backoff: the pauses before it is told again.
    """

    home: Control
    notification: pb.Notification
    until: float
    answered: Answered | None
    again_at: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class Teller:
    """Speaks for one reader. Thread-safe; nothing here waits. Its thread starts with the first notification that has to
    be told again, and sleeps when there is none.

    Args:
        sender: the reader.
    """

    def __init__(self, sender: pb.EngineRef) -> None:
        self._sender = sender
        self._changed = threading.Condition()
        self._waiting: list[_Told] = []
        self._waits_at: Counter[Control] = Counter()
        self._unanswered = 0
        """Messages that were sent, and neither answered nor given up."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def tell(
        self,
        home: Control,
        notifications: Sequence[pb.Notification],
        until: float,
        answered: Answered | None = None,
        *,
        timeout: float = TELL_TIMEOUT,
    ) -> None:
        """Tell a home, at once and then again while repeating can help.

        Args:
            home: whom.
            notifications: what.
            until: on `kvferry._clock`, when it is of no use any more.
            answered: called, on gRPC's thread or the caller's, with each result that is no error, and with None after
                each attempt that failed. May not block.
            timeout: seconds for the first attempt.

        Raises:
            MessageTooLarge: one of them does not fit a message; nothing was told.
        """
        told = [_Told(home, notification, until, answered) for notification in notifications]
        self._send(home, told, timeout)

    def close(self, timeout: float = 0.0) -> None:
        """Tell nothing again any more, and wait at most `timeout` seconds for what was told already, and for the end of
        the thread. Idempotent."""
        until = now() + timeout
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._waits_at.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._unanswered, timeout)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, until - now()))

    def _send(self, home: Control, told: Sequence[_Told], timeout: float) -> None:
        first = 0
        for request in tuple(batches(self._sender, [each.notification for each in told])):
            batch = told[first : first + len(request.notifications)]
            first += len(batch)
            with self._changed:
                self._unanswered += 1
            home.notify_later(request, timeout, partial(self._answered, batch))

    def _answered(self, batch: Sequence[_Told], answer: list[pb.NotificationResult] | KvferryError) -> None:
        try:
            self._take(batch, answer)
        finally:
            with self._changed:
                self._unanswered -= 1
                self._changed.notify_all()

    def _take(self, batch: Sequence[_Told], answer: list[pb.NotificationResult] | KvferryError) -> None:
        if not isinstance(answer, KvferryError) and len(answer) != len(batch):
            answer = InternalError(f"{len(answer)} results for {len(batch)} notifications")
        if isinstance(answer, KvferryError):
            self._failed([(told, answer) for told in batch])
            return
        failed = []
        for told, result in zip(batch, answer, strict=True):
            if result.WhichOneof("kind") == "error":
                failed.append((told, from_notification_error(result.error)))
            else:
                _answer(told, result)
        self._failed(failed)

    def _failed(self, failed: Sequence[tuple[_Told, KvferryError]]) -> None:
        """Keep what may be told again."""
        time = now()
        for told, error in failed:
            _answer(told, None)
            pause = told.backoff.next(error.retry_after)
            kind = told.notification.WhichOneof("kind")
            if not error.retryable or time + pause >= told.until:
                logger.log(
                    logging.WARNING if error.retryable else logging.INFO,
                    "%s was not told of a %s: %s",
                    told.home.address,
                    kind,
                    error.message,
                )
                continue
            told.again_at = time + pause
            with self._changed:
                if self._closed:
                    return
                if self._waits_at[told.home] >= MAX_WAITING_AT_HOME or len(self._waiting) >= MAX_WAITING:
                    message = "%s is not told of a %s: %d others wait"
                    logger.warning(message, told.home.address, kind, len(self._waiting))
                    continue
                self._waiting.append(told)
                self._waits_at[told.home] += 1
        with self._changed:
            if self._waiting and self._thread is None and not self._closed:
                try:
                    self._thread = start_thread(self._run, "kvferry-tell")
                except LimitReached as error:
                    # The next failure tries to start it again, and then all that waits is told.
                    logger.warning("%d notifications wait: %s", len(self._waiting), error.message)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._wait_due()
            if due is None:
                return
            by_home: dict[Control, list[_Told]] = {}
            for told in due:
                by_home.setdefault(told.home, []).append(told)
            for home, batch in by_home.items():
                try:
                    self._send(home, batch, TELL_TIMEOUT)
                except Exception:
                    logger.exception("%d notifications to %s are given up", len(batch), home.address)

    def _wait_due(self) -> list[_Told] | None:
        """With the lock held: what to tell again now; None once closed."""
        while not self._closed:
            time = now()
            due = [told for told in self._waiting if told.again_at <= time]
            if due:
                self._waiting = [told for told in self._waiting if told.again_at > time]
                self._waits_at = Counter(told.home for told in self._waiting)
                return due
            first = min((told.again_at for told in self._waiting), default=None)
            self._changed.wait(None if first is None else max(0.0, min(LONGEST_SLEEP, first - time)))
        return None


def _answer(told: _Told, result: pb.NotificationResult | None) -> None:
    if told.answered is not None:
        try:
            told.answered(result)
        except Exception:
            logger.exception("what %s answered was not taken", told.home.address)
