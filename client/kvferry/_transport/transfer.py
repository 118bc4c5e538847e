"""Transfers, from the first chunk until nothing can write to the destination any more, and their work in chunks.

A `Transfer` is one rank's share of a read. It goes PENDING → MOVING → DONE, FAILED, CANCELLED or EXPIRED. Beside the
state there is `quiet`: the transfer has ended and nothing can write to its destination any more. A transfer that has
ended and is not quiet is UNCERTAIN; when it becomes quiet it is QUIESCED, and only then may its blocks be used again
(R4). Bytes that arrive after the end change no state. `PeerWork` is what a transfer reads from one peer.

Threading: everything may be called from any thread. Only `wait` and `wait_quiet` wait, and nothing waits for NIXL
(R11), which only the threads of `kvferry._transport.reading_thread` call.
"""

from __future__ import annotations

import copy
import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from kvferry._logs import Log
from kvferry._memory.access import StagingSpace
from kvferry._threads import guarded
from kvferry._transport.nixl_agent import AgentInfo, ReadHandle
from kvferry._transport.nixl_options import NixlOptions
from kvferry.errors import KvferryError, TransferCancelled, TransferError, TransferExpired, TransferFailed
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


class TransferState(enum.Enum):
    """The state of a transfer. The last four are final."""

    PENDING = "pending"
    """Nothing was posted yet."""
    MOVING = "moving"
    DONE = "done"
    """Every byte arrived before the deadline."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """The deadline passed before the last chunk ended; the bytes do not count (R1)."""

    @property
    def final(self) -> bool:
        return self not in (TransferState.PENDING, TransferState.MOVING)


class Transfer:
    """One rank's share of a read. Made by `Transport.start`.

    Callbacks run on a thread of the transport or, if their event has happened already, at once on the caller's thread.
    They must not block; their exceptions are logged.

    Attributes, which only the transfer changes; times are on `kvferry._clock`:
        error: None while the transfer goes on and when DONE. A `TransferError`'s `quiet` is kept current.
        deadline: until when bytes count; None: without a limit.
        ended_at: when the transfer ended: for DONE, after the last chunk was seen.
        bytes_done, chunks: what was seen DONE so far.
        chunks_in_flight: chunks that may write: posted, and neither seen DONE nor fenced.
    """

    def __init__(
        self,
        label: str,
        bytes_total: int,
        deadline: float | None,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.label = label
        self.bytes_total = bytes_total
        self.deadline = deadline
        self._clock = clock
        self._wake = wake
        self._changed = threading.Condition()
        self.state = TransferState.PENDING
        self.error: KvferryError | None = None
        self._told: list[TransferError] = []
        self.ended_at: float | None = None
        self.bytes_done = self.chunks = self.chunks_in_flight = 0
        self._callbacks: list[tuple[bool, Callable[[Transfer], None]]] = []
        """Callbacks that have not run, each with whether it waits for quiet."""
        with self._changed:
            if bytes_total == 0:
                self._end(TransferState.DONE, None)

    @property
    def quiet(self) -> bool:
        """Whether the transfer has ended and nothing can write to its destination any more."""
        return self.state.final and self.chunks_in_flight == 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the transfer's end. Returns whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self.state.final, timeout)

    def wait_quiet(self, timeout: float | None = None) -> bool:
        """Wait until the destination may be used again. Returns whether it may."""
        with self._changed:
            return self._changed.wait_for(lambda: self.quiet, timeout)

    def cancel(self) -> bool:
        """End the transfer, and post nothing more; an ended transfer stays as it is. Returns at once whether the
        transfer is quiet already: NIXL cannot stop a posted read."""
        with self._changed:
            if not self.state.final:
                self._end(TransferState.CANCELLED, TransferCancelled(f"transfer {self.label!r} was cancelled"))
            quiet = self.quiet
        self._wake()
        return quiet

    def tell(self, error: TransferError) -> None:
        """Keep `error.quiet` current, for a caller that ends the read with its own error."""
        with self._changed:
            self._told.append(error)
            self._quiesce()

    def extend(self, deadline: float) -> None:
        """Move the deadline forward, because the lease was renewed. A passed deadline stays passed."""
        with self._changed:
            if self.deadline is not None and not self.state.final and self._clock() < self.deadline:
                self.deadline = max(self.deadline, deadline)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback(transfer)` when the transfer has ended."""
        with self._changed:
            self._callbacks.append((False, callback))
        self._run_due()

    def add_quiet_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback(transfer)` when the transfer has ended and is quiet."""
        with self._changed:
            self._callbacks.append((True, callback))
        self._run_due()

    # The reading threads call the following methods: see `ChunkOwner`.

    def goes_on(self) -> bool:
        """Announce a chunk that will be read into a staging slot. False: the transfer has ended, post nothing."""
        with self._changed:
            self._judge(self._clock())
            if self.state.final:
                return False
            self.state = TransferState.MOVING
            return True

    def begin(self) -> bool:
        with self._changed:
            begins = self.goes_on()
            self.chunks_in_flight += begins
            return begins

    def landed(self, size: int) -> None:
        with self._changed:
            self.chunks_in_flight -= 1
            self.chunks += 1
            self.bytes_done += size
            if self.bytes_done == self.bytes_total:
                # The clock is read after the last chunk was seen, so a pause in between counts against the read (R1).
                self._judge(self._clock())
                if not self.state.final:
                    self._end(TransferState.DONE, None)
            self._quiesce()
        self._run_due()

    def fenced(self) -> None:
        with self._changed:
            self.chunks_in_flight -= 1
            self._quiesce()
        self._run_due()

    def fail(self, error: KvferryError) -> None:
        """End the transfer with a copy of an error, which other transfers may share."""
        with self._changed:
            if not self.state.final:
                own = copy.copy(error)
                own.values = {**own.values, "transfer": self.label}
                self._end(TransferState.FAILED, own)
        self._run_due()

    def settle(self, now: float) -> bool:
        """Judge the deadline, and run due callbacks. Returns whether the transfer had ended by then, so that they have
        run: whoever drops its work must not miss an end that comes a moment later."""
        with self._changed:
            self._judge(now)
            ended = self.state.final
        self._run_due()
        return ended

    def _judge(self, now: float) -> None:
        if not self.state.final and self.deadline is not None and now >= self.deadline:
            message = f"transfer {self.label!r}: its lease ended before its last byte arrived"
            self._end(TransferState.EXPIRED, TransferExpired(message))

    def _end(self, state: TransferState, error: KvferryError | None) -> None:
        self.state, self.error = state, error
        self.ended_at = self._clock()
        self._quiesce()
        self._changed.notify_all()

    def _quiesce(self) -> None:
        own = [self.error] if isinstance(self.error, TransferError) else []
        for error in (*own, *self._told):
            error.quiet = self.quiet
        if self.quiet:
            self._changed.notify_all()

    def _run_due(self) -> None:
        with self._changed:
            if not self.state.final:
                return
            quiet = self.quiet
            due = [callback for waits, callback in self._callbacks if not waits]
            due += [callback for waits, callback in self._callbacks if waits and quiet]
            self._callbacks = [] if quiet else [(waits, callback) for waits, callback in self._callbacks if waits]
        for callback in due:
            self._run_callback(callback)

    def _run_callback(self, callback: Callable[[Transfer], None]) -> None:
        guarded(partial(callback, self), f"a callback of transfer {self.label!r}")


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
    `threads`, the number of reading threads that take chunks.
    """

    blocked = False
    """Whether `next` returned None, but will have a chunk later; the thread is woken then."""

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
                divided = partial(divide, options=options, copies=self._copies, threads=self._threads)
                self._chunks = deque(chain.from_iterable(map(divided, self._descriptors)))
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
