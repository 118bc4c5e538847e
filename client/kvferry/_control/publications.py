"""What a source has published and not yet heard released: numbers, held steps, and the one release of each (R2, R3).

Pure: no threads, no calls, no clock of its own. `EngineSession` makes the calls and says here how they ended.

    publish ──► sending ──(answered)──► held ──(released by the home | its final deadline has passed)──► released once
                   └──(refused, and no home can have taken it)──► never was
"""

from __future__ import annotations

import enum
import math
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvferry._wire.authority import publication_key
from kvferry._wire.reference import format_reference
from kvferry.errors import InternalError, KvferryError, Unreachable, WrongState
from kvferry.v1 import kv_transfer_pb2 as pb

LOCAL_RELEASE_MARGIN = 5.0
LOCAL_RELEASE_SHARE = 0.01
"""A publication whose home never came back is released at its final deadline, 5 s and 1 % later: the share is for
clocks of different rates, the seconds for a publish that was under way when its attempt was given up."""


class ReleaseOutcome(enum.IntEnum):
    """How a publication ended, numbered as in the proto."""

    READ = 1
    UNREAD = 2
    DECLINED = 3
    ABORTED = 4
    FINAL = 5


ReadEnding = Literal["waiting", "reading", "valid", "failed", "cancelled", "expired", "unknown"]
"""The state of a read at its home. Of a released publication: "valid", every rank read it in time; "failed", some did
not; "cancelled", its reader gave it up; "expired", its lease ran out; "unknown", a later version's."""


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """What the home of a publication knows of one of its reads.

    Attributes:
        reader: engine_id of the engine that read it.
        incarnation: which start of that engine.
        lease_number: of its lease; rising per home.
        state: how the read ended.
        parties: ranks that were expected to report.
        reported: distinct ranks that have reported.
        bytes: read by all ranks that have reported.
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
    reads: tuple[ReadSummary, ...] = ()
    local: bool = False

    def __str__(self) -> str:
        outcome = f"{self.outcome.name}, by time alone" if self.local else self.outcome.name
        told = "".join(f"; {read}" for read in self.reads)
        return f"publication {self.publication} of request {self.request_id!r}: {outcome}{told}"


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
    reference: str = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step of a publication on its way to the home: `EngineSession.offer` makes it, `EngineSession.send` takes it."""

    message: pb.Publish = field(repr=False)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is held, for a home that has lost its record of it.

    Attributes:
        publications: numbers of what is told.
        notifications: what to tell, in this order; made while they are taken, once, since copying them all takes long.
        end: what to tell when all of them were taken.
    """

    publications: tuple[int, ...]
    notifications: Iterator[pb.Notification]
    end: pb.Notification


@dataclass(slots=True)
class _Held:
    """A publication that is not released yet, with all that a restarted home needs.

    Attributes:
        open_steps: steps that a home may have taken without this source knowing.
        sending: calls under way that may make a home take it anew, so that its final deadline is not known.
        release_at: when no home can hold a lease on it any more; counts while nothing is being sent.
    """

    publication: Publication
    steps: list[pb.Publish]
    open_steps: set[int] = field(default_factory=set)
    aborted: bool = False
    sending: int = 0
    release_at: float = math.inf


def leaves_open(error: KvferryError) -> bool:
    """Whether a home may have done what it was asked, although the call ended with this error."""
    return not error.reason or isinstance(error, (Unreachable, InternalError))


class Offers:
    """The publications of one incarnation that are not released. Not thread-safe.

    Args:
        engine: the incarnation.
        session_secret: its secret; the keys of references are derived from it.

    Attributes:
        final: seconds from a publish until no home holds a lease on it; as the home says.
    """

    def __init__(self, engine: pb.EngineRef, session_secret: bytes) -> None:
        self.final = math.inf
        self._engine = engine
        self._secret = session_secret
        self._next = 1
        self._held: dict[int, _Held] = {}
        self._released: deque[Release] = deque()
        self._next_deadline = math.inf
        """At most the earliest time at which something is to be released, so that `advance`, which engines call in each
        step, need not look at everything that is held."""

    def publish(self, home: str, step: pb.Publish) -> Publication:
        """Take a request's first step; gives it its number. To be sent; then `sent`.

        Args:
            home: address of the home, for the reference.
            step: without a number.
        """
        step.publication, self._next = self._next, self._next + 1
        reference = pb.Reference(
            home=home,
            engine_id=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            publication=step.publication,
            request_id=step.request_id,
            key=publication_key(self._secret, step.publication),
        )
        publication = Publication(step.publication, step.request_id, format_reference(reference))
        self._held[publication.number] = _Held(publication, [step], sending=1)
        return publication

    def publish_more(self, number: int, step: pb.Publish) -> None:
        """Take the next step of a publication; says in it which it is. To be sent; then `sent`.

        Raises:
            WrongState: the publication is complete, or released.
        """
        held = self._held.get(number)
        if held is None or held.steps[-1].last:
            state = "was released" if held is None else "is complete, since its last step was published"
            raise WrongState(
                f"publication {number} {state}, and takes no more blocks: publish the request again",
                publication=number,
            )
        first = held.steps[0]
        step.publication, step.request_id = number, first.request_id
        step.step = len(held.steps)
        held.steps.append(step)
        held.sending += 1

    def unanswered(self, step: pb.Publish) -> None:
        """An attempt to send the step ended without an answer: whether the home took it is open."""
        held = self._held.get(step.publication)
        if held is not None:
            held.open_steps.add(step.step)

    def refused(self, step: pb.Publish) -> bool:
        """The home refused the step for good.

        Returns:
            Whether it never was, so that nobody can have read it. Else another attempt, or another start of the home,
            may have taken it: it stays pinned until its publication is released.
        """
        held = self._held.get(step.publication)
        if held is None or step.step in held.open_steps:
            return False
        held.steps.remove(step)
        if not held.steps:
            del self._held[step.publication]
        return True

    def sent(self, number: int, now: float) -> None:
        """All attempts to send a step have ended, whichever way: its final deadline is known."""
        held = self._held.get(number)
        if held is not None:
            held.sending -= 1
            held.release_at = now + self.final * (1 + LOCAL_RELEASE_SHARE) + LOCAL_RELEASE_MARGIN
            self._next_deadline = min(self._next_deadline, held.release_at)

    def abort(self, number: int) -> None:
        """The source takes a publication back. A home that forgot is told so again."""
        held = self._held.get(number)
        if held is not None:
            held.aborted = True

    def snapshot(self) -> Snapshot:
        """Tell all that is held to a home that has lost its record. To be sent; then `snapshot_sent`."""
        held_now: list[tuple[int, bool, tuple[pb.Publish, ...]]] = []
        for number, held in self._held.items():
            held.sending += 1
            # Steps are not changed once they are held, so these are no copies.
            held_now.append((number, held.aborted, tuple(held.steps)))
            if not held.aborted:
                held.open_steps.update(step.step for step in held.steps)
        name = secrets.token_bytes(8)
        begin, end = (
            pb.Notification(resync=pb.Resync(phase=phase, high_water=self._next - 1, snapshot=name))
            for phase in (pb.RESYNC_PHASE_BEGIN, pb.RESYNC_PHASE_END)
        )
        return Snapshot(tuple(self._held), _told(begin, held_now), end)

    def snapshot_sent(self, snapshot: Snapshot, now: float) -> None:
        """The snapshot was told, or the attempt was given up."""
        for number in snapshot.publications:
            self.sent(number, now)

    def released(self, message: pb.Released) -> None:
        """The home says that a publication is released. The second of two releases finds nothing."""
        try:
            outcome = ReleaseOutcome(message.outcome)
        except ValueError:
            # A home of a later version may know outcomes that this one does not; the blocks are free all the same.
            outcome = ReleaseOutcome.FINAL
        self._release(message.publication, outcome, tuple(map(_summary, message.reads)))

    def advance(self, now: float) -> None:
        """Release what no home can hold a lease on any more (PROTOCOL, Endings)."""
        if now < self._next_deadline:
            return
        for number in [number for number, held in self._held.items() if not held.sending and held.release_at <= now]:
            self._release(number, ReleaseOutcome.FINAL, local=True)
        waiting = (held.release_at for held in self._held.values() if not held.sending)
        self._next_deadline = min(waiting, default=math.inf)

    def next_deadline(self) -> float:
        """`advance` releases nothing before."""
        return self._next_deadline

    def take_released(self) -> list[Release]:
        """What was released since the last call; each publication exactly once (R3)."""
        found = list(self._released)
        self._released.clear()
        return found

    @property
    def news(self) -> bool:
        """Whether `take_released` would give something."""
        return bool(self._released)

    def unreleased(self) -> Sequence[Publication]:
        """Publications whose blocks are still pinned."""
        return tuple(held.publication for held in self._held.values())

    def _release(
        self, number: int, outcome: ReleaseOutcome, reads: tuple[ReadSummary, ...] = (), *, local: bool = False
    ) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self._released.append(Release(number, held.publication.request_id, outcome, reads, local))


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


def _told(begin: pb.Notification, held: list[tuple[int, bool, tuple[pb.Publish, ...]]]) -> Iterator[pb.Notification]:
    yield begin
    for number, aborted, steps in held:
        if aborted:
            yield pb.Notification(abort=pb.Abort(publication=number))
        else:
            yield from (pb.Notification(publish=step) for step in steps)
