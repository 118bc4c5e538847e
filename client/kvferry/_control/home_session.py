"""An engine's session with its home: publishes requests, and receives their releases."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvferry import _arguments as arguments
from kvferry._clock import from_duration
from kvferry._control.backoff import CALL_TIMEOUT, retrying
from kvferry._control.block_use import BlockUse
from kvferry._control.connection import Control
from kvferry._control.lease_holder import DECLINE_PATIENCE
from kvferry._control.notifier import Message, Notifier, batches
from kvferry._control.publication_sender import PublicationSender
from kvferry._control.publications import Offers, Publication, Release
from kvferry._control.publish import Publish, PublishMore, follow, new_step
from kvferry._control.questions import Question, Questions
from kvferry._control.watcher import Watcher
from kvferry._engine_spec import EngineSpec
from kvferry._logs import Log
from kvferry._loop import Loop, News, check_may_wait
from kvferry._tracing import NO_SPAN, Span, start_span
from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry._wire.outcomes import MissReason
from kvferry._wire.reference import router_reference
from kvferry._wire.token import EngineToken
from kvferry.errors import (
    Closed,
    EngineUnknown,
    InternalError,
    InvalidField,
    KvferryError,
    PublicationAborted,
    RouterKeyUsed,
    Unavailable,
)
from kvferry.stats import SourceStats
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

RETIRE_TIMEOUT = 1.0
"""Seconds for telling the home that the incarnation has ended."""

MOST_ACKNOWLEDGED = 8192
"""Most publication numbers in one call that acknowledges releases: these take at most 80 KiB."""


class HomeSession:
    """The session behind an `EngineSession` and a `SchedulerPort`, which explain the methods of the same names: opens
    the Watch, sends publications, and keeps them until their release.

    Threading: every method may be called from any thread, but for the coroutines, which belong to the client's event
    loop. `publish`, `publish_more`, `abort` and `released` wait if they are given a timeout, and so does `close`.
    `lock` guards the publications and the queue of the sender.

    Attributes:
        advertise: the home's address for readers, once the session is open.
        news, asked: set when `released`, or `questions`, has something to return.
        patience: seconds for which a step that the home does not take is sent again: for as long as the home would hold
            the publication for readers.
    """

    def __init__(
        self, loop: Loop, control: Control, spec: EngineSpec, *, home_in_references: bool = True, hints: bool = True
    ) -> None:
        self.spec = spec
        self.advertise = ""
        self.lock = threading.Lock()
        self.block_use = BlockUse(spec.groups)
        self.patience = CALL_TIMEOUT
        self._loop = loop
        self._control = control
        self._secret = new_session_secret()
        self._engine = pb.EngineRef(engine_id=spec.engine_id, incarnation=incarnation_of(self._secret))
        self.news = News()
        self._offers = Offers(self._engine, self._secret, hints=hints)
        self._sender = PublicationSender(loop, self)
        self._spans: dict[int, Span] = {}
        """Spans of publications that are not released, by number."""
        self._taken = 0
        """Number of publications that `released` has returned."""
        self._unacknowledged: set[int] = set()
        """Numbers of released publications that are to be acknowledged."""
        self._acknowledging: asyncio.Task[None] | None = None
        self._declines = Notifier(loop, self._engine)
        self._misses = Notifier(loop, self._engine, self._secret)
        self.asked = News()
        self._questions = Questions(loop.now)
        self.on_question(self.asked.tell)
        self._refills: list[Callable[[], Awaitable[None]]] = []
        self.closed = False
        request = pb.WatchRequest(engine=self._engine, session_secret=self._secret, role=pb.WATCH_ROLE_SCHEDULER)
        self._watcher = Watcher(loop, control, request, self._on_event, spec.engine_id)
        self._home_in_references = home_in_references

    async def open(self, timeout: float) -> None:
        self.advertise = (await self._watcher.open(timeout)).advertise

    @property
    def token(self) -> EngineToken:
        return EngineToken(self._engine.engine_id, self._secret, self.advertise)

    def publish(self, given: Publish, timeout: float | None = None) -> Publication:
        """Publish, and wait at most `timeout` seconds for the home's answer; see `EngineSession.publish`. Without a
        timeout this returns at once, as `SchedulerPort.publish` does: the step is sent for as long as the home would
        hold the publication, and `released` returns a publication that the home refuses."""
        self._check_open(timeout)
        ids, step = new_step(self.spec, given)
        follow((), step)
        self.block_use.pin(ids)
        span = start_span("kvferry.publish", given.traceparent, engine=self.spec.engine_id, request_id=given.request_id)
        with self.lock:
            # Number, record and queue under one lock: a snapshot in between would include the number but not the
            # record, and the home takes numbers that rise, with few exceptions.
            try:
                # Again, since steps that are queued after `close` get no answer.
                self._check_open()
                home = self.advertise if self._home_in_references else ""
                publication = self._offers.publish(home, step, span.traceparent, given.prompt)
            except KvferryError as error:
                self.block_use.unpin(ids)
                span.end(error)
                raise
            if span.traceparent:
                self._spans[publication.number] = span
            # Under the same lock: after a release in between, the blocks would stay in use for ever.
            self.block_use.name(ids, publication.number)
            message = self._sender.put(publication, step, awaited=timeout is not None)
        try:
            self._sender.wait(message, timeout)
        except KvferryError as error:
            # An error of its own: others may wait for the same call, and get the same error.
            values = {**error.values, "withdrawn": str(publication.number)}
            raise error.rebuilt(error.message, values, error.retry_after) from error.__cause__
        return publication

    def publish_more(self, given: PublishMore, timeout: float | None = None) -> None:
        """Publish the next step of a publication; for the timeout see `publish`."""
        self._check_open(timeout)
        number = given.publication.number
        ids, step = new_step(self.spec, given)
        self.block_use.pin(ids, number)
        try:
            with self.lock:
                self._check_open()
                follow(self._offers.unfinished(number), step)
                self._offers.publish_more(number, step, given.prompt)
                # Under the same lock: a release in between would leave these blocks in use for ever.
                self.block_use.name(ids, number)
                message = self._sender.put(given.publication, step, awaited=timeout is not None)
        except KvferryError:
            self.block_use.unpin(ids)
            raise
        self._sender.wait(message, timeout)

    def abort(self, publication: Publication, timeout: float | None = None) -> None:
        """Withdraw a publication; for the timeout see `publish`."""
        with self.lock:
            self._check_open(timeout)
            message = self._sender.put(publication, awaited=timeout is not None)
        self._sender.wait(message, timeout)

    def released(self, timeout: float = 0.0, most: int | None = None) -> list[Release]:
        deadline = self._loop.now() + timeout
        while True:
            with self.lock:
                self._offers.advance(self._loop.now())
                found = self._offers.take_released(most)
                self.block_use.released(release.publication for release in found)
                self._trace_released(found)
                self._taken += len(found)
            left = min(deadline, self._offers.next_deadline) - self._loop.now()
            if found or self.closed or deadline <= self._loop.now():
                return found
            self.news.wait(max(0.001, min(arguments.MOST_SECONDS, left)))

    def questions(self, timeout: float = 0.0) -> list[Question]:
        deadline = self._loop.now() + timeout
        while True:
            found = self._questions.take()
            left = deadline - self._loop.now()
            if found or self.closed or left <= 0:
                return found
            self.asked.wait(min(arguments.MOST_SECONDS, left))

    def on_question(self, heard: Callable[[], object]) -> None:
        """Call `heard` for each new question, on the client's event loop."""
        self._questions.heard.append(heard)

    def miss(self, question: Question, reason: MissReason) -> None:
        arguments.instance("question", question, Question, "a Question that `questions` returned")
        if arguments.instance("reason", reason, MissReason, "a MissReason") is MissReason.NO_ANSWER:
            raise InvalidField("reason", reason.name, "another one: only a home says that an engine has not answered")
        if self._questions.end(question):
            miss = pb.Notification(miss=pb.Miss(question=question.number, reason=pb.MissReason.ValueType(reason)))
            self._loop.call(partial(self._misses.send, self._control, [Message(miss, question.deadline)]))

    # Without the lock, with which handlers of logs and hooks of traces are called: they may ask for these.

    def unreleased(self) -> tuple[Publication, ...]:
        return tuple(self._offers.unreleased())

    def stats(self) -> SourceStats:
        """Count the publications; a closed session holds none."""
        held = 0 if self.closed else len(self._offers.unreleased())
        return SourceStats(self._offers.published, held, dict(self._offers.outcomes))

    def pinned(self) -> int:
        """Return the number of publications that `released` has not returned."""
        # In this order: what is published and released in between must not make fewer than there are.
        taken = self._taken
        return self._offers.published - taken

    def on_refill(self, refill: Callable[[], Awaitable[None]]) -> None:
        """Await `refill` whenever the home has lost its record of this engine."""
        with self.lock:
            self._refills.append(refill)

    def close(self, timeout: float = 0.0) -> None:
        """See `EngineSession.close`. Queued messages are sent for at most `timeout` seconds."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        self._questions.close()
        self.news.end()
        self.asked.end()
        try:
            self._loop.run(self._close(timeout))
        except Closed:
            # The client is closed, and nothing of the session runs any more: nobody else answers those who wait.
            self._sender.drop()

    async def _close(self, timeout: float) -> None:
        await self._sender.close(timeout)
        for notifier in (self._declines, self._misses):
            await notifier.close(0.0)
        failure = self._watcher.failure
        await self._watcher.close()
        if failure is None:
            # So that the next start of the engine need not wait. One short attempt: without the message, the home finds
            # out after an engine_ttl.
            try:
                await self._control.notify_one(self._request([pb.Notification(retire=pb.Retire())]), RETIRE_TIMEOUT)
            except KvferryError as error:
                logger.info("engine %s counts as alive for an engine_ttl: %s", self.spec.engine_id, error)
        if self._acknowledging is not None:
            self._acknowledging.cancel()

    # The sender calls these.

    async def attempt(
        self, notifications: Sequence[pb.Notification], timeout: float
    ) -> tuple[list[KvferryError | None], KvferryError | None]:
        """Send steps and aborts once, as many of the first ones as fit into one call; `ended` must follow when no more
        attempts will be made to send a step. Returns for each notification that was sent its error, or None; and the
        error of the call, if the call failed as a whole."""
        with self.lock:
            notifications = tuple(self._offers.as_of_now(told) for told in notifications)
        sent: Sequence[pb.Notification] = notifications[:1]
        failure: KvferryError | None = None
        errors: list[KvferryError | None] = []
        try:
            request = next(batches(self._engine, notifications, session_secret=self._secret))
            sent = request.notifications
            with self.lock:
                for told in sent:
                    if told.HasField("abort"):
                        self._offers.abort(told.abort.publication, not_published=told.abort.not_published)
            with self._span_of(sent).calling():
                answers = await self._control.notify(request, timeout)
            errors = [answer if isinstance(answer, KvferryError) else None for answer in answers]
        except KvferryError as error:
            failure = error
        except Exception as error:
            logger.exception("%d notifications to %s failed", len(sent), self._control.address)
            failure = InternalError(f"sending to {self._control.address} failed: {error!r}")
        if failure is not None:
            errors = [failure] * len(sent)
        return [self._reopening(error) for error in errors], failure

    def ended(self, step: pb.Publish, error: KvferryError | None) -> None:
        """Record that no more attempts will be made to send a step. `error` is that of the last attempt; None: the home
        has accepted the step. After an error its publication is withdrawn: the home may have it, and its blocks stay
        pinned until its release. Called with the lock held."""
        if error is not None:
            self._offers.abort(step.publication, not_published=not isinstance(error, PublicationAborted))
        self._offers.sent(step.publication, self._loop.now())
        self.news.tell()
        if step.last or error is not None:
            self._spans.get(step.publication, NO_SPAN).end(error, publication=step.publication)
        if error is not None and step.router_key and not isinstance(error, RouterKeyUsed):
            self._decline(step)

    def complain(self, error: KvferryError) -> None:
        self._control.complain(error, f"publications of engine {self.spec.engine_id!r} wait")

    def _decline(self, step: pb.Publish) -> None:
        """Tell the readers that wait under a router's key that its publication will not come. Not for a key that was in
        use: those readers wait for the other publication."""
        reference = router_reference("", self.spec.engine_id, router_key=step.router_key, key=step.key)
        decline = pb.Notification(decline=pb.Decline(reference=reference, not_published=True))
        self._declines.send(self._control, [Message(decline, self._loop.now() + DECLINE_PATIENCE)])

    def _reopening(self, error: KvferryError | None) -> KvferryError | None:
        if isinstance(error, EngineUnknown) and self._watcher.failure is None:
            # The home has restarted, and this session's Watch is not open again yet.
            unavailable = Unavailable(f"{error.message}; its Watch is being opened again")
            unavailable.__cause__ = error
            return unavailable
        return error

    def _span_of(self, sent: Sequence[pb.Notification]) -> Span:
        """Return the span of the only publication that a call is about; a call about several belongs to no trace."""
        numbers = {told.publish.publication for told in sent if told.HasField("publish")}
        with self.lock:
            return self._spans.get(numbers.pop(), NO_SPAN) if len(numbers) == 1 else NO_SPAN

    def _trace_released(self, released: Sequence[Release]) -> None:
        """Record in their traces that publications were released. Called with the lock held."""
        for release in released:
            span = self._spans.pop(release.publication, None)
            if span is not None:
                span.end(publication=release.publication)
                outcome = release.outcome.name.lower()
                start_span("kvferry.release", span.traceparent, publication=release.publication, outcome=outcome).end()

    def _request(self, notifications: Sequence[pb.Notification]) -> pb.NotifyRequest:
        return pb.NotifyRequest(sender=self._engine, session_secret=self._secret, notifications=notifications)

    def _check_open(self, timeout: float | None = None) -> None:
        if timeout is not None:
            check_may_wait()
        if self.closed:
            raise Closed(f"the session of engine {self.spec.engine_id!r} is closed")
        failure = self._watcher.failure
        if failure is not None:
            # Otherwise the traceback would grow, and keep the frames alive, with every call.
            raise failure.with_traceback(None)

    async def _on_event(self, message: pb.WatchResponse) -> None:
        kind = message.WhichOneof("event")
        self._questions.on_event(message)
        if kind == "opened":
            times = message.opened.times
            with self.lock:
                # A reader that waited for the publication may have a lease of a whole ttl from before the publish.
                self._offers.final = max(from_duration(times.final), from_duration(times.max_ttl))
                self.patience = max(CALL_TIMEOUT, min(from_duration(times.hold), from_duration(times.final)))
        elif kind == "released":
            self._on_released(message.released)
        elif kind == "rank_lost":
            lost = message.rank_lost
            place = f" of node {lost.node}" if lost.node else ""
            cause = "its node was lost" if lost.node_lost else "its process has ended, or has closed its client"
            logger.warning("engine %s: rank %d%s is gone: %s", self.spec.engine_id, lost.rank, place, cause)
        elif kind == "synced" and message.synced.need_resync:
            await self._refill()

    def _on_released(self, released: pb.Released) -> None:
        with self.lock:
            self._offers.released(released)
        self.news.tell()
        self._unacknowledged.add(released.publication)
        if self._acknowledging is None:
            name = f"acknowledgements of engine {self.spec.engine_id}"
            self._acknowledging = self._loop.spawn(self._acknowledge(), name)

    async def _acknowledge(self) -> None:
        """Acknowledge releases, with one call at a time; releases that come meanwhile go with the next call. A home
        that refuses an acknowledgement repeats the release in its next full state."""
        what = f"the acknowledgement of releases of engine {self.spec.engine_id!r}"
        try:
            while self._unacknowledged:
                numbers = sorted(self._unacknowledged)[:MOST_ACKNOWLEDGED]
                request = self._request([pb.Notification(released_ack=pb.ReleasedAck(publications=numbers))])
                await retrying(partial(self._control.notify_one, request), math.inf, what=what)
                self._unacknowledged.difference_update(numbers)
        except KvferryError as error:
            logger.info("could not acknowledge releases: %s", error)
        finally:
            self._acknowledging = None

    async def _refill(self) -> None:
        """Send a restarted home all publications that are not released (PROTOCOL, Home restart). Raises the error with
        which the home did not accept one of them, if repeating can help; then the end of the refill was not sent."""
        for refill in tuple(self._refills):
            await refill()
        with self.lock:
            snapshot = self._offers.snapshot()
        try:
            for request in batches(self._engine, snapshot.notifications, session_secret=self._secret):
                if self.closed:
                    return
                await self._refill_with(request)
            await self._refill_with(self._request([snapshot.end]))
        finally:
            # Also after a failure: the home may have accepted notifications that it did not answer.
            with self.lock:
                self._offers.snapshot_sent(snapshot, self._loop.now())
            self.news.tell()

    async def _refill_with(self, request: pb.NotifyRequest) -> None:
        for answer in await self._control.notify(request):
            if isinstance(answer, KvferryError):
                if answer.retryable:
                    raise answer
                logger.warning("%s refused a notification of the refill: %s", self._control.address, answer)
