"""What one transfer reads from one peer, given out chunk by chunk to the thread that posts it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry._logs import Log
from kvferry._memory.access import StagingSpace
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.nixl_options import NixlOptions
from kvferry.errors import KvferryError, TransferFailed
from kvferry.planner.descriptors import Descriptors, chunks
from kvferry.planner.footprint import Footprint

logger = Log(__name__)

COPY_TIME = 10e-3
"""Seconds that a chunk takes, about, where its post copies it. After such a post the thread's code and data have to
come from memory again, which takes 0.3 ms."""

COPY_RATE = 8e9
DESCRIPTOR_TIME = 3e-6
"""Bytes per second of such a copy, and seconds for each descriptor (measured over CMA)."""

COPIED_CHUNKS = 4
"""How many times `NixlOptions.chunk_bytes` such a chunk has at most."""

SHARED_CHUNK = 1 << 20
"""Bytes of a chunk, at least, where several threads share a transfer: each is some tens of microseconds of Python."""

SHARED_CHUNKS = 4
"""Chunks per thread, at least, where several threads share a transfer, so that they end together."""


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


def as_kvferry_error(error: Exception, failed: str) -> KvferryError:
    """Return an error as a transfer reports it: any but kvferry's own is logged, and becomes a `TransferFailed`."""
    if isinstance(error, KvferryError):
        return error
    logger.error("%s failed", failed, exc_info=error)
    return TransferFailed(f"{failed} failed: {error!r}")


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
        copies: whether posts to the peer copy.
        threads: how many reading threads take chunks of it, each with work of its own (`shared`).
        blocked: `next` returned None, but will have a chunk later; the thread is woken then.
    """

    blocked = False

    def __init__(
        self,
        owner: ChunkOwner,
        info: AgentInfo,
        descriptors: Sequence[Descriptors],
        since: float,
        spaces: Sequence[StagingSpace] = (),
        footprint: Footprint | None = None,
        *,
        copies: bool = False,
        threads: int = 1,
    ) -> None:
        self.owner = owner
        self.info = info
        self.since = since
        self.spaces = tuple(spaces)
        self._undivided = _Undivided(descriptors, footprint, copies, threads)

    def shared(self) -> PeerWork:
        """Work of the same transfer for another thread: each chunk goes to the thread that asks for it first."""
        work = PeerWork(self.owner, self.info, (), self.since, self.spaces)
        work._undivided = self._undivided
        return work

    def step_back(self) -> None:
        """`next` will not be called for now: other work that waits for the same staging slots goes first."""

    def next(self, options: NixlOptions) -> Chunk | None:
        """The next chunk, to be posted now; None if there is none, at least for now."""
        chunk = self._undivided.next(options)
        return None if chunk is None else Chunk(chunk, self.owner)


@dataclass(slots=True)
class _Undivided:
    """What has not been given out yet of a transfer's descriptors at one peer. Thread-safe."""

    _descriptors: Sequence[Descriptors]
    _footprint: Footprint | None
    _copies: bool
    _threads: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _chunks: deque[Descriptors] | None = None

    def next(self, options: NixlOptions) -> Descriptors | None:
        """The next chunk; None: all were given out."""
        with self._lock:
            if self._chunks is None:
                # All at once: between two copies of megabytes, each step takes ten times as long.
                self._chunks = deque(
                    chunk
                    for some in self._descriptors
                    for chunk in divide(some, options, copies=self._copies, threads=self._threads)
                )
            chunk = self._chunks.popleft() if self._chunks else None
        if chunk is not None and self._footprint is not None:
            self._footprint.check(chunk)
        return chunk


def divide(
    descriptors: Descriptors, options: NixlOptions, *, copies: bool = False, threads: int = 1
) -> Iterator[Descriptors]:
    """Descriptors in chunks that suit the transport, and are small enough to keep so many threads busy."""
    if not descriptors.count:
        return
    total = descriptors.total_bytes
    mean = max(1, total // descriptors.count)
    if copies:
        most = min(COPIED_CHUNKS * options.chunk_bytes, int(COPY_TIME / (DESCRIPTOR_TIME / mean + 1 / COPY_RATE)))
    else:
        # Short descriptors cost by number, so that a chunk of a given size would hold up everything else.
        most = min(options.chunk_bytes, mean * options.chunk_descriptors)
    if threads > 1:
        most = min(most, max(SHARED_CHUNK, total // (SHARED_CHUNKS * threads)))
    yield from chunks(descriptors, most)
