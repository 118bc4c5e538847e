"""Sends the steps and aborts of an engine's publications to its home, for callers that do not wait, on a thread.

What is queued while a call is in progress goes in the next call, also several steps of one publication: a source may
name layers faster than a call takes. A home takes the notifications of a call in order, so that a step which it does
not take keeps out those behind it. One that has to be sent again goes alone, and delays those of its own publication
only.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.batches import BATCH
from kvferry._control.connection import CALL_TIMEOUT
from kvferry._control.home_session import HomeSession
from kvferry._control.publications import Publication, Step
from kvferry._threads import start_thread
from kvferry.errors import KvferryError, Unavailable
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
        until: time on `kvferry._clock` until which it is sent again; None: it was not sent yet.
        backoff: the pauses between attempts.
    """

    publication: Publication
    step: Step | None = None
    until: float | None = None
    backoff: Backoff = field(default_factory=Backoff)

    def notification(self) -> pb.Notification:
        """Make the notification."""
        if self.step is None:
            return pb.Notification(abort=pb.Abort(publication=self.publication.number))
        return pb.Notification(publish=self.step.message)


class PublicationSender:
    """Sends the publications of one engine.

    Threading: `put` is called with `lock` held, and returns at once; only `close` waits.

    Args:
        session: the engine's session.
        refused: called with a publication of which no home can have anything, with the lock held. Must not block.

    Attributes:
        lock: guards the queue. Number a step and queue it under one lock: the home takes numbers that rise, with few
            exceptions, and what is given up must not get another step in between.

    Raises:
        LimitReached: the system refused another thread.
    """

    def __init__(self, session: HomeSession, refused: Callable[[Publication], None]) -> None:
        self.lock = threading.Lock()
        self._session = session
        self._refused = refused
        self._changed = threading.Condition(self.lock)
        self._messages: dict[int, deque[_Message]] = {}
        """Messages of each publication, in order. The first one is about to be sent, or to be sent again."""
        self._ready: deque[int] = deque()
        """Publications whose first message can be sent, in order."""
        self._again: list[tuple[float, int]] = []
        """Heap of the other publications, each with the time at which its first message is to be sent again."""
        self._pause_until, self._backoff = 0.0, Backoff()
        """Until when nothing is sent, because a call failed as a whole; and the pauses after such calls."""
        self._closed = False
        self._thread = start_thread(self._run, f"kvferry-publish-{session.spec.engine_id}")

    def put(self, publication: Publication, step: Step | None = None) -> None:
        """Queue a step of a publication; None: its abort. Call this with the lock held."""
        if publication.number not in self._messages:
            self._messages[publication.number] = deque()
            self._ready.append(publication.number)
        self._messages[publication.number].append(_Message(publication, step))
        self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Send what is queued, then end the thread. Idempotent.

        Args:
            timeout: seconds to wait for it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    # The methods below run on the thread.

    def _run(self) -> None:
        while messages := self._next():
            try:
                self._send(messages)
            except Exception:
                logger.exception("thread %s failed; it tries again", self._thread.name)
                self._pause_until = now() + self._backoff.next(None)

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
                if self._closed and not self._messages:
                    return []
                paused = time < self._pause_until
                if self._ready and not paused and len(self._again) < MAX_OVERTAKEN:
                    return self._first()
                wake_at = [self._again[0][0]] if self._again else []
                wake_at += [self._pause_until] if paused and self._ready else []
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
        until = now() + CALL_TIMEOUT
        errors, failure = self._session.attempt([message.notification() for message in messages], CALL_TIMEOUT)
        time = now()
        pause = 0.0 if failure is None else self._backoff.next(failure.retry_after)
        if failure is None:
            self._backoff.reset()
        elif time + pause < until:
            # Others would fail as well, or would overtake these.
            self._pause_until = time + pause
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
                    message.until = until if message.until is None else message.until
                    if error is not None and error.retryable:
                        again_at = time + (pause or message.backoff.next(error.retry_after))
                        if again_at < message.until:
                            heapq.heappush(self._again, (again_at, number))
                            continue
                    if error is not None:
                        self._failed(message, _sure(error, [behind for _, behind in answers[good + 1 :]]))
                if self._messages[number]:
                    self._ready.append(number)
                else:
                    del self._messages[number]
            if good < len(answers):
                step = "the abort" if message.step is None else f"step {message.step.message.step}"
                logger.warning("could not send %s of publication %d: %s", step, number, error)

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
            self._refused(publication)
        else:
            # The home may have accepted some of it: it stays pinned until it is released.
            behind.append(_Message(publication))


def _goes_along(messages: Sequence[_Message], index: int) -> bool:
    """Whether a message of a publication goes in the same call as those before it. An abort does not: a home would take
    it although it did not take the steps before it, which are then sent again."""
    return len(messages) > index and messages[0].until is None and None not in (messages[0].step, messages[index].step)


def _sure(error: KvferryError, behind: Iterable[KvferryError | None]) -> KvferryError:
    """Return the error with which the home has refused a step, or one that leaves it open whether it has: it says that
    it has taken a step behind that one, and readers may be told of both."""
    if None not in behind:
        return error
    doubt = Unavailable(f"the home has taken steps behind one that it refused: {error}")
    doubt.__cause__ = error
    return doubt
