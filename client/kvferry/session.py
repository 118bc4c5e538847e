"""The source side: an engine's session at its home. Publishes requests and learns when their blocks are free again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from kvferry.authority import incarnation_of, new_session_secret
from kvferry.blocks import Blocks, blocks_to_proto, check_ids
from kvferry.clock import from_duration, now
from kvferry.control import CALL_TIMEOUT, Control, retrying
from kvferry.errors import Closed, KvferryError, Unavailable
from kvferry.offers import Offers, Publication, Release, ReleaseOutcome, leaves_open
from kvferry.spec import EngineSpec, EngineToken
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.watching import Watcher

__all__ = ["EngineSession", "Publication", "Release", "ReleaseOutcome"]

logger = logging.getLogger(__name__)

BATCH = 512
"""Notifications per call when refilling a home; the contract allows 1024."""


class EngineSession:
    """An engine as its home knows it. Made by `Client.open_engine`, in the one process that chooses the incarnation.

    Threading: every method may be called from any thread. `publish`, `abort` make one call; `released` makes none.
    """

    def __init__(self, control: Control, spec: EngineSpec, timeout: float) -> None:
        self.spec = spec
        self._control = control
        self._secret = new_session_secret()
        self._engine = pb.EngineRef(engine_id=spec.engine_id, incarnation=incarnation_of(self._secret))
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._publishing = threading.Lock()
        self._offers = Offers(self._engine, self._secret)
        self._refills: list[Callable[[], None]] = []
        self._closed = False
        request = pb.WatchRequest(engine=self._engine, session_secret=self._secret, role=pb.WATCH_ROLE_SCHEDULER)
        self._watcher = Watcher(control, request, self._on_event, spec.engine_id)
        opened = self._watcher.open(timeout)
        self.advertise = opened.advertise

    @property
    def token(self) -> EngineToken:
        """What the engine's other processes need. Secret."""
        return EngineToken(self._engine.engine_id, self._secret, self.advertise)

    @property
    def engine_reference(self) -> str:
        """What routers give to this engine's readers to warm up with; see `Cache.warm`. A capability."""
        return self.token.engine_reference

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool = True,
        expected_reads: int = 1,
        payload: bytes = b"",
        checksums: bool = False,
        timeout: float = CALL_TIMEOUT,
    ) -> Publication:
        """Offer a request's blocks. From now until `released` the source neither changes nor frees them (R2).

        Args:
            request_id: the source's request, 1 to 256 bytes.
            blocks: by group; `Blocks.end_token` says how many tokens of the last block are there.
            last: no more blocks will follow; else `publish_more`.
            expected_reads: reads that will be made (n-way sampling).
            payload: opaque bytes for the readers, at most 64 KiB.
            checksums: every rank will call `Cache.checksum`, so that readers in integrity mode wait for the sums.
            timeout: seconds to keep trying.

        Raises:
            BadBlock, InvalidField: the blocks are not ones of this engine.
            Unavailable: the home could not be reached. Whether the publication exists is not known, so it is aborted as
                well as can be, and its blocks stay pinned until `released` comes, once.
            KvferryError: the home refused; nothing was published.
        """
        # One at a time: the home takes a number below the highest it has seen for a stale one.
        with self._publishing:
            publication, step = self.offer(
                request_id,
                blocks,
                last=last,
                expected_reads=expected_reads,
                payload=payload,
                checksums=checksums,
            )
            self.send(step, timeout)
        return publication

    def publish_more(
        self,
        publication: Publication,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        payload: bytes = b"",
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        """Offer the next blocks of a publication that was not the last; each group goes on where it ended. Errors as
        `publish`."""
        self.send(self.offer_more(publication, blocks, last=last, payload=payload), timeout)

    def offer(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool = True,
        expected_reads: int = 1,
        payload: bytes = b"",
        checksums: bool = False,
    ) -> tuple[Publication, pb.Publish]:
        """The part of `publish` that makes no call: the blocks are pinned from now on.

        Returns:
            The publication, and what is to be handed to `send`, in the order of the publications' numbers.
        """
        self._check_open()
        step = pb.Publish(
            request_id=request_id,
            groups=self._encode(blocks),
            last=last,
            expected_reads=expected_reads,
            payload=payload,
            checksums=checksums,
        )
        with self._lock:
            # Number and record together, or a snapshot taken in between would name the number and not hold it.
            return self._offers.publish(self.advertise, step), step

    def offer_more(
        self, publication: Publication, blocks: Mapping[str, Blocks], *, last: bool, payload: bytes = b""
    ) -> pb.Publish:
        """The part of `publish_more` that makes no call; what it returns is to be handed to `send`."""
        self._check_open()
        step = pb.Publish(groups=self._encode(blocks), last=last, payload=payload)
        with self._lock:
            self._offers.publish_more(publication.number, step)
        return step

    def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """Stop new reads of a publication. Its blocks stay pinned until `released`, which comes within max_ttl (R2)."""
        self._check_open()
        with self._lock:
            self._offers.abort(publication.number)
        notification = pb.Notification(abort=pb.Abort(publication=publication.number))
        self._notify_one(notification, timeout)

    def released(self, timeout: float = 0.0) -> list[Release]:
        """What was released since the last call; each publication exactly once (R3).

        Args:
            timeout: seconds to wait for the first; 0: only what is there.
        """
        deadline = now() + timeout
        with self._news:
            while True:
                self._offers.advance(now())
                left = deadline - now()
                if self._offers.news or self._closed or left <= 0:
                    return self._offers.take_released()
                self._news.wait(max(0.001, min(left, self._offers.next_deadline() - now())))

    def unreleased(self) -> tuple[Publication, ...]:
        """Publications whose blocks are still pinned."""
        with self._lock:
            return tuple(self._offers.unreleased())

    def on_refill(self, refill: Callable[[], None]) -> None:
        """Call `refill` on the watch's thread whenever the home has lost its record of this engine."""
        with self._lock:
            self._refills.append(refill)

    def close(self) -> None:
        """End the session. Leases at the home run on; nothing more is learned of them. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._watcher.close()

    def _encode(self, blocks: Mapping[str, Blocks]) -> list[pb.GroupBlocks]:
        groups = []
        for name, listed in blocks.items():
            group = self.spec.group(name)
            check_ids(name, "source", listed.ids, group.num_blocks, group.null_block)
            groups.append(blocks_to_proto(name, listed, group.block_tokens))
        return groups

    def send(self, step: pb.Publish, timeout: float = CALL_TIMEOUT) -> None:
        """Tell the home a step that was offered. Errors as `publish`."""
        number = step.publication
        request = self._request([pb.Notification(publish=step)])

        def attempt(left: float) -> None:
            try:
                self._control.notify_one(request, left)
            except KvferryError as error:
                if leaves_open(error):
                    with self._lock:
                        self._offers.unanswered(step)
                raise

        try:
            retrying(attempt, now() + timeout)
        except KvferryError as error:
            with self._lock:
                never_was = not error.retryable and self._offers.refused(step)
            if never_was:
                raise
            self._disown(number)
            if error.retryable:
                raise
            raise Unavailable(f"whether publication {number} exists is not known: {error}") from error
        finally:
            with self._news:
                self._offers.sent(number, now())
                self._news.notify_all()

    def _disown(self, number: int) -> None:
        """The step's fate is unknown: say once that it is not meant, leave the rest to time."""
        with self._lock:
            self._offers.abort(number)
        try:
            self._notify_one(pb.Notification(abort=pb.Abort(publication=number)), 1.0)
        except KvferryError as error:
            logger.info("abort of publication %d not delivered: %s", number, error)

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
            raise failure

    def _on_event(self, message: pb.WatchResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "opened":
            times = message.opened.times
            with self._lock:
                # A reader that waited for the publication may have been promised a whole ttl before it came.
                self._offers.final = max(from_duration(times.final), from_duration(times.max_ttl))
        elif kind == "released":
            self._on_released(message.released)
        elif kind == "rank_lost":
            lost = message.rank_lost
            place = f" of node {lost.node}" if lost.node else ""
            cause = "its node was lost" if lost.node_lost else "its process ended"
            logger.warning("engine %s: rank %d%s is lost: %s", self.spec.engine_id, lost.rank, place, cause)
        elif kind == "synced" and message.synced.need_resync:
            self._refill()

    def _on_released(self, released: pb.Released) -> None:
        with self._news:
            self._offers.released(released)
            self._news.notify_all()
        acknowledged = pb.Notification(released_ack=pb.ReleasedAck(publications=[released.publication]))
        try:
            self._control.notify(self._request([acknowledged]))
        except KvferryError as error:
            # It stays part of the home's full state and is acknowledged when it is told again.
            logger.info("release of publication %d not acknowledged: %s", released.publication, error)

    def _refill(self) -> None:
        """Tell a restarted home all that this engine holds published (PROTOCOL, Home restart)."""
        for refill in tuple(self._refills):
            refill()
        with self._lock:
            snapshot = self._offers.snapshot()
        notifications = snapshot.notifications
        try:
            for first in range(0, len(notifications), BATCH):
                for result in self._control.notify(self._request(notifications[first : first + BATCH])):
                    if result.WhichOneof("kind") == "error":
                        logger.warning("refilling %s: %s", self._control.address, result.error.message)
        finally:
            # Also when it failed: the home may have taken what it did not answer.
            with self._news:
                self._offers.snapshot_sent(snapshot, now())
                self._news.notify_all()
