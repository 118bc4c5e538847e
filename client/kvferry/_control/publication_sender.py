"""Publishes for callers that do not wait: sends the steps and aborts of an engine's publications on a thread.

What is queued while a call is in progress goes in the next call, also several steps of one publication: a source may
name layers faster than a call takes. A home takes the notifications of a call in order, so that a step which it does
not take keeps out those behind it. One that has to be sent again goes alone, and delays those of its own publication
only.

What the home does not take, because it is away or is starting, is sent again for as long as the home would hold it for
readers, who wait meanwhile; or until the engine aborts it. Its blocks are pinned all that time, so that what waits here
takes no more room than what the engine holds published.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.batches import BATCH
from kvferry._control.connection import CALL_TIMEOUT, SILENCE
from kvferry._control.home_session import HomeSession
from kvferry._control.publications import Publication, Release, ReleaseOutcome, Step
from kvferry._control.publish import Publish, PublishMore
from kvferry._threads import start_loop
from kvferry.errors import KvferryError, NotPublished, PublicationAborted, Unavailable
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

MAX_OVERTAKEN = 512
"""So many publications may wait to be sent again before new ones wait for them. A home takes a number below its highest
only if at most 1024 were skipped, and the next call may add `BATCH`."""

LONGEST_SLEEP = 1.0
"""Seconds after which the thread looks again: a sleeping thread does not notice that its host was suspended."""


@dataclass(slots=True, eq=False)
class _Message:
    """A step of a publication, or its abort, that the home has not answered yet.

    Attributes:
        publication: the publication.
        step: the step; None: the abort.
        until: time on `kvferry._clock` until which it is sent again.
        sent: it was sent before.
        not_published: it is an abort, and not the engine's: the publication was given up.
        backoff: the pauses between attempts.
    """

    publication: Publication
    step: Step | None
    until: float
    sent: bool = False
    not_published: bool = False
    backoff: Backoff = field(default_factory=Backoff)

    def notification(self) -> pb.Notification:
        """Make the notification."""
        if self.step is None:
            abort = pb.Abort(publication=self.publication.number, not_published=self.not_published)
            return pb.Notification(abort=abort)
        return pb.Notification(publish=self.step.message)


class PublicationSender:
    """Publishes the requests of one engine. Thread-safe; only `close` waits.

    Args:
        session: the engine's session.

    Attributes:
        lock: guards the queue. Number a step and queue it under one lock: the home takes numbers that rise, with few
            exceptions, and what is given up must not get another step in between.
        published, released: numbers of publications since the start. ``published - released`` are pinned.
        refused: number of released publications that the home did not accept.

    Raises:
        LimitReached: the system refused another thread.
    """

    def __init__(self, session: HomeSession) -> None:
        self.lock = threading.Lock()
        self.published = self.released = self.refused = 0
        self._session = session
        self._refused: deque[Release] = deque()
        """Publications of which no home can have anything, which are released here."""
        self._changed = threading.Condition(self.lock)
        self._messages: dict[int, deque[_Message]] = {}
        """Messages of each publication, in order. The first one is about to be sent, or to be sent again."""
        self._ready: deque[int] = deque()
        """Publications whose first message can be sent, in order."""
        self._again: list[tuple[float, int]] = []
        """Heap of the other publications, each with the time at which its first message is to be sent again."""
        self._pause_until, self._backoff = 0.0, Backoff()
        """Until when nothing is sent, because a call failed as a whole; and the pauses after such calls."""
        self._failing_since: float | None = None
        """Since when every call has failed, or has been answered that something has to wait."""
        self._given_up = 0
        """Publications that were given up since then."""
        self._closed, self._closes_at = False, 0.0
        self._thread = start_loop(self._turn, f"kvferry-publish-{session.spec.engine_id}")

    def publish(self, given: Publish) -> Publication:
        """See `SchedulerPort.publish`."""
        with self.lock:
            publication, step = self._session.offer(given)
            self.published += 1
            self.put(publication, step)
        return publication

    def publish_more(self, given: PublishMore) -> None:
        """See `SchedulerPort.publish_more`."""
        with self.lock:
            self.put(given.publication, self._session.offer_more(given))

    def abort(self, publication: Publication) -> None:
        """See `SchedulerPort.abort`."""
        with self.lock:
            self.put(publication)

    def take_released(self) -> list[Release]:
        """Return the publications released since the last call; each appears exactly once."""
        found = self._session.released()
        with self.lock:
            found += self._refused
            self._refused.clear()
            self.released += len(found)
        return found

    def put(self, publication: Publication, step: Step | None = None) -> None:
        """Queue a step of a publication; None: its abort. Call this with the lock held."""
        if publication.number not in self._messages:
            self._messages[publication.number] = deque()
            self._ready.append(publication.number)
        self._messages[publication.number].append(self._message(publication, step))
        self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Send what is queued, then end the thread. Idempotent.

        Args:
            timeout: seconds to wait for it; what was not sent by then is dropped.
        """
        with self._changed:
            self._closes_at = self._closes_at if self._closed else now() + timeout
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    # The methods below run on the thread.

    def _turn(self) -> bool:
        messages = self._next()
        if messages:
            self._send(messages)
        return bool(messages)

    def _next(self) -> list[_Message]:
        """Wait for messages that can be sent, and return those for the next call; none: this was closed."""
        with self._changed:
            while True:
                time = now()
                due = []
                while self._again and self._again[0][0] <= time:
                    due.append(heapq.heappop(self._again)[1])
                # They were published before the others.
                self._ready.extendleft(reversed(due))
                if self._closed and (not self._messages or time >= self._closes_at):
                    return []
                paused = time < self._pause_until
                if self._ready and not paused and len(self._again) < MAX_OVERTAKEN:
                    return self._first()
                wake_at = [self._again[0][0]] if self._again else []
                wake_at += [self._pause_until] if paused and self._ready else []
                wake_at += [self._closes_at] if self._closed else []
                self._changed.wait(min(LONGEST_SLEEP, min(wake_at) - time) if wake_at else None)

    def _first(self) -> list[_Message]:
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

    def _send(self, messages: list[_Message]) -> None:
        errors, failure = self._session.attempt([message.notification() for message in messages], CALL_TIMEOUT)
        time = now()
        pause = 0.0 if failure is None else self._backoff.next(failure.retry_after)
        if failure is None:
            self._backoff.reset()
        else:
            # Others would fail as well, or would overtake these.
            self._pause_until = time + pause
        self._judge(next((error for error in errors if error is not None and error.retryable), None), time)
        # Those that did not fit into the call stay where they are.
        sent: dict[int, list[tuple[_Message, KvferryError | None]]] = {}
        for message, error in zip(messages, errors, strict=False):
            sent.setdefault(message.publication.number, []).append((message, error))
        for number, answers in sent.items():
            good = len(list(takewhile(lambda answer: answer[1] is None, answers)))
            with self._changed:
                self._ready.popleft()
                for message, _ in answers[:good]:
                    self._taken(message)
                if good < len(answers):
                    # What the home said to those behind this one follows from it.
                    message, error = answers[good]
                    message.sent = True
                    if error is not None and error.retryable:
                        again_at = time + (pause or message.backoff.next(error.retry_after))
                        final = self._hopeless(message, again_at, error)
                        if final is None:
                            heapq.heappush(self._again, (again_at, number))
                            continue
                        error = final
                    if error is not None:
                        self._failed(message, _sure(error, [behind for _, behind in answers[good + 1 :]]))
                if self._messages[number]:
                    self._ready.append(number)
                else:
                    del self._messages[number]
            if good < len(answers):
                self._warn(message, error)

    def _judge(self, waits: KvferryError | None, time: float) -> None:
        """Say once that what is published has to wait, if that lasts, and how it ended.

        Args:
            waits: why something of a call has to wait; None: nothing has.
            time: the present.
        """
        if waits is None:
            if self._given_up > 1:
                message = "%d publications of engine %s were given up before their home took any again"
                logger.warning(message, self._given_up, self._session.spec.engine_id)
            self._failing_since, self._given_up = None, 0
            return
        self._failing_since = time if self._failing_since is None else self._failing_since
        if time >= self._failing_since + SILENCE:
            self._session.complain(waits)

    def _hopeless(self, message: _Message, again_at: float, error: KvferryError) -> KvferryError | None:
        """Return why a message is not sent again; None: it is. Called with the lock held."""
        number, engine_id = message.publication.number, self._session.spec.engine_id
        if message.step is not None and any(behind.step is None for behind in self._messages[number]):
            problem = f"publication {number} was aborted before its home took it"
            return PublicationAborted(problem, engine_id=engine_id, publication=number)
        if again_at < message.until:
            return None
        self._given_up += 1
        problem = f"request {message.publication.request_id!r} is given up after {self._session.patience:.0f} s"
        final = NotPublished(f"{problem}: {error.message}", engine_id=engine_id, publication=number)
        final.__cause__ = error
        return final

    def _warn(self, message: _Message, error: KvferryError | None) -> None:
        """Say that a message was given up: of those that a home did not take while it was away, the first one."""
        if isinstance(error, PublicationAborted) or (isinstance(error, NotPublished) and self._given_up > 1):
            return
        step = "the abort" if message.step is None else f"step {message.step.message.step}"
        logger.warning("could not send %s of publication %d: %s", step, message.publication.number, error)

    # Call these with the lock held.

    def _taken(self, message: _Message) -> None:
        """Handle a message that the home has taken, the first one of its publication."""
        self._messages[message.publication.number].popleft()
        if message.step is not None:
            self._session.ended(message.step, None)

    def _failed(self, message: _Message, error: KvferryError) -> None:
        """Handle the end of the attempts to send a message, the first one of its publication."""
        behind = self._messages[message.publication.number]
        behind.popleft()
        if message.step is not None:
            self._give_up(message.publication, message.step, error, behind)

    def _give_up(self, publication: Publication, step: Step, error: KvferryError, behind: deque[_Message]) -> None:
        """Give up a publication because of a step, with the messages behind it."""
        # The last one first: what is left of a publication always has its first step.
        for later in reversed(behind):
            if later.step is not None:
                self._session.ended(later.step, error)
        behind.clear()
        if self._session.ended(step, error) and step.message.step == 0:
            self.refused += 1
            outcome = ReleaseOutcome.ABORTED
            self._refused.append(Release(publication.number, publication.request_id, outcome, local=True))
        else:
            # The home may have accepted some of it: it stays pinned until it is released.
            abort = self._message(publication, None)
            abort.not_published = not isinstance(error, PublicationAborted)
            behind.append(abort)

    def _message(self, publication: Publication, step: Step | None) -> _Message:
        return _Message(publication, step, now() + self._session.patience)


def _goes_along(messages: Sequence[_Message], index: int) -> bool:
    """Whether a message of a publication goes in the same call as those before it. An abort does not: a home would take
    it although it did not take the steps before it, which are then sent again."""
    return len(messages) > index and not messages[0].sent and None not in (messages[0].step, messages[index].step)


def _sure(error: KvferryError, behind: Iterable[KvferryError | None]) -> KvferryError:
    """Return the error with which the home has refused a step, or one that leaves it open whether it has: it says that
    it has taken a step behind that one, and readers may be told of both."""
    if None not in behind:
        return error
    doubt = Unavailable(f"the home has taken steps behind one that it refused: {error}")
    doubt.__cause__ = error
    return doubt
