"""The reads of `Cache.read`: the handles that callers await, poll and cancel, and their way through a rank's own
process, which acquires and holds their leases."""

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
from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.lease_holder import LeaseHolder
from kvferry._forks import OneProcess
from kvferry._integrity.summed_blocks import Verification
from kvferry._loop import Loop, check_may_wait
from kvferry._reads.leased_read import LeasedRead, ReadStage, ShareEnd
from kvferry._reads.leased_reads import LeasedReads
from kvferry._reads.meters import ReadMeter
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._reads.rank_reads import RankReads
from kvferry._reads.source_engines import SourceEngines
from kvferry._threads import settle, start_thread
from kvferry._wire.publication import Told, told_fields
from kvferry.errors import Closed, EngineUnknown, KvferryError, PeerRestarted, TransferCancelled, TransferFailed
from kvferry.geometry.blocks import taken_end


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
    """The internal side of a `Read`. `CacheReads` changes it; any thread may read it. `share` is None until the read is
    granted."""

    def __init__(
        self, loop: Loop, request: AcquireRequest, rank: int, wanted: Wanted, cancel: Callable[[OwnRead], bool]
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
        if timeout != 0 and not self.done():
            check_may_wait()
        try:
            error = self._read.ended.exception(timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"read {self.read_id} has not ended after {timeout} s") from None
        return error if error is None or isinstance(error, KvferryError) else TransferFailed(repr(error))

    def wait_quiet(self, timeout: float | None = None) -> bool:
        """Wait until the destination blocks may be reused, at most `timeout` seconds (None: no limit); returns whether
        they may."""
        if timeout != 0 and not self.quiet:
            check_may_wait()
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


class CacheReads(LeasedReads[OwnRead]):
    """The reads of one destination rank. `begin_read`, `cancel` and `close` may be called from any thread; only `close`
    waits."""

    def __init__(
        self, loop: Loop, rank: int, holder: LeaseHolder, sources: SourceEngines, shares: RankReads, meter: ReadMeter
    ) -> None:
        super().__init__(loop, holder, meter)
        self._rank = rank
        self._sources = sources
        self._shares = shares
        self._running: set[OwnRead] = set()
        """Reads that have not ended."""
        self._closed = False

    def begin_read(self, request: AcquireRequest, wanted: Wanted) -> OwnRead:
        """Start a read. Returns at once. Raises `Closed` after `close`."""
        read = OwnRead(self._loop, request, self._rank, wanted, self.cancel)
        with self.lock:
            if self._closed:
                raise Closed("the cache is closed")
            self._running.add(read)
            try:
                self.start(read)
            except KvferryError:
                self._running.discard(read)
                raise
        return read

    def cancel(self, read: OwnRead) -> bool:
        """See `Read.cancel`."""
        if read.over:
            return read.quiet
        read.cancelled = True
        # Looked at after `cancelled` is set: a share that is made later finds the cancellation, and does not begin.
        quiet = read.share is None or self._shares.cancel(read.share)
        self._loop.call(partial(self._end_cancelled, read))
        return quiet

    def close(self, until: float) -> None:
        """Cancel all reads, and wait until they have ended and are quiet, at most until this time on the loop's clock.
        Idempotent."""
        with self.lock:
            self._closed = True
            reads = tuple(self._running)
        for read in reads:
            self.cancel(read)
        self._shares.close(until)
        with suppress(Closed):
            self._loop.run(self.wait_ended(max(0.001, until - self._loop.now())))
        for read in reads:
            if read.share is not None:
                read.share.wait_quiet(max(0.0, until - self._loop.now()))

    def on_granted(self, read: OwnRead, acquired: Acquired) -> None:
        wanted = read.wanted
        if self.takes(read, taken_end(acquired.part.blocks, wanted.blocks, wanted.tokens)) is not None:
            return
        self.begin(read)
        # Before the share can begin: see `cancel`.
        read.share = share = RankRead(self._loop, _order(read, acquired))
        if read.cancelled:
            share.stop()
        try:
            self._shares.start(share, partial(self._share_ended, read), partial(self._share_quiet, read))
        except KvferryError as error:
            share.ended_at, share.error, share.ended = self._loop.now(), error, True
            self.share_ended(read, self._rank, ShareEnd(error, quiet=True, bytes=0), share.ended_at)

    def on_more(self, read: OwnRead, more: GrantedPart) -> None:
        if read.share is not None:
            read.share.add(more)

    def on_extended(self, read: OwnRead) -> None:
        if read.share is not None:
            read.share.extend()

    def on_refused(self, read: OwnRead) -> None:
        self.on_ended(read)

    def on_stop(self, read: OwnRead) -> None:
        if read.share is not None:
            self._shares.cancel(read.share)

    def on_ended(self, read: OwnRead) -> None:
        if isinstance(read.error, (PeerRestarted, EngineUnknown)):
            home, reference = read.request.home, read.request.reference
            source = (home.address, reference.engine_id, reference.incarnation)
            self._loop.call(partial(self._sources.gone, source))
        self._running.discard(read)
        settle(read.ended, read.error or _result(read))

    def _end_cancelled(self, read: OwnRead) -> None:
        error = TransferCancelled(f"read {read.read_id} was cancelled", read_id=read.read_id)
        with self.lock:
            self.refuse(read, error)
            self.cancel_validation(read, error)

    def _share_ended(self, read: OwnRead, share: RankRead) -> None:
        end = ShareEnd(share.error, share.quiet, share.bytes, share.work)
        with self.lock:
            self.share_ended(read, self._rank, end, share.ended_at)

    def _share_quiet(self, read: OwnRead, _: RankRead) -> None:
        with self.lock:
            self.share_quiet(read, self._rank)


def _order(read: OwnRead, acquired: Acquired) -> RankOrder:
    request = read.request
    return RankOrder(
        read_id=request.read_id,
        request_id=acquired.request_id,
        home=request.home,
        engine_id=acquired.source.engine_id,
        incarnation=acquired.source.incarnation,
        publication=request.reference.publication,
        reference=request.text,
        lease=acquired.lease,
        granted=acquired.part,
        wanted=read.wanted,
        deadline=request.deadline,
        traceparent=read.span.traceparent,
    )


def _result(read: OwnRead) -> ReadResult | TransferFailed:
    share, acquired = read.share, read.acquired
    if share is None or acquired is None:
        return TransferFailed(f"read {read.read_id} has no result")
    work = share.work
    return ReadResult(
        request_id=acquired.request_id,
        **told_fields(read.told),
        bytes=read.bytes,
        staged_bytes=work.staged_bytes,
        descriptors=work.descriptors,
        pieces=work.pieces,
        source_ranks=tuple(sorted(share.source_ranks)),
        confirmed=read.confirmed,
        verification=share.verification,
        prompt=read.request.prompt.found,
        end_token=read.until,
    )
