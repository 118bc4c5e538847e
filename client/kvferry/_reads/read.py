"""A read as its caller sees it: await it, poll it, ask how far it is, cancel it."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvferry._control.acquisition import Cancellation
from kvferry._forks import OneProcess
from kvferry._transport.transport import Transfer
from kvferry.errors import KvferryError, TransferCancelled
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


class Read(OneProcess):
    """One rank's read of one publication. Thread-safe; no method but `result`, `exception` and `wait_quiet` waits.

    Await it in asyncio, call `result` in threads, or poll `done` from an engine's step.
    """

    def __init__(self, read_id: str, reference: str) -> None:
        self.read_id = read_id
        self.reference = reference
        self._condition = threading.Condition()
        self._state = ReadState.WAITING
        self._result: ReadResult | None = None
        self._error: KvferryError | None = None
        self._transfer: Transfer | None = None
        self._starting = False
        """The transfer is being started: it may write, and is not known here yet."""
        self._cancellation = Cancellation(read_id)
        self._callbacks: list[Callable[[Read], None]] = []

    @property
    def state(self) -> ReadState:
        """Where it stands."""
        return self._state

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._state in (ReadState.DONE, ReadState.FAILED, ReadState.CANCELLED)

    @property
    def quiet(self) -> bool:
        """Whether nothing can write to the destination blocks any more: only then may they be reused (R4)."""
        transfer = self._transfer
        return self.done() and (transfer is None or transfer.quiet)

    def result(self, timeout: float | None = None) -> ReadResult:
        """Wait for the end.

        Args:
            timeout: seconds; None: until it ends, which it does by its own timeout.

        Raises:
            TimeoutError: it has not ended; it goes on.
            KvferryError: why it gave no good bytes.
        """
        self._wait(timeout)
        if self._error is not None:
            # Asked again and again, it would keep the frames of every call.
            raise self._error.with_traceback(None)
        if self._result is None:
            raise TimeoutError(f"read {self.read_id} has not ended after {timeout} s")
        return self._result

    def exception(self, timeout: float | None = None) -> KvferryError | None:
        """Wait for the end; why it failed, or None. Raises TimeoutError as `result`."""
        if not self._wait(timeout):
            raise TimeoutError(f"read {self.read_id} has not ended after {timeout} s")
        return self._error

    def wait_quiet(self, timeout: float | None = None) -> bool:
        """Wait until the destination blocks may be reused; whether they may."""
        if not self._wait(timeout):
            return False
        transfer = self._transfer
        return transfer is None or transfer.wait_quiet(timeout)

    def progress(self) -> ReadProgress:
        """How far it is."""
        transfer = self._transfer
        if transfer is None:
            return ReadProgress(self._state, 0, 0)
        progress = transfer.progress()
        return ReadProgress(self._state, progress.bytes_done, progress.bytes_total)

    def cancel(self) -> bool:
        """Stop; returns at once, whether the blocks are quiet already. A read that has ended stays as it is."""
        if not self.done():
            self._cancellation.cancel()
        with self._condition:
            # Whoever starts the transfer looks at the cancellation under the same lock: either he has seen it, or it is
            # seen here that he has begun.
            transfer, starting = self._transfer, self._starting
        if transfer is None:
            return not starting
        return transfer.quiet if self.done() else transfer.cancel()

    def add_done_callback(self, callback: Callable[[Read], None]) -> None:
        """Call `callback(read)` once it has ended, on the read's thread; at once if it has."""
        with self._condition:
            if not self.done():
                self._callbacks.append(callback)
                return
        self._run_callback(callback)

    def __await__(self) -> Generator[object, None, ReadResult]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def on_done(_: Read) -> None:
            # The loop may have been closed by the time a read ends that nobody awaits any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(on_done)
        try:
            yield from ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result(0)

    # What follows is for the thread that runs the read.

    def _extend(self, deadline: float) -> None:
        """The lease was renewed."""
        transfer = self._transfer
        if transfer is not None:
            transfer.extend(deadline)

    def _begin(self, start: Callable[[], Transfer]) -> Transfer:
        """Start the transfer, unless the read was cancelled: then this raises `TransferCancelled`."""
        with self._condition:
            self._cancellation.check()
            self._starting = True
        transfer: Transfer | None = None
        try:
            transfer = start()
        finally:
            with self._condition:
                self._starting = False
                if transfer is not None:
                    self._transfer, self._state = transfer, ReadState.READING
        if self._cancellation.cancelled:
            transfer.cancel()
        return transfer

    def _end(self, result: ReadResult | None, error: KvferryError | None) -> None:
        with self._condition:
            self._result, self._error = result, error
            if error is None:
                self._state = ReadState.DONE
            elif isinstance(error, TransferCancelled):
                self._state = ReadState.CANCELLED
            else:
                self._state = ReadState.FAILED
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            self._run_callback(callback)

    def _wait(self, timeout: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(self.done, timeout)

    def _run_callback(self, callback: Callable[[Read], None]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of read %s failed", self.read_id)
