"""Sends the steps and aborts of an engine's publications to its home.

Messages that are queued while a call is in progress go in the next call, also several steps of one publication: a
source may name layers faster than a call takes. A home takes the notifications of a call in order, so that a step which
the home does not take keeps out the steps behind it. A step that has to be sent again goes alone, and delays only the
steps of its own publication.

A publication that the home does not take, because the home is away or is starting, is sent again for as long as the
home would hold it for readers, which wait meanwhile; or until the engine aborts it. Its blocks are pinned all that
time, so that the waiting messages take no more room than the blocks that the engine has published.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Protocol

from kvferry._control.backoff import CALL_TIMEOUT, SILENCE, Backoff
from kvferry._control.notifier import BATCH
from kvferry._control.publications import Publication
from kvferry._engine_spec import EngineSpec
from kvferry._logs import Log
from kvferry._loop import Loop, Signal
from kvferry._threads import settle
from kvferry.errors import Closed, KvferryError, NotPublished, PublicationAborted, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

MAX_OVERTAKEN = 512
"""Most publications that wait to be sent again while new ones are sent. A home takes a number below its highest only if
at most 1024 were skipped, and the next call may add `BATCH`."""


class Publisher(Protocol):
    """The part of `HomeSession` that the sender uses."""

    spec: EngineSpec
    lock: threading.Lock
    patience: float

    async def attempt(
        self, notifications: Sequence[pb.Notification], timeout: float
    ) -> tuple[list[KvferryError | None], KvferryError | None]: ...
    def ended(self, step: pb.Publish, error: KvferryError | None) -> None: ...
    def complain(self, error: KvferryError) -> None: ...


@dataclass(slots=True, eq=False)
class Unanswered:
    """A step of a publication, or its abort (`step` is None), that the home has not answered yet.

    Attributes:
        until: time on the loop's clock until which the message is sent again.
        answer: gets the home's answer, if a caller waits for it.
        not_published: the message is an abort, and not the engine's: the publication was given up.
        error: of the last attempt.
    """

    publication: Publication
    step: pb.Publish | None
    until: float
    answer: Future[None] | None = None
    sent: bool = False
    not_published: bool = False
    error: KvferryError | None = None
    backoff: Backoff = field(default_factory=Backoff)

    def notification(self) -> pb.Notification:
        if self.step is None:
            abort = pb.Abort(publication=self.publication.number, not_published=self.not_published)
            return pb.Notification(abort=abort)
        return pb.Notification(publish=self.step)

    def settle(self, error: KvferryError | None) -> None:
        """End the wait of the caller, if there is one."""
        if self.answer is not None:
            settle(self.answer, error)


class PublicationSender:
    """Sends the publications of one engine. `put` is called with the session's lock held, on any thread; a coroutine on
    the client's event loop does the rest, as long as there are messages."""

    def __init__(self, loop: Loop, session: Publisher) -> None:
        self._loop = loop
        self._session = session
        self._lock = session.lock
        self._news = Signal(loop)
        self._runs = False
        self._task: asyncio.Task[None] | None = None
        self._messages: dict[int, deque[Unanswered]] = {}
        """Messages of each publication, in order. The first one is the next to be sent."""
        self._ready: deque[int] = deque()
        """Publications whose first message can be sent, in order."""
        self._again: list[tuple[float, int]] = []
        """Heap of the other publications, each with the time at which its first message is to be sent again."""
        self._pause_until, self._backoff = 0.0, Backoff()
        """Nothing is sent until then, because a call failed as a whole; and the pauses after such calls."""
        self._failing_since: float | None = None
        """Since then every call has failed as a whole, or for some message that has to wait."""
        self._given_up = 0
        """Publications that were given up since then."""

    def put(
        self,
        publication: Publication,
        step: pb.Publish | None = None,
        *,
        awaited: bool = False,
        not_published: bool = False,
    ) -> Unanswered:
        """Queue a step of a publication; None: its abort. It is sent again for as long as the home would hold the
        publication. If it is `awaited`, call `wait` for the home's answer."""
        if publication.number not in self._messages:
            self._messages[publication.number] = deque()
            self._ready.append(publication.number)
        until, answer = self._loop.now() + self._session.patience, Future[None]() if awaited else None
        message = Unanswered(publication, step, until, answer, not_published=not_published)
        self._messages[publication.number].append(message)
        if self._runs:
            self._news.set()
        else:
            self._runs = self._loop.call(self._begin)
        return message

    def wait(self, message: Unanswered, timeout: float | None) -> None:
        """Wait on a caller's thread, without the lock, at most `timeout` seconds for the home's answer, and raise its
        error. A publication that has no answer by then is given up. None: the caller does not wait."""
        answer = message.answer
        if answer is None or timeout is None:
            return
        wait([answer], timeout)
        with self._lock:
            late = not answer.done()
            if late:
                # The engine is told by `released` from now on.
                message.answer = None
                if message.step is not None:
                    self.put(message.publication, not_published=True)
        if late:
            number = message.publication.number
            raise message.error or Unreachable(f"no answer about publication {number} in {timeout:g} s", address="")
        answer.result()

    async def close(self, timeout: float) -> None:
        """Send the queued messages, and end. Messages not sent after `timeout` seconds are dropped. Idempotent."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=timeout)
            self._task.cancel()
        self.drop()

    def drop(self) -> None:
        """Drop what was not sent. Called without the lock, on the loop, or when that has ended."""
        with self._lock:
            messages = [message for waiting in self._messages.values() for message in waiting]
            self._messages.clear()
        for message in messages:
            message.settle(Closed(f"the session of engine {self._session.spec.engine_id!r} is closed"))

    # What follows runs on the loop.

    def _begin(self) -> None:
        self._task = self._loop.spawn_turns(self._turn, f"publications of engine {self._session.spec.engine_id}")

    async def _turn(self) -> bool:
        """Make the next call, or wait until it may be made; returns whether there were messages."""
        with self._lock:
            messages, wake_at = self._next()
            waits = self._runs = bool(messages) or wake_at is not None
        if messages:
            await self._send(messages)
        elif wake_at is not None:
            await self._news.wait(wake_at)
        return waits

    def _next(self) -> tuple[list[Unanswered], float | None]:
        """Return the messages for the next call, or when the call may be made; None: no message waits. Called with the
        lock held."""
        time = self._loop.now()
        due = []
        while self._again and self._again[0][0] <= time:
            due.append(heapq.heappop(self._again)[1])
        # These were published before the others.
        self._ready.extendleft(reversed(due))
        paused = time < self._pause_until
        if self._ready and not paused and len(self._again) < MAX_OVERTAKEN:
            return self._first(), None
        wake_at = [self._again[0][0]] if self._again else []
        wake_at += [self._pause_until] if paused and self._ready else []
        return [], min(wake_at, default=None)

    def _first(self) -> list[Unanswered]:
        """Return the messages for the next call: the first one of each publication, then their next steps. Called with
        the lock held."""
        waiting = [self._messages[number] for number in islice(self._ready, BATCH)]
        found = [messages[0] for messages in waiting]
        for index in range(1, BATCH):
            waiting = [messages for messages in waiting if _goes_along(messages, index)]
            found += [messages[index] for messages in waiting]
            if not waiting or len(found) >= BATCH:
                break
        return found

    async def _send(self, messages: list[Unanswered]) -> None:
        notifications = [message.notification() for message in messages]
        errors, failure = await self._session.attempt(notifications, CALL_TIMEOUT)
        time = self._loop.now()
        pause = 0.0 if failure is None else self._backoff.next(failure.retry_after)
        if failure is None:
            self._backoff.reset()
        else:
            # Other messages would fail as well, or would overtake these.
            self._pause_until = time + pause
        waits = (
            error
            for message, error in zip(messages, errors, strict=False)
            # `Control` itself warns callers who wait that their home cannot be reached.
            if error is not None and error.retryable and not (message.answer and isinstance(error, Unreachable))
        )
        self._judge(next(waits, None), time)
        # Messages that did not fit into the call stay where they are.
        sent: dict[int, list[tuple[Unanswered, KvferryError | None]]] = {}
        for message, error in zip(messages, errors, strict=False):
            sent.setdefault(message.publication.number, []).append((message, error))
        for number, answers in sent.items():
            good = len(list(takewhile(lambda answer: answer[1] is None, answers)))
            with self._lock:
                self._ready.popleft()
                for message, _ in answers[:good]:
                    self._messages[number].popleft()
                    if message.step is not None:
                        self._session.ended(message.step, None)
                    message.settle(None)
                if good < len(answers):
                    # The errors of the steps behind this one follow from its own.
                    message, error = answers[good]
                    message.sent, message.error = True, error
                    if error is not None and error.retryable:
                        again_at = time + (pause or message.backoff.next(error.retry_after))
                        final = self._hopeless(message, again_at, error)
                        if final is None:
                            heapq.heappush(self._again, (again_at, number))
                            continue
                        error = final
                    if error is not None:
                        self._give_up(number, error)
                if self._messages[number]:
                    self._ready.append(number)
                else:
                    del self._messages[number]
            if good < len(answers):
                self._warn(message, error)

    def _judge(self, waits: KvferryError | None, time: float) -> None:
        """Warn once if publications have to wait for long, and of those that were given up when the wait ends. `waits`
        is why a message of the last call has to wait; None: none has to."""
        if waits is None:
            if self._given_up > 1:
                message = "%d publications of engine %s were given up before their home took any again"
                logger.warning(message, self._given_up, self._session.spec.engine_id)
            self._failing_since, self._given_up = None, 0
            return
        self._failing_since = time if self._failing_since is None else self._failing_since
        if time >= self._failing_since + SILENCE:
            self._session.complain(waits)

    def _hopeless(self, message: Unanswered, again_at: float, error: KvferryError) -> KvferryError | None:
        """Return why a message is not sent again; None: send it again. Called with the lock held."""
        number, engine_id = message.publication.number, self._session.spec.engine_id
        aborts = [behind for behind in self._messages[number] if behind.step is None and behind is not message]
        if any(not abort.not_published for abort in aborts):
            problem = f"publication {number} was aborted before its home took it"
            return PublicationAborted(problem, engine_id=engine_id, publication=number)
        if not aborts and again_at < message.until:
            return None
        self._given_up += 1
        problem = f"request {message.publication.request_id!r} is given up"
        final = NotPublished(f"{problem}: {error.message}", engine_id=engine_id, publication=number)
        final.__cause__ = error
        return final

    def _warn(self, message: Unanswered, error: KvferryError | None) -> None:
        """Warn that a message was given up: while the home is away, only of the first such message."""
        told = message.answer is not None or isinstance(error, PublicationAborted)
        if told or (isinstance(error, NotPublished) and self._given_up > 1):
            return
        step = "the abort" if message.step is None else f"step {message.step.step}"
        logger.warning("could not send %s of publication %d: %s", step, message.publication.number, error)

    def _give_up(self, number: int, error: KvferryError) -> None:
        """Give up the first message of a publication: an abort alone, a step with the messages behind it. Called with
        the lock held."""
        waiting = self._messages[number]
        first = waiting.popleft()
        first.settle(error)
        if first.step is None:
            return
        self._session.ended(first.step, error)
        for later in waiting:
            if later.step is not None:
                self._session.ended(later.step, error)
            later.settle(None if later.step is None else error)
        waiting.clear()
        # The publication stays pinned until the home releases it, also if the home has nothing of it.
        until, given_up = self._loop.now() + self._session.patience, not isinstance(error, PublicationAborted)
        waiting.append(Unanswered(first.publication, None, until, not_published=given_up))


def _goes_along(messages: Sequence[Unanswered], index: int) -> bool:
    """Whether a message of a publication goes in the same call as those before it. An abort does not: a home would take
    the abort although it did not take the steps before, which are then sent again."""
    return len(messages) > index and not messages[0].sent and None not in (messages[0].step, messages[index].step)
