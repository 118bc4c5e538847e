"""The source side: an engine's session at its home. Publishes requests and learns when their blocks are free again."""

from __future__ import annotations

import enum
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.blocks import Blocks, blocks_to_proto, check_ids
from kvferry.clock import from_duration, now
from kvferry.control import CALL_TIMEOUT, Control, retrying
from kvferry.errors import Closed, InvalidField, KvferryError
from kvferry.reference import format_reference
from kvferry.spec import EngineSpec, EngineToken
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.watching import Watcher

logger = logging.getLogger(__name__)

LOCAL_RELEASE_MARGIN = 5.0
"""Seconds after the final deadline at which the SDK releases a publication whose home never came back."""

BATCH = 512
"""Notifications per call when refilling a home; the contract allows 1024."""


class ReleaseOutcome(enum.IntEnum):
    """How a publication ended, numbered as in the proto."""

    READ = 1
    UNREAD = 2
    DECLINED = 3
    ABORTED = 4
    FINAL = 5


@dataclass(frozen=True, slots=True)
class Release:
    """The source may change and free the blocks of a publication.

    Attributes:
        publication: its number.
        request_id: the source's request.
        outcome: how it ended.
        reads: what the home knows of its reads; empty if the release is local.
        local: the home never came back; released by the final deadline alone.
    """

    publication: int
    request_id: str
    outcome: ReleaseOutcome
    reads: tuple[pb.ReadSummary, ...] = ()
    local: bool = False


@dataclass(frozen=True, slots=True)
class Publication:
    """A request offered to readers.

    Attributes:
        number: rising per incarnation.
        request_id: the source's request.
        reference: the string for the router. A capability.
    """

    number: int
    request_id: str
    reference: str


@dataclass(slots=True)
class _Held:
    """A publication that is not released yet, with all that a restarted home needs."""

    publication: Publication
    steps: list[pb.Publish]
    released_locally_at: float


