"""The public object of a read: callers await it, poll it and cancel it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvferry._clock import now
from kvferry._control.acquisition import AcquireRequest
from kvferry._forks import OneProcess
from kvferry._integrity.summed_blocks import Verification
from kvferry._loop import Loop
from kvferry._reads.leased_read import LeasedRead, ReadStage
from kvferry._reads.rank_read import RankRead, Wanted
from kvferry._threads import start_thread
from kvferry._wire.publication import Told
from kvferry.errors import KvferryError, TransferCancelled, TransferFailed


class ReadState(enum.Enum):
    """The state of a read. DONE, FAILED and CANCELLED are final."""

    WAITING = "waiting"
    """The read is asking for the blocks, or waiting for their publication."""
    READING = "reading"
    """Bytes are moving."""
    DONE = "done"
    """All bytes have arrived while the lease was alive."""
    FAILED = "failed"
    """The read has failed, or its lease expired; `Read.exception` returns the error."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ReadResult(Told):
    """The result of a successful read. Has the attributes of `Told`, and these:

    Attributes:
        request_id: the source's name for the request.
        bytes: number of bytes that this rank read.
        staged_bytes: number of these bytes that went through staging memory.
        descriptors: number of descriptors, after fusing and merging.
        pieces: number of contiguous pieces of single planes and blocks, before fusing and merging.
        source_ranks: ranks of the source that were read from.
        confirmed: the home answered VALID. If False, the home did not confirm the lease, and the reader's own deadline
            decided.
        verification: the result of integrity mode; None if it is off.
        prompt: "matched": the source has marked this prompt; "unmarked": no mark; "unknown": nothing was compared.
        end_token: the end of the tokens that were read, or that a state which was read has seen.
    """

    request_id: str
    bytes: int
    staged_bytes: int
    descriptors: int
    pieces: int
    source_ranks: tuple[int, ...]
    confirmed: bool
    verification: Verification | None = None
    prompt: str = "unknown"
    end_token: int = 0


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """The progress of a read.

    Attributes:
        done: bytes that have arrived.
        total: bytes to read of the blocks known so far; 0 until the first blocks are known.
        complete: all blocks are known, and `total` grows no more.
    """

    state: ReadState
    done: int
    total: int
    complete: bool = False


class OwnRead(LeasedRead):
    """A read of a cache: the internal side of a `Read`. `CacheReads` changes it; any thread may read it.

    Attributes:
        share: the rank's share; None until the read is granted.
        cancelled: the caller has cancelled the read; `cancel` cancels it.
        ended: the result or error, once the read has ended.
    """

    def __init__(
        self,
        loop: Loop,
        request: AcquireRequest,
        rank: int,
        wanted: Wanted,
        cancel: Callable[[OwnRead], bool],
    ) -> None:
        super().__init__(loop, request, frozenset((rank,)))
        self.wanted = wanted
        self.cancel = partial(cancel, self)
        self.share: RankRead | None = None
        self.cancelled = False
        self.ended: Future[ReadResult] = Future()
        # Callers cancel the read, not its future.
        self.ended.set_running_or_notify_cancel()

    @property
    def over(self) -> bool:
        """Whether the read has ended. Each read asks this of others: `Future.done` takes a lock."""
        return self.stage is ReadStage.ENDED or self.stage is ReadStage.REFUSED

    @property
    def quiet(self) -> bool:
        share = self.share
        return self.over and (share is None or share.quiet)


class Read(OneProcess):
    """One rank's read of a publication. Made by `Cache.read`.

    Await it in asyncio, call `result` on a thread, or poll `done` from an engine's step.

    Threading: every method may be called from any thread. Only `result`, `exception` and `wait_quiet` wait.

    Attributes:
        read_id: the name that the ranks of the read share.
        reference: the reference that `Cache.read` was given.
    """

    def __init__(self, read: OwnRead) -> None:
        self.read_id = read.read_id
        self.reference = read.request.given or read.request.text
        self._read = read

    @property
    def state(self) -> ReadState:
        """The state of the read."""
        share, ended = self._read.share, self._read.ended
        if ended.done():
            error = ended.exception()
            if error is None:
                return ReadState.DONE
            return ReadState.CANCELLED if isinstance(error, TransferCancelled) else ReadState.FAILED
        return ReadState.WAITING if share is None or share.transfer is None else ReadState.READING

    def done(self) -> bool:
        """Return whether the read has ended, with or without an error."""
        return self._read.ended.done()

    @property
    def quiet(self) -> bool:
        """Whether the read has ended and no write to its blocks is possible any more. Reuse the blocks only then
        (R4)."""
        return self._read.quiet

    def result(self, timeout: float | None = None) -> ReadResult:
        """Wait for the end of the read, and return its result.

        Args:
            timeout: seconds to wait; None: until the read ends, which it does within its own timeout.

        Raises:
            TimeoutError: the read has not ended yet. It continues.
            KvferryError: the read failed, or was cancelled; its bytes do not count.
        """
        error = self.exception(timeout)
        if error is not None:
            # Otherwise the traceback would grow, and keep the frames alive, with every call.
            raise error.with_traceback(None)
        return self._read.ended.result()

    def exception(self, timeout: float | None = None) -> KvferryError | None:
        """Wait for the end of the read, and return its error, or None. `timeout` and `TimeoutError`: see `result`."""
        try:
            error = self._read.ended.exception(timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"read {self.read_id} has not ended after {timeout} s") from None
        return error if error is None or isinstance(error, KvferryError) else TransferFailed(repr(error))

    def wait_quiet(self, timeout: float | None = None) -> bool:
        """Wait until the destination blocks may be reused, at most `timeout` seconds (None: no limit); returns whether
        they may."""
        until = None if timeout is None else now() + timeout
        try:
            self._read.ended.exception(timeout)
        except FutureTimeoutError:
            return False
        share = self._read.share
        return share is None or share.wait_quiet(None if until is None else max(0.0, until - now()))

    async def until_quiet(self) -> None:
        """Wait in asyncio until the destination blocks may be reused; see `quiet`."""
        await self._in_asyncio(self._read.ended.add_done_callback)
        share = self._read.share
        if share is not None and share.transfer is not None and not share.quiet:
            await self._in_asyncio(share.transfer.add_quiet_callback)

    def progress(self) -> ReadProgress:
        """Return the progress of the read."""
        share = self._read.share
        if share is None or share.transfer is None:
            return ReadProgress(self.state, 0, 0)
        return ReadProgress(self.state, share.bytes, share.bytes_total, share.expanded)

    def cancel(self) -> bool:
        """Cancel the read, and return whether the destination blocks are quiet already. Does not wait; has no effect on
        a read that has ended."""
        return self._read.cancel()

    def add_done_callback(self, callback: Callable[[Read], None]) -> None:
        """Call `callback(read)` on a thread of its own when the read has ended. Its exceptions are logged, and so is a
        callback for which the system refuses the thread."""
        run, name = partial(callback, self), f"kvferry-callback-{self.read_id}"
        self._read.ended.add_done_callback(lambda _: start_thread(run, name))

    def __await__(self) -> Generator[object, None, ReadResult]:
        try:
            yield from self._in_asyncio(self._read.ended.add_done_callback).__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result(0)

    async def _in_asyncio(self, when: Callable[[Callable[[object], None]], object]) -> None:
        """Wait on the running event loop; `when` calls its argument once, perhaps on another thread."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not came.done():
                came.set_result(None)

        def on_event(_: object) -> None:
            # If the read is no longer awaited, its loop may have been closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        when(on_event)
        await came
