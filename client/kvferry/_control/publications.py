"""A source's publications that are not released yet: their numbers and steps, and the one release of each (R2, R3).

Pure: no threads, no RPCs, no clock of its own. `HomeSession` makes the calls and records here how they ended.

    publish ──► sending ──(answered | given up)──► held ──(released by the home | its final deadline)──► released once
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvferry._control.right_prompt import Marker
from kvferry._logs import Log
from kvferry._prompt import Prompt
from kvferry._wire.authority import PublicationKeys
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry._wire.publication import hint_of
from kvferry._wire.reference import MAX_REFERENCE_MARKS, add_hint, format_reference
from kvferry.errors import InvalidField, RouterKeyUsed, WrongState
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

LOCAL_RELEASE_MARGIN = 5.0
LOCAL_RELEASE_SHARE = 0.01
"""A publication whose home never came back is released 5 s and 1 % of `final` after its final deadline. The share
allows for clocks of different rates, the seconds for a publish that was in progress when its attempt was given up."""


ReadEnding = Literal["waiting", "reading", "valid", "failed", "cancelled", "expired", "unknown"]
"""The state of a read at its home. "valid": every rank has read it in time; "failed": some rank has not; "cancelled":
its reader cancelled it; "expired": its lease expired; "unknown": a state of a later version."""


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """Summarises one read of a publication, as its home recorded it.

    Attributes:
        reader, incarnation: engine_id and incarnation of the reader.
        lease_number: number of its lease; rising per home.
        state: how the read ended.
        parties, reported: number of ranks that were expected to report, and that have reported.
        bytes: bytes read by the ranks that have reported.
    """

    reader: str
    incarnation: bytes = field(repr=False)
    lease_number: int
    state: ReadEnding
    parties: int
    reported: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.state} by {self.reader!r} ({self.reported} of {self.parties} ranks, {self.bytes} bytes)"


@dataclass(frozen=True, slots=True)
class Release:
    """Allows the source to change and free the blocks of a publication.

    Attributes:
        publication: number of the publication.
        request_id: the source's name for the request.
        outcome: how the publication ended.
        reads: the reads of the publication; empty if `local`.
        local: released without the home, which did not come back before the final deadline.
    """

    publication: int
    request_id: str
    outcome: ReleaseOutcome
    reads: tuple[ReadSummary, ...] = ()
    local: bool = False

    def __str__(self) -> str:
        outcome = f"{self.outcome.name}, without the home" if self.local else self.outcome.name
        reads = "".join(f"; {read}" for read in self.reads)
        return f"publication {self.publication} of request {self.request_id!r}: {outcome}{reads}"


@dataclass(frozen=True, slots=True)
class Publication:
    """A request's blocks, published to readers.

    Attributes:
        number: number of the publication; rising per incarnation.
        request_id: the source's name for the request.
        reference: the string for the router. A capability.
        traceparent: the W3C traceparent for the router, beside the reference; empty: the request is not traced.
    """

    number: int
    request_id: str
    reference: str = field(repr=False)
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All publications that are not released, for a home that has lost its record of them.

    `publications` are their numbers. The `notifications` are sent in this order, and then the `end`; they are made
    while they are consumed, once, because copying all of them takes long.
    """

    publications: tuple[int, ...]
    notifications: Iterator[pb.Notification]
    end: pb.Notification


@dataclass(slots=True)
class _Held:
    """A publication that is not released yet, with all that a restarted home needs.

    Attributes:
        ends: one past the last token of each group.
        sending: number of calls in progress with which a home may accept the publication; its final deadline is unknown
            until they have ended.
        release_at: time after which no home can hold a lease on the publication; valid while `sending` is 0.
    """

    publication: Publication
    steps: list[pb.Publish]
    marker: Marker
    ends: dict[str, int]
    abort: pb.Abort | None = None
    sending: int = 0
    release_at: float = math.inf


