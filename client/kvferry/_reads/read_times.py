"""How long the stages of a read took, and how much work its shares were: for metrics. Nothing decides by these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShareWork:
    """The work of one rank's share of a read.

    Attributes:
        handshake: seconds that it waited for the handshake with a new source; 0: the source was known.
        plan: seconds in which its descriptors were made of the request's blocks; 0: they were not.
        move: seconds from the start of its transfer until its last byte was seen; 0: nothing was transferred. Of a
            progressive read: of its transfers together.
        steps: seconds that it waited for blocks of the source, with all moved that was published; 0 unless the read is
            progressive.
        pieces: number of contiguous ranges to read, before fusing and merging.
        descriptors: number of NIXL descriptors, after fusing and merging.
        staged_bytes: number of its bytes that went through staging memory.
        verified, unverified: see `Verification`; 0 if integrity mode is off.
    """

    handshake: float = 0.0
    move: float = 0.0
    descriptors: int = 0
    staged_bytes: int = 0
    verified: int = 0
    unverified: int = 0
    plan: float = 0.0
    pieces: int = 0
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Seconds that the stages of a read took. A stage that it has not reached took 0.

    Attributes:
        wait: from the request until the home promised the blocks; mostly the time that the source still computes.
        grant: from there until all blocks were known; of a progressive read, until the first were.
        attach: from there until the engine gave it blocks to read into.
        handshake: the longest that a rank waited for the handshake with a new source.
        plan: the longest that a rank made descriptors.
        move: the longest that a rank's bytes moved.
        steps: the longest that a rank waited for its source, with all moved that was published: of a progressive read,
            the part of the source's computation that moving did not hide.
        judge: from the end of the last share until the home's verdict.
    """

    wait: float = 0.0
    grant: float = 0.0
    attach: float = 0.0
    handshake: float = 0.0
    move: float = 0.0
    judge: float = 0.0
    plan: float = 0.0
    steps: float = 0.0


class Stamps:
    """When a read has reached its stages, on its loop's clock; 0: it has not.

    Attributes:
        asked, accepted, granted, begun, ended, decided: its lease was asked for; the home promised the blocks; all
            blocks were known, or the first of a progressive read; it had blocks to read into; its last share ended;
            the verdict came.
    """

    __slots__ = ("accepted", "asked", "begun", "decided", "ended", "granted")

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.accepted = self.granted = self.begun = self.ended = self.decided = 0.0

    def times(self, shares: Collection[ShareWork]) -> ReadTimes:
        """Return the seconds between the stages, with the longest of the shares."""
        return ReadTimes(
            wait=_between(self.asked, self.accepted),
            grant=_between(self.accepted, self.granted),
            attach=_between(self.granted, self.begun),
            handshake=max((share.handshake for share in shares), default=0.0),
            move=max((share.move for share in shares), default=0.0),
            judge=_between(self.ended, self.decided),
            plan=max((share.plan for share in shares), default=0.0),
            steps=max((share.steps for share in shares), default=0.0),
        )


def _between(begin: float, end: float) -> float:
    return max(0.0, end - begin) if begin and end else 0.0
