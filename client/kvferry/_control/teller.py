"""Sends notifications to homes without waiting, and repeats them until the home has answered or they are useless."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.batches import batches
from kvferry._control.connection import Control
from kvferry._threads import guarded, start_loop
from kvferry._wire.status import from_notification_error
from kvferry.errors import InternalError, KvferryError, LimitReached
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

TELL_TIMEOUT = 5.0
"""Seconds for one attempt."""

MAX_WAITING = 16_384
MAX_WAITING_AT_HOME = 4096
"""Most notifications that wait for another attempt, for all homes and for one; further ones are dropped. The limit per
home keeps a home that never answers from using up the room of the others."""

LONGEST_SLEEP = 1.0
"""Seconds after which the thread checks them again: a sleeping thread does not notice that its host was suspended."""

Answered = Callable[["pb.NotificationResult | None"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A notification for a home.

    Attributes:
        notification: the notification.
        until: time on `kvferry._clock` after which it is useless.
        answered: called with each result that is not an error, and with None after each failed attempt, on gRPC's
            thread or the caller's. Must not block.
    """

    notification: pb.Notification
    until: float
    answered: Answered | None = None


@dataclass(slots=True, eq=False)
class _Pending:
    """A notification that the home has not answered yet.

    Attributes:
        home: connection to the home.
        message: the notification.
        again_at: time of the next attempt.
        backoff: the pauses between attempts.
    """

    home: Control
    message: Message
    again_at: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class Teller:
    """Sends the notifications of one reader. Thread-safe; only `close` waits. Its thread starts with the first
    notification that has to be repeated, and sleeps when there is none.

    Args:
        sender: the reader.
    """

    def __init__(self, sender: pb.EngineRef) -> None:
        self._sender = sender
        self._changed = threading.Condition()
        self._waiting: list[_Pending] = []
        self._waits_at: Counter[Control] = Counter()
        self._unanswered = 0
        """Number of calls that have not ended."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def tell(self, home: Control, messages: Iterable[Message], *, timeout: float = TELL_TIMEOUT) -> None:
        """Send notifications to a home at once, in as few calls as possible, and repeat those whose errors are
        retryable.

        Args:
            home: connection to the home.
            messages: the notifications.
            timeout: seconds for the first attempt.

        Raises:
            MessageTooLarge: a notification does not fit into one message; nothing was sent.
        """
        self._send(home, [_Pending(home, message) for message in messages], timeout)

    def close(self, timeout: float = 0.0) -> None:
        """Stop repeating notifications, and wait at most `timeout` seconds for the calls in progress and for the end of
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

    def _send(self, home: Control, pending: Sequence[_Pending], timeout: float) -> None:
        first = 0
        for request in tuple(batches(self._sender, [each.message.notification for each in pending])):
            batch = pending[first : first + len(request.notifications)]
            first += len(batch)
            with self._changed:
                self._unanswered += 1
            home.notify_later(request, timeout, partial(self._answered, batch))

    def _answered(self, batch: Sequence[_Pending], answer: list[pb.NotificationResult] | KvferryError) -> None:
        try:
            self._take(batch, answer)
        finally:
            with self._changed:
                self._unanswered -= 1
                self._changed.notify_all()

    def _take(self, batch: Sequence[_Pending], answer: list[pb.NotificationResult] | KvferryError) -> None:
        if not isinstance(answer, KvferryError) and len(answer) != len(batch):
            answer = InternalError(f"{len(answer)} results for {len(batch)} notifications")
        if isinstance(answer, KvferryError):
            self._failed([(pending, answer) for pending in batch])
            return
        failed = []
        for pending, result in zip(batch, answer, strict=True):
            if result.WhichOneof("kind") == "error":
                failed.append((pending, from_notification_error(result.error)))
            else:
                _answer(pending, result)
        self._failed(failed)

    def _failed(self, failed: Sequence[tuple[_Pending, KvferryError]]) -> None:
        """Schedule the next attempts of failed notifications, and drop those for which repeating cannot help."""
        time = now()
        for pending, error in failed:
            _answer(pending, None)
            pause = pending.backoff.next(error.retry_after)
            kind = pending.message.notification.WhichOneof("kind")
            if not error.retryable or time + pause >= pending.message.until:
                logger.log(
                    logging.WARNING if error.retryable else logging.INFO,
                    "%s did not accept a notification (%s): %s",
                    pending.home.address,
                    kind,
                    error.message,
                )
                continue
            pending.again_at = time + pause
            with self._changed:
                if self._closed:
                    return
                if self._waits_at[pending.home] >= MAX_WAITING_AT_HOME or len(self._waiting) >= MAX_WAITING:
                    message = "a notification to %s (%s) is dropped: %d others wait"
                    logger.warning(message, pending.home.address, kind, len(self._waiting))
                    continue
                self._waiting.append(pending)
                self._waits_at[pending.home] += 1
        with self._changed:
            if self._waiting and self._thread is None and not self._closed:
                try:
                    self._thread = start_loop(self._turn, "kvferry-tell")
                except LimitReached as error:
                    # The next failure tries again to start it; it then sends everything that waits.
                    logger.warning("%d notifications wait: %s", len(self._waiting), error.message)
            self._changed.notify_all()

    def _turn(self) -> bool:
        with self._changed:
            due = self._wait_due()
        by_home: dict[Control, list[_Pending]] = {}
        for pending in due or ():
            by_home.setdefault(pending.home, []).append(pending)
        for home, batch in by_home.items():
            guarded(partial(self._send, home, batch, TELL_TIMEOUT), f"sending {len(batch)} notifications")
        return due is not None

    def _wait_due(self) -> list[_Pending] | None:
        """Wait for notifications that are due, and return them; None: closed. Called with the lock held."""
        while not self._closed:
            time = now()
            due = [pending for pending in self._waiting if pending.again_at <= time]
            if due:
                self._waiting = [pending for pending in self._waiting if pending.again_at > time]
                self._waits_at = Counter(pending.home for pending in self._waiting)
                return due
            first = min((pending.again_at for pending in self._waiting), default=None)
            self._changed.wait(None if first is None else max(0.0, min(LONGEST_SLEEP, first - time)))
        return None


def _answer(pending: _Pending, result: pb.NotificationResult | None) -> None:
    if pending.message.answered is not None:
        guarded(partial(pending.message.answered, result), f"a callback for the answer of {pending.home.address}")
