"""An engine's session with its home: publishes requests, and receives their releases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvferry._clock import LONGEST, from_duration, now
from kvferry._control.acknowledger import Acknowledgements
from kvferry._control.batches import batches
from kvferry._control.block_use import BlockUse
from kvferry._control.connection import CALL_TIMEOUT, Control
from kvferry._control.lease_holder import DECLINE_PATIENCE
from kvferry._control.publication_steps import follow, new_step
from kvferry._control.publications import Offers, Publication, Release, Step, leaves_open
from kvferry._control.publish import Publish, PublishMore
from kvferry._control.retrying import retrying
from kvferry._control.teller import Message, Teller
from kvferry._control.watcher import Watcher
from kvferry._engine_spec import EngineSpec
from kvferry._tracing import NO_SPAN, Span, start_span
from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry._wire.reference import router_reference
from kvferry._wire.status import from_notification_error
from kvferry._wire.token import EngineToken
from kvferry.errors import (
    Closed,
    EngineUnknown,
    InternalError,
    KvferryError,
    PublicationAborted,
    RouterKeyUsed,
    Unavailable,
    Unreachable,
)
from kvferry.stats import SourceStats
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

RETIRE_TIMEOUT = 1.0
"""Seconds for telling the home that the incarnation has ended."""


class HomeSession:
    """The session behind an `EngineSession`: opens the Watch, sends publications, and keeps them until their release.

    Threading: every method may be called from any thread. `publish`, `send` and `abort` wait for an answer.

    Args:
        control: connection to the home.
        spec: the engine.
        timeout: seconds to keep trying to open the session.
        home_in_references: whether references to publications contain the home's address.

    Attributes:
        spec: the engine.
        advertise: the home's address for readers.
        block_use: records the blocks that are published, or that reads of this process write to.
        patience: seconds for which a step is sent again that the home does not take: for as long as the home would hold
            it for readers.

    Raises:
        KvferryError: see `Client.open_engine`.
    """

    def __init__(self, control: Control, spec: EngineSpec, timeout: float, *, home_in_references: bool = True) -> None:
        self.spec = spec
        self._control = control
        self._secret = new_session_secret()
        self._engine = pb.EngineRef(engine_id=spec.engine_id, incarnation=incarnation_of(self._secret))
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._publishing = threading.Lock()
        self._offers = Offers(self._engine, self._secret)
        self._spans: dict[int, Span] = {}
        """Spans of publications that are not released, by number."""
        self._acknowledgements = Acknowledgements(control)
        self._declines = Teller(self._engine)
        self.block_use = BlockUse(spec.groups)
        self._refills: list[Callable[[], None]] = []
        self.patience = CALL_TIMEOUT
        self._closed = False
        request = pb.WatchRequest(engine=self._engine, session_secret=self._secret, role=pb.WATCH_ROLE_SCHEDULER)
        self._watcher = Watcher(control, request, self._on_event, spec.engine_id)
        opened = self._watcher.open(timeout)
        self.advertise = opened.advertise
        self._home_in_references = self.advertise if home_in_references else ""

    @property
    def token(self) -> EngineToken:
        """See `EngineSession.token`."""
        return EngineToken(self._engine.engine_id, self._secret, self.advertise)

    def publish(self, given: Publish, timeout: float) -> Publication:
        """See `EngineSession.publish`."""
        # One at a time: the home rejects a number below the highest it has seen.
        deadline = now() + timeout
        if not self._publishing.acquire(timeout=timeout):
            message = "publish on another thread took all the time; nothing was published"
            raise Unreachable(message, address=self._control.address)
        try:
            publication, step = self.offer(given)
            self.send(step, max(0.001, deadline - now()))
        finally:
            self._publishing.release()
        return publication

    def offer(self, given: Publish) -> tuple[Publication, Step]:
        """Do the part of `publish` that makes no call. The blocks are pinned from now on.

        Returns:
            The publication, and its step for `send`. Send steps in the order of the publications' numbers.
        """
        self._check_open()
        ids, step = new_step(self.spec, given)
        follow((), step)
        pin = self.block_use.pin(ids)
        span = start_span("kvferry.publish", given.traceparent, engine=self.spec.engine_id, request_id=given.request_id)
        with self._lock:
            # Number and record under one lock: a snapshot in between would include the number but not the record.
            try:
                publication = self._offers.publish(self._home_in_references, step, span.traceparent, given.prompt)
            except RouterKeyUsed as error:
                self.block_use.unpin(pin)
                span.end(error)
                raise
            if span.traceparent:
                self._spans[publication.number] = span
            # Under the same lock: after a release in between, the blocks would stay in use for ever.
            self.block_use.name(pin, publication.number, 0)
        return publication, Step(step)

    def offer_more(self, given: PublishMore) -> Step:
        """Do the part of `publish_more` that makes no call. Pass the returned step to `send`."""
        self._check_open()
        number = given.publication.number
        ids, step = new_step(self.spec, given)
        pin = self.block_use.pin(ids, number)
        try:
            with self._lock:
                follow(self._offers.unfinished(number), step)
                self._offers.publish_more(number, step, given.prompt)
                # Under the same lock: a release in between would leave these blocks in use for ever.
                self.block_use.name(pin, number, step.step)
        except KvferryError:
            self.block_use.unpin(pin)
            raise
        return Step(step)

    def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """See `EngineSession.abort`."""
        self._check_open()
        number = publication.number
        with self._lock:
            self._offers.abort(number)
        notification = pb.Notification(abort=pb.Abort(publication=number))
        self._notify_one(notification, timeout)

    def released(self, deadline: float = 0.0) -> list[Release]:
        """See `EngineSession.released`.

        Args:
            deadline: time on `kvferry._clock` until which to wait for the first one; in the past: do not wait.
        """
        with self._news:
            while True:
                self._offers.advance(now())
                left = deadline - now()
                if self._offers.news or self._closed or left <= 0:
                    found = self._offers.take_released()
                    self.block_use.released(release.publication for release in found)
                    self._trace_released(found)
                    return found
                self._news.wait(max(0.001, min(LONGEST, left, self._offers.next_deadline() - now())))

    def unreleased(self) -> tuple[Publication, ...]:
        """See `EngineSession.unreleased`."""
        with self._lock:
            return tuple(self._offers.unreleased())

    def stats(self) -> SourceStats:
        """Count the publications. Those of a session that was closed are not held by anybody here."""
        with self._lock:
            held = 0 if self._closed else len(self._offers.unreleased())
            return SourceStats(self._offers.published, held, dict(self._offers.outcomes))

    def on_refill(self, refill: Callable[[], None]) -> None:
        """Call `refill` on the Watch's thread whenever the home has lost its record of this engine."""
        with self._lock:
            self._refills.append(refill)

    def close(self) -> None:
        """See `EngineSession.close`."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            self._news.notify_all()
        self._acknowledgements.close()
        self._declines.close()
        failure = self._watcher.failure
        self._watcher.close()
        if failure is None:
            self._retire()

    def send(self, offered: Step, timeout: float = CALL_TIMEOUT) -> None:
        """Send a step that `offer` or `offer_more` returned, until the home has answered. Raises the errors of
        `publish`."""
        told = pb.Notification(publish=offered.message)
        number, failure = offered.message.publication, None

        def attempt(left: float) -> None:
            (error,), _ = self.attempt([told], left)
            if error is not None:
                raise error

        try:
            retrying(attempt, now() + timeout)
        except KvferryError as error:
            failure = error
        finally:
            taken_back = self.ended(offered, failure)
        if failure is None:
            return
        if taken_back:
            raise failure
        try:
            self._notify_one(pb.Notification(abort=pb.Abort(publication=number, not_published=True)), 1.0)
        except KvferryError as error:
            logger.info("could not abort publication %d: %s", number, error)
        if failure.retryable:
            raise failure
        raise Unavailable(f"the home may or may not have publication {number}: {failure}") from failure

    def attempt(
        self, notifications: Sequence[pb.Notification], timeout: float
    ) -> tuple[list[KvferryError | None], KvferryError | None]:
        """Send steps and aborts once: as many of the first ones as fit into one call. Of a publication that was
        released meanwhile, the abort is sent.

        Call `ended` when no more attempts will be made to send a step.

        Returns:
            For each notification that was sent its error, or None; shorter than `notifications` if not all were sent.
            And the error of the call, if it failed as a whole.
        """
        with self._lock:
            notifications = tuple(self._offers.as_of_now(told) for told in notifications)
        sent: Sequence[pb.Notification] = notifications[:1]
        failure: KvferryError | None = None
        errors: list[KvferryError | None] = []
        try:
            request = next(batches(self._engine, notifications, session_secret=self._secret))
            sent = request.notifications
            with self._lock:
                for told in sent:
                    if told.HasField("abort"):
                        self._offers.abort(told.abort.publication, not_published=told.abort.not_published)
            with self._span_of(sent).calling():
                results = self._control.notify(request, timeout)
            if len(results) != len(sent):
                raise InternalError(f"{self._control.address} answered {len(sent)} notifications with {len(results)}")
            errors = [
                from_notification_error(result.error) if result.WhichOneof("kind") == "error" else None
                for result in results
            ]
        except KvferryError as error:
            failure = error
        except Exception as error:
            logger.exception("%d notifications to %s failed", len(sent), self._control.address)
            failure = InternalError(f"sending to {self._control.address} failed: {error!r}")
        if failure is not None:
            errors = [failure] * len(sent)
        # A home that ends a call with an error may have acted on the first notifications of several.
        partly = failure is not None and len(sent) > 1
        found = [
            None if error is None else self._failed(told, error, partly)
            for told, error in zip(sent, errors, strict=True)
        ]
        return found, failure

    def ended(self, offered: Step, error: KvferryError | None) -> bool:
        """Record that no more attempts will be made to send a step.

        Args:
            offered: the step.
            error: the error of the last attempt; None: the home has accepted the step.

        Returns:
            Whether the step was taken back, because no home can have accepted it. If there is an error and it was not,
            abort the publication: it stays pinned until its release.
        """
        step = offered.message
        with self._news:
            taken_back = error is not None and not error.retryable and self._offers.refused(step)
            if error is not None and not taken_back:
                self._offers.abort(step.publication, not_published=not isinstance(error, PublicationAborted))
            self._offers.sent(step.publication, now())
            self._news.notify_all()
            span = self._spans.get(step.publication, NO_SPAN)
            if taken_back and step.step == 0:
                self._spans.pop(step.publication, None)
        if step.last or error is not None:
            span.end(error, publication=step.publication)
        if taken_back:
            self.block_use.refused(step.publication, step.step)
        if error is not None and step.router_key and not isinstance(error, RouterKeyUsed):
            self._decline(step)
        return taken_back

    def complain(self, error: KvferryError) -> None:
        """Warn that publications wait for the home; see `Control.complain`."""
        self._control.complain(error, f"publications of engine {self.spec.engine_id!r} wait")

    def _retire(self) -> None:
        """Tell the home that nobody comes back, so that the next start of the engine need not wait. Once, not for long:
        a home that does not hear it finds out by itself."""
        try:
            self._control.notify_one(self._request([pb.Notification(retire=pb.Retire())]), RETIRE_TIMEOUT)
        except KvferryError as error:
            logger.info("engine %s counts as alive for an engine_ttl: %s", self.spec.engine_id, error)

    def _decline(self, step: pb.Publish) -> None:
        """Tell readers which wait under a router's key that its publication will not come. One whose key was in use is
        no reason to: they wait for the other one."""
        reference = router_reference("", self.spec.engine_id, router_key=step.router_key, key=step.key)
        decline = pb.Notification(decline=pb.Decline(reference=reference, not_published=True))
        self._declines.tell(self._control, [Message(decline, now() + DECLINE_PATIENCE)])

    def _failed(self, told: pb.Notification, error: KvferryError, partly: bool) -> KvferryError:
        """Record that an attempt has failed; returns the error with which it has.

        Args:
            told: a step or an abort.
            error: the home's error for it, or for the call.
            partly: the home may have acted on it before it ended the call with the error.
        """
        if told.HasField("publish") and (partly or leaves_open(error)):
            with self._lock:
                self._offers.unanswered(told.publish)
        if isinstance(error, EngineUnknown) and self._watcher.failure is None:
            # The home has restarted, and this session's Watch is not open again yet.
            unavailable = Unavailable(f"{error.message}; its Watch is being opened again")
            unavailable.__cause__ = error
            return unavailable
        return error

    def _span_of(self, sent: Sequence[pb.Notification]) -> Span:
        """Return the span of the only publication that a call is about; a call about several belongs to no trace."""
        numbers = {told.publish.publication for told in sent if told.HasField("publish")}
        with self._lock:
            return self._spans.get(numbers.pop(), NO_SPAN) if len(numbers) == 1 else NO_SPAN

    def _trace_released(self, released: Sequence[Release]) -> None:
        """Record in their traces that publications were released. Called with the lock held."""
        for release in released:
            span = self._spans.pop(release.publication, None)
            if span is not None:
                span.end(publication=release.publication)
                outcome = release.outcome.name.lower()
                start_span("kvferry.release", span.traceparent, publication=release.publication, outcome=outcome).end()

    def _notify_one(self, notification: pb.Notification, timeout: float) -> pb.NotificationResult:
        request = self._request([notification])
        return retrying(lambda left: self._control.notify_one(request, left), now() + timeout)

    def _request(self, notifications: Sequence[pb.Notification]) -> pb.NotifyRequest:
        return pb.NotifyRequest(sender=self._engine, session_secret=self._secret, notifications=notifications)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the session of engine {self.spec.engine_id!r} is closed")
        failure = self._watcher.failure
        if failure is not None:
            # Otherwise the traceback would grow, and keep the frames alive, with every call.
            raise failure.with_traceback(None)

    def _on_event(self, message: pb.WatchResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "opened":
            times = message.opened.times
            with self._lock:
                # A reader that waited for the publication may have a lease of a whole ttl from before it.
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
            self._refill()

    def _on_released(self, released: pb.Released) -> None:
        with self._news:
            self._offers.released(released)
            self._news.notify_all()
        self._acknowledgements.add(released.publication, self._request([]))

    def _refill(self) -> None:
        """Send a restarted home all publications that are not released (PROTOCOL, Home restart).

        Raises:
            KvferryError: the home did not accept all of it; repeating can help. The end of the refill was not sent.
        """
        for refill in tuple(self._refills):
            refill()
        with self._lock:
            snapshot = self._offers.snapshot()
        try:
            for request in batches(self._engine, snapshot.notifications, session_secret=self._secret):
                if self._closed:
                    return
                self._refill_with(request)
            self._refill_with(self._request([snapshot.end]))
        finally:
            # Also after a failure: the home may have accepted notifications that it did not answer.
            with self._news:
                self._offers.snapshot_sent(snapshot, now())
                self._news.notify_all()

    def _refill_with(self, request: pb.NotifyRequest) -> None:
        for result in self._control.notify(request):
            if result.WhichOneof("kind") == "error":
                error = from_notification_error(result.error)
                if error.retryable:
                    raise error
                logger.warning("%s refused a notification of the refill: %s", self._control.address, error)
