"""The times of a read's stages and the work of its shares, for metrics only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShareWork:
    """The work of one rank's share of a read.

    Attributes:
        handshake: seconds of waiting for the handshake with a new source; 0: the source was known.
        plan: seconds of making descriptors of the request's blocks; 0: none were made.
        move: seconds from the start of the transfer until its last byte was seen; 0: no transfer was started. Of a
            progressive read: of its transfers together.
        steps: seconds of waiting for blocks of the source, after all published blocks were moved; 0 unless the read is
            progressive.
        pieces: number of contiguous ranges to read, before fusing and merging.
        descriptors: number of NIXL descriptors, after fusing and merging.
        staged_bytes: number of bytes that went through staging memory.
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
    """Seconds that the stages of a read took; of `handshake`, `plan`, `move` and `steps` (see `ShareWork`) the longest
    that a rank took. A stage that was not reached took 0.

    Attributes:
        wait: from the request until the home promised the blocks; mostly the time that the source still computes.
        grant: from there until all blocks were known; of a progressive read, until the first were.
        attach: from there until the engine attached blocks to read into.
        steps: of a progressive read, the part of the source's computation that moving did not hide.
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
    """When a read has reached its stages, on the loop's clock; 0: not yet. See `ReadTimes`, which are the times between
    them; it has `ended` with its last share."""

    __slots__ = ("accepted", "asked", "begun", "decided", "ended", "granted")

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.accepted = self.granted = self.begun = self.ended = self.decided = 0.0

    def times(self, shares: Collection[ShareWork]) -> ReadTimes:
        """Return the seconds between the stages, with the longest of the shares."""
        longest = {
            name: max((getattr(share, name) for share in shares), default=0.0)
            for name in ("handshake", "plan", "move", "steps")
        }
        return ReadTimes(
            wait=_between(self.asked, self.accepted),
            grant=_between(self.accepted, self.granted),
            attach=_between(self.granted, self.begun),
            judge=_between(self.ended, self.decided),
            **longest,
        )


def _between(begin: float, end: float) -> float:
    return max(0.0, end - begin) if begin and end else 0.0
