"""What one transfer reads from one peer, given out chunk by chunk to the thread that posts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry._memory.access import StagingSpace
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.nixl_options import NixlOptions
from kvferry.errors import KvferryError
from kvferry.planner.descriptors import Descriptors, chunks
from kvferry.planner.footprint import Footprint


class ChunkOwner(Protocol):
    """What a chunk belongs to: a transfer, or one batch of it in a staging slot. Thread-safe; its calls return at once,
    callbacks included."""

    @property
    def label(self) -> str:
        """For messages."""

    @property
    def deadline(self) -> float | None:
        """When it ends by itself; None if it does not."""

    @property
    def ended_at(self) -> float | None:
        """When it ended, well or not; None while it goes on."""

    def begin(self) -> bool:
        """A chunk is about to be posted, and may write from now on. False: the owner has ended, post nothing."""

    def landed(self, size: int) -> None:
        """A chunk was seen DONE: it writes no more."""

    def fenced(self) -> None:
        """The agent of a chunk was destroyed: the chunk writes no more, and its bytes may be anything."""

    def fail(self, error: KvferryError) -> None:
        """End it with an error. Chunks that are neither landed nor fenced may still write."""

    def settle(self, now: float) -> None:
        """Judge the deadline, and run callbacks that are due."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What one NIXL handle reads, and for whom."""

    descriptors: Descriptors
    owner: ChunkOwner


class PeerWork:
    """What one transfer reads from one peer.

    Attributes:
        owner: the transfer.
        info: the peer.
        since: when it began to wait for the peer's first answer.
        spaces: staging memory that it is read into, beside the rank's own memory.
        footprint: the blocks that may be touched, checked chunk by chunk; None: that was checked before.
    """

    def __init__(
        self,
        owner: ChunkOwner,
        info: AgentInfo,
        descriptors: Sequence[Descriptors],
        since: float,
        spaces: Sequence[StagingSpace] = (),
        footprint: Footprint | None = None,
    ) -> None:
        self.owner = owner
        self.info = info
        self.since = since
        self.spaces = tuple(spaces)
        self._footprint = footprint
        self._descriptors = descriptors
        self._chunks: Iterator[Descriptors] | None = None

    @property
    def blocked(self) -> bool:
        """`next` returned None, but will have a chunk later; the thread is woken then."""
        return False

    def step_back(self) -> None:
        """`next` will not be called for now: other work that waits for the same staging slots goes first."""

    def next(self, options: NixlOptions) -> Chunk | None:
        """The next chunk, to be posted now; None if there is none, at least for now."""
        if self._chunks is None:
            self._chunks = self._divided(options)
        chunk = next(self._chunks, None)
        return None if chunk is None else Chunk(chunk, self.owner)

    def _divided(self, options: NixlOptions) -> Iterator[Descriptors]:
        for descriptors in self._descriptors:
            for chunk in divide(descriptors, options):
                if self._footprint is not None:
                    self._footprint.check(chunk)
                yield chunk


def divide(descriptors: Descriptors, options: NixlOptions) -> Iterator[Descriptors]:
    """Descriptors in chunks that suit the transport."""
    if descriptors.count:
        # Short descriptors cost by number, so that a chunk of a given size would hold up everything else.
        mean = max(1, descriptors.total_bytes // descriptors.count)
        yield from chunks(descriptors, min(options.chunk_bytes, mean * options.chunk_descriptors))