class Offers:
    """The publications of one incarnation that are not released. Not thread-safe. Counts those `published` and, by
    outcome, those released. `final` is the home's setting: the seconds from a publish until no home can hold a lease on
    the publication."""

    def __init__(self, engine: pb.EngineRef, session_secret: bytes, *, hints: bool = True) -> None:
        self._hints = hints
        self.final = math.inf
        self.published = 0
        self.outcomes: Counter[str] = Counter()
        self._engine = engine
        self._keys = PublicationKeys(session_secret)
        self._next = 1
        self._held: dict[int, _Held] = {}
        self._by_router_key: dict[str, int] = {}
        """Numbers of the publications under keys of routers."""
        self._released: deque[Release] = deque()
        self.next_deadline = math.inf
        """No later than the earliest `release_at`, so that `advance`, which engines call in each step, rarely has to
        search all publications."""

    def publish(
        self, home: str, step: pb.Publish, traceparent: str = "", prompt: Prompt = Prompt.unknown
    ) -> Publication:
        """Add a publication with its first step, whose number and marks are set here. Send the step, then call `sent`.
        Without the address of a `home` in the reference, readers ask their directory. Raises `RouterKeyUsed` if another
        publication that is not released has the step's router_key."""
        if (other := self._by_router_key.get(step.router_key)) is not None:
            raise RouterKeyUsed(
                f"publication {other} has the same router key {step.router_key!r}, and is not released: the router "
                "must draw a new reference for every request and every attempt",
                engine_id=self._engine.engine_id,
                publication=other,
            )
        step.publication, self._next = self._next, self._next + 1
        key = self._keys.key(step.publication)
        reference = pb.Reference(
            home=home,
            engine_id=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            publication=step.publication,
            request_id=step.request_id,
            key=key,
        )
        marker = Marker(key, prompt)
        marker.mark(step)
        if len(step.marks) <= MAX_REFERENCE_MARKS:
            reference.marks.extend(step.marks)
        # Readers that compare sums need a lease, and a router's reference has no room for blocks.
        if self._hints and step.last and not step.checksums and not step.router_key:
            step.hint_digest = add_hint(reference, hint_of(step))
        publication = Publication(step.publication, step.request_id, format_reference(reference), traceparent)
        self._held[publication.number] = _Held(publication, [step], marker, _ends(step), sending=1)
        if step.router_key:
            self._by_router_key[step.router_key] = step.publication
        logger.debug("published: request_id=%r publication=%d", step.request_id, publication.number)
        self.published += 1
        return publication

    def unfinished(self, number: int) -> Sequence[pb.GroupBlocks]:
        """Return the blocks of which the last steps of a publication named some layers, if any. Raises `WrongState` if
        the publication is complete, or was released."""
        for step in reversed(self._incomplete(number).steps):
            if step.groups or step.unfinished.groups:
                return step.unfinished.groups
        return ()

    def publish_more(self, number: int, step: pb.Publish, prompt: Prompt = Prompt.unknown) -> None:
        """Add the next step of a publication, and set its numbers and marks. Send the step, then call `sent`. Raises
        `WrongState` if the publication is complete, or was released, and `InvalidField` if the prompt, or the tokens of
        a group, do not continue the publication's."""
        held = self._incomplete(number)
        for group in step.groups:
            end = held.ends.get(group.group, group.first_token)
            if group.first_token != end:
                expected = f"{end}, where the step before ended"
                raise InvalidField(f"first token of blocks[{group.group!r}]", group.first_token, expected)
        held.marker.follow(prompt)
        held.marker.mark(step, held.steps)
        first = held.steps[0]
        step.publication, step.request_id = number, first.request_id
        step.step = len(held.steps)
        held.steps.append(step)
        held.ends.update(_ends(step))
        held.sending += 1

    def as_of_now(self, told: pb.Notification) -> pb.Notification:
        """Return a step or an abort to send: instead of a step of a publication that was released meanwhile, the
        publication's abort. A home that has restarted would offer the step again, with blocks that have changed."""
        if told.HasField("publish") and told.publish.publication not in self._held:
            return pb.Notification(abort=pb.Abort(publication=told.publish.publication))
        return told

    def sent(self, number: int, now: float) -> None:
        """Record that all attempts to send a step have ended: the publication's final deadline is known now."""
        held = self._held.get(number)
        if held is not None:
            held.sending -= 1
            held.release_at = now + self.final * (1 + LOCAL_RELEASE_SHARE) + LOCAL_RELEASE_MARGIN
            self.next_deadline = min(self.next_deadline, held.release_at)

    def abort(self, number: int, *, not_published: bool = False) -> None:
        """Mark a publication as withdrawn, also for snapshots. `not_published`: the engine did not withdraw it."""
        held = self._held.get(number)
        if held is not None and held.abort is None:
            held.abort = pb.Abort(publication=number, not_published=not_published)

    def snapshot(self) -> Snapshot:
        """Make a snapshot for a home that has lost its record. Send it, then call `snapshot_sent`."""
        held_now: list[tuple[pb.Abort | None, tuple[pb.Publish, ...]]] = []
        for held in self._held.values():
            held.sending += 1
            # Steps are not changed once they are held, so these are no copies.
            held_now.append((held.abort, tuple(held.steps)))
        name = secrets.token_bytes(8)
        begin, end = (
            pb.Notification(resync=pb.Resync(phase=phase, high_water=self._next - 1, snapshot=name))
            for phase in (pb.RESYNC_PHASE_BEGIN, pb.RESYNC_PHASE_END)
        )

        def notifications() -> Iterator[pb.Notification]:
            yield begin
            for abort, steps in held_now:
                if abort is not None:
                    yield pb.Notification(abort=abort)
                else:
                    yield from (pb.Notification(publish=step) for step in steps)

        return Snapshot(tuple(self._held), notifications(), end)

    def snapshot_sent(self, snapshot: Snapshot, now: float) -> None:
        """Record that the attempt to send a snapshot has ended, with or without success."""
        for number in snapshot.publications:
            self.sent(number, now)

    def released(self, message: pb.Released) -> None:
        """Release a publication on the home's message. Does nothing if the publication is released already."""
        try:
            outcome = ReleaseOutcome(message.outcome)
        except ValueError:
            # A home of a later version may send an unknown outcome; the blocks are released all the same.
            outcome = ReleaseOutcome.FINAL
        self._release(message.publication, outcome, tuple(map(_summary, message.reads)))

    def advance(self, now: float) -> None:
        """Release the publications on which no home can hold a lease any more (PROTOCOL, Endings)."""
        if now < self.next_deadline:
            return
        for number in [number for number, held in self._held.items() if not held.sending and held.release_at <= now]:
            self._release(number, ReleaseOutcome.FINAL, local=True)
        waiting = (held.release_at for held in self._held.values() if not held.sending)
        self.next_deadline = min(waiting, default=math.inf)

    def take_released(self, most: int | None = None) -> list[Release]:
        """Return the publications released since the last call, `most` of them; each exactly once (R3)."""
        waiting = len(self._released)
        return [self._released.popleft() for _ in range(waiting if most is None else min(most, waiting))]

    def unreleased(self) -> Sequence[Publication]:
        """Return the publications whose blocks are still pinned. May be called on any thread."""
        return tuple(held.publication for held in list(self._held.values()))

    def _incomplete(self, number: int) -> _Held:
        held = self._held.get(number)
        if held is None or held.steps[-1].last:
            state = "was released" if held is None else "is complete, since its last step was published"
            raise WrongState(
                f"publication {number} {state}, and takes no more blocks: publish the request again",
                publication=number,
            )
        return held

    def _release(
        self, number: int, outcome: ReleaseOutcome, reads: tuple[ReadSummary, ...] = (), *, local: bool = False
    ) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self._by_router_key.pop(held.steps[0].router_key, None)
            self.outcomes[outcome.name.lower()] += 1
            self._released.append(Release(number, held.publication.request_id, outcome, reads, local))
            expected = outcome in (ReleaseOutcome.READ, ReleaseOutcome.DECLINED)
            logger.log(
                logging.DEBUG if expected else logging.INFO,
                "released: request_id=%r publication=%d engine_id=%r outcome=%s reads=%d%s",
                held.publication.request_id,
                number,
                self._engine.engine_id,
                outcome.name,
                len(reads),
                ", by the engine itself: its home was not heard" if local else "",
            )


_STATES: dict[int, ReadEnding] = {
    pb.READ_STATE_WAITING: "waiting",
    pb.READ_STATE_READING: "reading",
    pb.READ_STATE_VALID: "valid",
    pb.READ_STATE_FAILED: "failed",
    pb.READ_STATE_CANCELLED: "cancelled",
    pb.READ_STATE_EXPIRED: "expired",
}


def _summary(message: pb.ReadSummary) -> ReadSummary:
    return ReadSummary(
        reader=message.reader.engine_id,
        incarnation=message.reader.incarnation,
        lease_number=message.lease_number,
        state=_STATES.get(message.state, "unknown"),
        parties=message.parties,
        reported=message.reported,
        bytes=message.bytes,
    )


def _ends(step: pb.Publish) -> dict[str, int]:
    return {group.group: group.end_token for group in step.groups}
