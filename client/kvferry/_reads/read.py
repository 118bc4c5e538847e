"""A read as its caller sees it: await it, poll it, ask how far it is, cancel it."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

from kvferry._clock import now
from kvferry._control.acquisition import Cancellation
from kvferry._forks import OneProcess
from kvferry._reads.callbacks import Callbacks
from kvferry._reads.rank_read import RankRead
from kvferry.errors import KvferryError, TransferCancelled, TransferFailed
from kvferry.planner.summed_blocks import Verification

logger = logging.getLogger(__name__)


class ReadState(enum.Enum):
    """Where a read stands. The last three are final."""

    WAITING = "waiting"
    """Asking for the blocks, or waiting for their publication."""
    READING = "reading"
    """Bytes are moving."""
    DONE = "done"
    """Every byte arrived under a live lease."""
    FAILED = "failed"
    """It failed, or its lease expired; see `Read.exception`."""
    CANCELLED = "cancelled"
    """It was cancelled."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a read moved.

    Attributes:
        request_id: the request at its source.
        payload: opaque bytes from the source.
        bytes: bytes read by this rank.
        staged_bytes: those of them that went through staging memory.
        descriptors: descriptors after fusing and merging.
        pieces: contiguous pieces of single planes and blocks before it.
        source_ranks: ranks read from.
        confirmed: the home answered VALID; False: it did not answer, and the reader's own deadline decided.
        verification: what integrity mode compared; None where it is off.
    """

    request_id: str
    payload: bytes
    bytes: int
    staged_bytes: int
    descriptors: int
    pieces: int
    source_ranks: tuple[int, ...]
    confirmed: bool
    verification: Verification | None = None


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """How far a read is. `total` is 0 until the blocks are known."""

    state: ReadState
    done: int
    total: int


class ReadHandle:
    """A read as whoever runs it sees it. Thread-safe.

    Args:
        read_id: what the ranks of the read call it.
        reference: what is read.
        callbacks: calls its callers back.

    Attributes:
        cancellation: says that nobody wants it any more.
        share: the rank's share, from the grant on.
        result, error: what became of it, once it is done.
    """

    def __init__(self, read_id: str, reference: str, callbacks: Callbacks) -> None:
        self.read_id = read_id
        self.reference = reference
        self.cancellation = Cancellation(read_id)
        self.share: RankRead | None = None
        self.result: ReadResult | None = None
        self.error: KvferryError | None = None
        self.callbacks = callbacks
        self._changed = threading.Condition()
        self._final: ReadState | None = None
        self._stop: Callable[[], bool] | None = None
        self._at_end: list[Callable[[], None]] = []

    @property
    def state(self) -> ReadState:
        """Where it stands."""
        if self._final is not None:
            return self._final
        share = self.share
        return ReadState.WAITING if share is None or share.progress() is None else ReadState.READING

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._final is not None

    @property
    def quiet(self) -> bool:
        """Whether it has ended, and nothing can write to its blocks any more."""
        share = self.share
        return self.done and (share is None or share.quiet)

    def granted(self, share: RankRead, stop: Callable[[], bool]) -> None:
        """Its share is about to begin; `stop` ends it, and answers whether its blocks are quiet already."""
        self.share, self._stop = share, stop

    def cancel(self) -> bool:
        """See `Read.cancel`."""
        if self.done:
            return self.quiet
        self.cancellation.cancel()
        # Looked at after the cancellation: a share that comes later sees it, and begins nothing.
        stop = self._stop
        return True if stop is None else stop()

    def end(self, result: ReadResult | None, error: KvferryError | None) -> None:
        """It has ended."""
        with self._changed:
            self.result, self.error = result, error
            if error is None:
                self._final = ReadState.DONE
            elif isinstance(error, TransferCancelled):
                self._final = ReadState.CANCELLED
            else:
                self._final = ReadState.FAILED
            at_end, self._at_end = self._at_end, []
            self._changed.notify_all()
        for run in at_end:
            run()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout)

    def when_done(self, run: Callable[[], None]) -> bool:
        """Call `run`, which must not block, when it ends; False, and nothing is called, if it has ended."""
        with self._changed:
            if self.done:
                return False
            self._at_end.append(run)
            return True


class Read(OneProcess):
    """One rank's read of one publication. Thread-safe; no method but `result`, `exception` and `wait_quiet` waits.

    Await it in asyncio, call `result` in threads, or poll `done` from an engine's step. Made by `Cache.read`.
    """

    def __init__(self, handle: ReadHandle) -> None:
        self.read_id = handle.read_id
        self.reference = handle.reference
        self._handle = handle

    @property
    def state(self) -> ReadState:
        """Where it stands."""
        return self._handle.state

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._handle.done

    @property
    def quiet(self) -> bool:
        """Whether nothing can write to the destination blocks any more: only then may they be reused (R4)."""
        return self._handle.quiet

    def result(self, timeout: float | None = None) -> ReadResult:
        """Wait for the end.

        Args:
            timeout: seconds; None: until it ends, which it does by its own timeout.

        Raises:
            TimeoutError: it has not ended; it goes on.
            KvferryError: why it gave no good bytes.
        """
        self._wait(timeout)
        if self._handle.error is not None:
            # Asked again and again, it would keep the frames of every call.
            raise self._handle.error.with_traceback(None)
        if self._handle.result is None:
            raise TransferFailed(f"read {self.read_id} has no result")
        return self._handle.result

    def exception(self, timeout: float | None = None) -> KvferryError | None:
        """Wait for the end; why it failed, or None. Raises TimeoutError as `result`."""
        self._wait(timeout)
        return self._handle.error

    def wait_quiet(self, timeout: float | None = None) -> bool:
        """Wait until the destination blocks may be reused; whether they may.

        Args:
            timeout: seconds; None: until they may.
        """
        until = None if timeout is None else now() + timeout
        if not self._handle.wait(timeout):
            return False
        share = self._handle.share
        return share is None or share.wait_quiet(None if until is None else max(0.0, until - now()))

    def progress(self) -> ReadProgress:
        """How far it is."""
        share = self._handle.share
        progress = None if share is None else share.progress()
        if progress is None:
            return ReadProgress(self.state, 0, 0)
        return ReadProgress(self.state, progress.bytes_done, progress.bytes_total)

    def cancel(self) -> bool:
        """Stop; returns at once, whether the blocks are quiet already. A read that has ended stays as it is."""
        return self._handle.cancel()

    def add_done_callback(self, callback: Callable[[Read], None]) -> None:
        """Call `callback(read)` once it has ended, on a thread for callbacks; at once if it has. What it raises is
        logged. It may wait; the callbacks of other reads of the cache wait meanwhile.

        Raises:
            LimitReached: the system gives no thread for callbacks. Nothing will be called.
        """

        def run() -> None:
            try:
                callback(self)
            except Exception:
                logger.exception("a callback of read %s failed", self.read_id)

        callbacks = self._handle.callbacks
        if not self.done():
            callbacks.start()
        if not self._handle.when_done(lambda: callbacks.do(run)):
            run()

    def __await__(self) -> Generator[object, None, ReadResult]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def on_done() -> None:
            # The loop may have been closed by the time a read ends that nobody awaits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        if self._handle.when_done(on_done):
            try:
                yield from ended
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result(0)

    def _wait(self, timeout: float | None) -> None:
        if not self._handle.wait(timeout):
            raise TimeoutError(f"read {self.read_id} has not ended after {timeout} s")
