"""Sends notifications to homes, in batches of bounded size, and repeats each until the home has answered or the
notification is useless. The size of every message is bounded by its sender (PROTOCOL, Authority)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from google.protobuf import message as protobuf

from kvferry._control.backoff import CALL_TIMEOUT, Backoff
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._threads import guarded
from kvferry._tracing import NO_SPAN, Span
from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.errors import Closed, KvferryError, MessageTooLarge
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

SENT_BYTES = MAX_MESSAGE_BYTES - 256 * 1024
"""Bytes of the largest registration that a client sends. The margin leaves room for what a relay adds."""

SENT_NOTIFY_BYTES = MAX_NOTIFY_BYTES - 16 * 1024
"""Bytes of the notifications in one call. The margin leaves room for their sender and its secret."""

BATCH = 512
"""Most notifications in one call: a response of as many errors with all their values fits into one message."""

ITEM_BYTES = 8
"""Upper bound for the framing of a notification in its batch: a tag, and a length below 1 MiB."""

ADDED_BYTES = 512
"""Upper bound of the bytes that are added to a step after its size was checked: numbers, request_id and framing."""

MAX_WAITING = 4096
"""Most notifications that wait for another attempt at one home; further ones are dropped. Their ends are no bound: a
home says how long its leases are, up to an hour, and by when to repeat."""


@dataclass(slots=True, eq=False)
class Message:
    """A notification for a home, useless after `until` on the loop's clock. `answered` is called with each result that
    is not an error, with None after each failed attempt that is repeated, and with the error of the last attempt. The
    first attempt takes at most `timeout` seconds, and is part of `span`."""

    notification: pb.Notification
    until: float
    answered: Callable[[NotificationAnswer | None], None] | None = None
    timeout: float = CALL_TIMEOUT
    span: Span = NO_SPAN
    backoff: Backoff = field(default_factory=Backoff)


class Notifier:
    """Sends the notifications of one engine. Belongs to the client's event loop. `session_secret` is given for those of
    a source."""

    def __init__(self, loop: Loop, sender: pb.EngineRef, session_secret: bytes = b"") -> None:
        self._loop = loop
        self._sender = sender
        self._secret = session_secret
        self._fresh: dict[tuple[Control, float], list[Message]] = {}
        """Messages that are to be sent now, by home and timeout."""
        self._later: dict[tuple[Control, float], list[Message]] = {}
        """Messages that wait for another attempt, by home and time. A timer makes each attempt."""
        self._waiting: Counter[Control] = Counter()
        """Their number, by home."""
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False

    def send(self, home: Control, messages: Sequence[Message]) -> None:
        """Send notifications to a home, with all others that it is to get now in as few calls as possible, and repeat
        those whose errors are retryable. Raises `MessageTooLarge`, and sends none, if one does not fit into a message.
        """
        for message in messages:
            check_notification(message.notification)
        if not self._fresh:
            self._loop.soon(self._send_fresh)
        for message in messages:
            self._fresh.setdefault((home, message.timeout), []).append(message)

    def _send_fresh(self) -> None:
        fresh, self._fresh = self._fresh, {}
        for (home, timeout), messages in fresh.items():
            self._call(home, messages, timeout)

    def _call(self, home: Control, left: Sequence[Message], timeout: float) -> list[asyncio.Task[None]]:
        spans = {message.span for message in left}
        # A call belongs to one trace; a call about several reads to none.
        span = spans.pop() if len(spans) == 1 else NO_SPAN
        calls, notifications = list[asyncio.Task[None]](), [message.notification for message in left]
        for request in batches(self._sender, notifications, session_secret=self._secret):
            batch, left = left[: len(request.notifications)], left[len(request.notifications) :]
            call = self._loop.spawn(self._attempt(home, request, batch, timeout, span), f"a call to {home.address}")
            calls.append(call)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return calls

    async def close(self, timeout: float) -> None:
        """Stop repeating notifications, and wait at most `timeout` seconds for the calls in progress. Idempotent."""
        self._send_fresh()
        self._closed = True
        self._later.clear()
        self._waiting.clear()
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout)

    async def _attempt(
        self, home: Control, request: pb.NotifyRequest, batch: Sequence[Message], timeout: float, span: Span
    ) -> None:
        try:
            with span.calling():
                answers = await home.notify(request, timeout)
        except KvferryError as error:
            if len(batch) > 1 and not error.retryable and not isinstance(error, Closed):
                # What the home refuses must not cost the others their answers: it decides about access by the call.
                middle = len(batch) // 2
                first, second = batch[:middle], batch[middle:]
                await asyncio.wait([*self._call(home, first, timeout), *self._call(home, second, timeout)])
                return
            answers = [error] * len(batch)
        # One time for all, so that they go together again.
        time = self._loop.now()
        for message, answer in zip(batch, answers, strict=True):
            if isinstance(answer, KvferryError):
                self._failed(home, message, answer, time)
            else:
                _answer(home, message, answer)

    def _failed(self, home: Control, message: Message, error: KvferryError, time: float) -> None:
        """Plan the next attempt of a failed notification, or drop it if repeating cannot help."""
        pause, kind = message.backoff.next(error.retry_after), message.notification.WhichOneof("kind")
        again_at = time + pause
        late, full = again_at >= message.until, self._waiting[home] >= MAX_WAITING
        if late or full or self._closed or not error.retryable:
            if late or full or not error.retryable:
                level = logging.WARNING if error.retryable else logging.INFO
                logger.log(level, "%s did not accept a notification (%s): %s", home.address, kind, error.message)
            _answer(home, message, error)
            return
        message.timeout, message.span = CALL_TIMEOUT, NO_SPAN
        _answer(home, message, None)
        if (home, again_at) not in self._later:
            self._loop.at(again_at, partial(self._again, home, again_at))
        self._later.setdefault((home, again_at), []).append(message)
        self._waiting[home] += 1

    def _again(self, home: Control, at: float) -> None:
        messages = self._later.pop((home, at), [])
        # This also forgets a home at which none waits.
        self._waiting -= Counter({home: len(messages)})
        self.send(home, messages)


def _answer(home: Control, message: Message, answer: NotificationAnswer | None) -> None:
    if message.answered is not None:
        guarded(partial(message.answered, answer), f"a callback for the answer of {home.address}")


def check_size(what: str, message: protobuf.Message, most: int, added: int = 0) -> None:
    """Raise `MessageTooLarge` for a message that is larger than `most` bytes, or will be with `added` bytes more."""
    size = message.ByteSize() + added
    if size > most:
        raise MessageTooLarge(f"{what} takes {size} bytes; a message holds {most}", what=what, size=size, limit=most)


def check_notification(notification: pb.Notification) -> None:
    """Raise `MessageTooLarge` for a notification that does not fit into one message."""
    check_size(f"notification {notification.WhichOneof('kind')}", notification, SENT_NOTIFY_BYTES)


def batches(
    sender: pb.EngineRef, notifications: Iterable[pb.Notification], *, session_secret: bytes = b""
) -> Iterator[pb.NotifyRequest]:
    """Yield requests with the notifications in order, as few as the limits allow; they are consumed one at a time.
    `session_secret` is given if the sender is a source. Raises `MessageTooLarge` for a notification that does not fit
    into one message; the batches before were yielded."""
    request = partial(pb.NotifyRequest, sender=sender, session_secret=session_secret)
    batch: list[pb.Notification] = []
    size = empty = request().ByteSize()
    for notification in notifications:
        own = notification.ByteSize() + ITEM_BYTES
        if batch and (len(batch) == BATCH or size + own > SENT_NOTIFY_BYTES):
            yield request(notifications=batch)
            batch, size = [], empty
        check_notification(notification)
        batch.append(notification)
        size += own
    if batch:
        yield request(notifications=batch)


def read_done(lease_id: bytes, reports: Sequence[pb.RankReport]) -> list[pb.Notification]:
    """Make notifications of the ends of shares, with at most `BATCH` reports each."""
    return [
        pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports[first : first + BATCH]))
        for first in range(0, len(reports), BATCH)
    ]