class EngineSession:
    """An engine as its home knows it. Made by `Client.open_engine`, in the one process that chooses the incarnation.

    Threading: every method may be called from any thread. `publish`, `abort` make one call; `released` makes none.
    """

    def __init__(self, control: Control, spec: EngineSpec, timeout: float) -> None:
        self.spec = spec
        self._control = control
        self._engine = pb.EngineRef(engine_id=spec.engine_id, incarnation=secrets.token_bytes(16))
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._publishing = threading.Lock()
        self._next = 1
        self._held: dict[int, _Held] = {}
        self._released: deque[Release] = deque()
        self._refills: list[Callable[[], None]] = []
        self._closed = False
        self._secret = b""
        request = pb.WatchRequest(engine=self._engine, role=pb.WATCH_ROLE_SCHEDULER)
        self._watcher = Watcher(control, request, self._on_event, spec.engine_id)
        opened = self._watcher.open(timeout)
        self.advertise = opened.advertise
        self._final = from_duration(opened.times.final)

    @property
    def token(self) -> EngineToken:
        """What the engine's other processes need. Secret."""
        return EngineToken(self._engine.engine_id, self._engine.incarnation, self._secret)

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool = True,
        expected_reads: int = 1,
        payload: bytes = b"",
        timeout: float = CALL_TIMEOUT,
    ) -> Publication:
        """Offer a request's blocks. From now until `released` the source neither changes nor frees them (R2).

        Args:
            request_id: the source's request, 1 to 256 bytes.
            blocks: by group; `Blocks.end_token` says how many tokens of the last block are there.
            last: no more blocks will follow; else `publish_more`.
            expected_reads: reads that will be made (n-way sampling).
            payload: opaque bytes for the readers, at most 64 KiB.
            timeout: seconds to keep trying.

        Raises:
            BadBlock, InvalidField: the blocks are not ones of this engine.
            Unavailable: the home could not be reached. Whether the publication exists is not known, so it is aborted as
                well as can be, and its blocks stay pinned until `released` comes, once.
            KvferryError: the home refused; nothing was published.
        """
        self._check_open()
        groups = self._encode(blocks)
        key = secrets.token_bytes(16)
        step = pb.Publish(
            request_id=request_id, key=key, groups=groups, last=last, expected_reads=expected_reads, payload=payload
        )
        # One at a time: the home takes a number below the highest it has seen for a stale one.
        with self._publishing:
            with self._lock:
                # Number and record together, or a snapshot taken in between would name the number and not hold it.
                step.publication, self._next = self._next, self._next + 1
                publication = Publication(step.publication, request_id, self._reference(step))
                held = self._held[step.publication] = _Held(publication, [step], 0.0)
            self._send_step(held, step, timeout)
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
        self._check_open()
        groups = self._encode(blocks)
        with self._lock:
            held = self._held.get(publication.number)
            if held is None or held.steps[-1].last:
                raise InvalidField("publication", publication.number, "one that is not complete")
            step = pb.Publish(
                publication=publication.number,
                request_id=publication.request_id,
                key=held.steps[0].key,
                step=len(held.steps),
                groups=groups,
                last=last,
                payload=payload,
            )
            held.steps.append(step)
        self._send_step(held, step, timeout)

    def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """Stop new reads of a publication. Its blocks stay pinned until `released`, which comes within max_ttl (R2)."""
        self._check_open()
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
                self._release_locally()
                if self._released or self._closed:
                    break
                left = deadline - now()
                if left <= 0:
                    break
                # A publication that is being sent has no local deadline yet.
                local = [held.released_locally_at for held in self._held.values() if held.released_locally_at > 0]
                due = min(local, default=deadline)
                self._news.wait(max(0.001, min(left, due - now())))
            found = list(self._released)
            self._released.clear()
        return found

    def unreleased(self) -> tuple[Publication, ...]:
        """Publications whose blocks are still pinned."""
        with self._lock:
            return tuple(held.publication for held in self._held.values())

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

    def _reference(self, step: pb.Publish) -> str:
        reference = pb.Reference(
            home=self.advertise,
            engine_id=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            publication=step.publication,
            request_id=step.request_id,
            key=step.key,
        )
        return format_reference(reference)

    def _encode(self, blocks: Mapping[str, Blocks]) -> list[pb.GroupBlocks]:
        groups = []
        for name, listed in blocks.items():
            group = self.spec.group(name)
            check_ids(name, "source", listed.ids, group.num_blocks, group.null_block)
            groups.append(blocks_to_proto(name, listed, group.block_tokens))
        return groups

    def _send_step(self, held: _Held, step: pb.Publish, timeout: float) -> None:
        try:
            self._notify_one(pb.Notification(publish=step), timeout)
        except KvferryError as error:
            if error.retryable:
                self._disown(held)
            else:
                self._take_back(held, step)
            raise
        finally:
            held.released_locally_at = now() + self._final + LOCAL_RELEASE_MARGIN

    def _take_back(self, held: _Held, step: pb.Publish) -> None:
        """The home refused the step, so it never was: nobody can have read it."""
        with self._lock:
            held.steps.remove(step)
            if not held.steps:
                del self._held[held.publication.number]

    def _disown(self, held: _Held) -> None:
        """The home did not answer, so the step's fate is unknown: say once that it is not meant, leave the rest to
        time."""
        try:
            self._notify_one(pb.Notification(abort=pb.Abort(publication=held.publication.number)), 1.0)
        except KvferryError as error:
            logger.info("abort of publication %d not delivered: %s", held.publication.number, error)

    def _notify_one(self, notification: pb.Notification, timeout: float) -> pb.NotificationResult:
        request = self._request([notification])
        return retrying(lambda left: self._control.notify_one(request, left), now() + timeout)

    def _request(self, notifications: list[pb.Notification]) -> pb.NotifyRequest:
        return pb.NotifyRequest(sender=self._engine, session_secret=self._secret, notifications=notifications)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the session of engine {self.spec.engine_id!r} is closed")
        failure = self._watcher.failure
        if failure is not None:
            raise failure

    def _on_event(self, message: pb.WatchResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "opened" and message.opened.session_secret:
            self._secret = message.opened.session_secret
        elif kind == "released":
            self._on_released(message.released)
        elif kind == "synced" and message.synced.need_resync:
            self._refill()

    def _on_released(self, released: pb.Released) -> None:
        outcome = ReleaseOutcome(released.outcome)
        release = Release(released.publication, released.request_id, outcome, tuple(released.reads))
        with self._news:
            self._release(release)
        acknowledged = pb.Notification(released_ack=pb.ReleasedAck(publications=[released.publication]))
        try:
            self._control.notify(self._request([acknowledged]))
        except KvferryError as error:
            # It stays part of the home's full state and is acknowledged when it is told again.
            logger.info("release of publication %d not acknowledged: %s", released.publication, error)

    def _release(self, release: Release) -> None:
        """With the lock held; the second of two releases finds nothing."""
        if self._held.pop(release.publication, None) is not None:
            self._released.append(release)
            self._news.notify_all()

    def _release_locally(self) -> None:
        """With the lock held: what no home can hold a lease on any more (PROTOCOL, Endings)."""
        late = [held for held in self._held.values() if 0 < held.released_locally_at <= now()]
        for held in late:
            publication = held.publication
            self._release(Release(publication.number, publication.request_id, ReleaseOutcome.FINAL, local=True))

    def _refill(self) -> None:
        """Tell a restarted home all that this engine holds published (PROTOCOL, Home restart)."""
        for refill in tuple(self._refills):
            refill()
        with self._lock:
            held, high_water = list(self._held.values()), self._next - 1
        begin = pb.Resync(phase=pb.RESYNC_PHASE_BEGIN, high_water=high_water)
        end = pb.Resync(phase=pb.RESYNC_PHASE_END, high_water=high_water)
        notifications = [pb.Notification(resync=begin)]
        notifications += [pb.Notification(publish=step) for item in held for step in item.steps]
        notifications += [pb.Notification(resync=end)]
        for first in range(0, len(notifications), BATCH):
            for result in self._control.notify(self._request(notifications[first : first + BATCH])):
                if result.WhichOneof("kind") == "error":
                    logger.warning("refilling %s: %s", self._control.address, result.error.message)
        with self._lock:
            for item in held:
                item.released_locally_at = now() + self._final + LOCAL_RELEASE_MARGIN
