"""The state of a transfer, from its first chunk until nothing can write to its destination any more.

A `Transfer` is one rank's share of a read. It goes PENDING → MOVING → DONE, FAILED, CANCELLED or EXPIRED. Beside the
state there is `quiet`: the transfer has ended and nothing can write to its destination any more. A transfer that has
ended and is not quiet is UNCERTAIN; when it becomes quiet it is QUIESCED, and only then may its blocks be used again
(R4). Bytes that arrive after the end change no state.

Threading: everything may be called from any thread. Only `wait` and `wait_quiet` wait, and nothing waits for NIXL
(R11), which only the threads of `kvferry._transport.reading_thread` call.
"""

from __future__ import annotations

import copy
import enum
import threading
from collections.abc import Callable
from functools import partial

from kvferry._threads import guarded
from kvferry.errors import KvferryError, TransferCancelled, TransferError, TransferExpired


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

    # The reading threads call the following methods: see `kvferry._transport.peer_work.ChunkOwner`.

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
