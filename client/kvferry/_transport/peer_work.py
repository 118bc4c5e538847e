"""What one transfer reads from one peer, divided into chunks for the threads that post them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry._logs import Log
from kvferry._memory.access import StagingSpace
from kvferry._transport.nixl_agent import AgentInfo, ReadHandle
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.transfer import Transfer
from kvferry.errors import KvferryError, TransferFailed
from kvferry.planner.descriptors import Descriptors, chunks

logger = Log(__name__)

COPY_TIME = 10e-3
"""Seconds of a chunk, about, where its post copies it. After such a post the thread's code and data have to come from
memory again, which takes 0.3 ms."""

COPY_RATE = 8e9
DESCRIPTOR_TIME = 3e-6
"""Bytes per second of such a copy, and seconds for each descriptor (measured over CMA)."""

COPIED_CHUNKS = 4
"""The most bytes of such a chunk, in `NixlOptions.chunk_bytes`."""

SHARED_CHUNK = 1 << 20
"""The fewest bytes of a chunk where several threads share a transfer: a chunk costs some tens of microseconds of
Python."""

SHARED_CHUNKS = 4
"""The fewest chunks per thread where several threads share a transfer, so that the threads end together."""


class ChunkOwner(Protocol):
    """The owner of a chunk: a transfer, or one batch of a transfer in a staging slot. Thread-safe; calls return at
    once, callbacks included."""

    @property
    def ended_at(self) -> float | None:
        """When the owner ended, well or not; None while it goes on."""

    def begin(self) -> bool:
        """Announce a chunk that is about to be posted, and may write from now on. False: the owner has ended, post
        nothing."""

    def landed(self, size: int) -> None:
        """Record that a chunk was seen DONE: it writes no more."""

    def fenced(self) -> None:
        """Record that a chunk's agent was destroyed: the chunk writes no more, and its bytes may be anything."""

    def fail(self, error: KvferryError) -> None:
        """End the owner with an error. Chunks that are neither landed nor fenced may still write."""

    def settle(self, now: float) -> object:
        """Judge the deadline, and run due callbacks."""


def as_kvferry_error(error: Exception, failed: str) -> KvferryError:
    """An error as a transfer reports it: an error that is not kvferry's is logged, and becomes a `TransferFailed`."""
    if isinstance(error, KvferryError):
        return error
    logger.error("%s failed", failed, exc_info=error)
    return TransferFailed(f"{failed} failed: {error!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The descriptors of one NIXL handle, and their owner."""

    descriptors: Descriptors
    owner: ChunkOwner


@dataclass(slots=True, eq=False)
class PostedChunk:
    """A posted chunk that has not been seen DONE. `lost`: NIXL reported an error for the chunk. It may still write, and
    no later answer of NIXL disproves that."""

    handle: ReadHandle
    owner: ChunkOwner
    size: int
    lost: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FirstRead:
    """The owner of the first read from a peer, whose answer makes the link ready. The read counts as ended when its
    time-out is over."""

    ended_at: float
    answered: Callable[[], None]

    def begin(self) -> bool:
        return True

    def landed(self, size: int) -> None:
        self.answered()

    def fenced(self) -> None:
        pass

    def fail(self, error: KvferryError) -> None:
        pass

    def settle(self, now: float) -> None:
        pass


class PeerWork:
    """What one transfer reads from one peer. Where posts copy, several threads share a large read: each chunk goes to
    the thread that asks for it first.

    `since` is when the work began to wait for the peer's first answer; `copies`, whether posts to the peer copy;
    `threads`, the number of reading threads that take chunks. `blocked`: `next` returned None, but will have a chunk
    later; the thread is woken then.
    """

    blocked = False

    def __init__(
        self,
        owner: Transfer,
        info: AgentInfo,
        descriptors: Sequence[Descriptors],
        since: float,
        spaces: Sequence[StagingSpace] = (),
        *,
        copies: bool = False,
        threads: int = 1,
    ) -> None:
        self.owner = owner
        self.info = info
        self.since = since
        self.spaces = tuple(spaces)
        self._descriptors = descriptors
        self._copies = copies
        self._threads = threads
        self._lock = threading.Lock()
        self._chunks: deque[Descriptors] | None = None
        """The chunks that no thread has taken yet; None: not divided yet."""

    def step_back(self) -> None:
        """Let other work that waits for the same staging slots go first: `next` will not be called for now."""

    def next(self, options: NixlOptions) -> Chunk | None:
        """The next chunk, to be posted now; None if there is none for now, or none any more."""
        with self._lock:
            if self._chunks is None:
                # All chunks are made at once: between two copies of megabytes, each step takes ten times as long.
                self._chunks = deque(
                    chunk
                    for some in self._descriptors
                    for chunk in divide(some, options, copies=self._copies, threads=self._threads)
                )
            chunk = self._chunks.popleft() if self._chunks else None
        return None if chunk is None else Chunk(chunk, self.owner)


def divide(
    descriptors: Descriptors, options: NixlOptions, *, copies: bool = False, threads: int = 1
) -> Iterator[Descriptors]:
    """Descriptors in chunks that suit the transport, and small enough to keep this many threads busy."""
    if not descriptors.count:
        return
    total = descriptors.total_bytes
    mean = max(1, total // descriptors.count)
    if copies:
        most = min(COPIED_CHUNKS * options.chunk_bytes, int(COPY_TIME / (DESCRIPTOR_TIME / mean + 1 / COPY_RATE)))
    else:
        # Short descriptors cost by number, so a chunk limited by bytes only would hold up everything else.
        most = min(options.chunk_bytes, mean * options.chunk_descriptors)
    if threads > 1:
        most = min(most, max(SHARED_CHUNK, total // (SHARED_CHUNKS * threads)))
    yield from chunks(descriptors, most)
