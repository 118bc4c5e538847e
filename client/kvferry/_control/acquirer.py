"""Acquires publications for one engine: starts acquisitions, and keeps the thread that makes their pauses."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry._control.acquisition import AcquireRequest, Acquisition, Told
from kvferry._control.cancellation import Cancellation
from kvferry._control.connection import Control
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._wire.authority import read_id_of
from kvferry._wire.token import EngineToken, engine_ref
from kvferry._work_queue import WorkQueue
from kvferry.errors import Closed, KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb


class Acquirer:
    """Acquires publications for one engine. One thread makes the pauses of all waiting reads; it starts with the first.

    Args:
        token: token of the engine that reads.
        renewals: renews the leases from their acceptance on.
        gave_up: called with a lease that is no longer needed, its home and the reason, to end it there. Must not block.
    """

    def __init__(
        self,
        token: EngineToken,
        renewals: Renewals,
        gave_up: Callable[[Control, ReaderLease, pb.RankOutcome.ValueType], object],
    ) -> None:
        self._reader = engine_ref(token)
        self._secret = token.session_secret
        self._renewals = renewals
        self._gave_up = gave_up
        self._lock = threading.Lock()
        self._work: WorkQueue | None = None
        self._running = 0
        self._closed = False

    def start(
        self,
        request: AcquireRequest,
        cancellation: Cancellation,
        extended: Callable[[float], None],
        told: Callable[[Told], None],
    ) -> None:
        """Ask for a publication until it is granted or repeating cannot help. Returns at once.

        Args:
            request: the publication to read.
            cancellation: interrupts the wait.
            extended: called with the new deadline after each acknowledged renewal.
            told: called, perhaps on this thread and before this has returned, once with the lease and its blocks, and,
                if these are not complete, with the blocks that follow; or with an error, the last time:
                `TransferCancelled`, `PublicationTimeout` (the publication was not complete in time),
                `PublicationAborted` (the source withdrew it), or another error from the home. Calls do not overlap.

        The callbacks must not block: they run on threads that other reads need.

        Raises:
            LimitReached: the system refused another thread. `told` is not called.
            Closed: this was closed. `told` is not called.
        """
        asked = pb.ReadBlocksRequest(
            reference=request.text,
            reader=self._reader,
            read_id=read_id_of(self._secret, request.read_id),
            parties=request.parties,
            expected_reads=request.expected_reads,
        )
        with self._lock:
            if self._closed:
                raise Closed("the engine is closed and acquires no more publications")
            if self._work is None:
                self._work = WorkQueue(f"kvferry-acquisitions-{self._reader.engine_id}")
            work = self._work
            self._running += 1

        def tell(what: Told) -> None:
            if isinstance(what, KvferryError) or what.complete:
                self._one_ended(work)
            told(what)

        acquisition = Acquisition(request, asked, cancellation, work, self._renewals, self._gave_up, extended, tell)
        # On this thread: starting a call does not wait, and handing it to another thread would take longer.
        acquisition.begin()

    def close(self, timeout: float) -> None:
        """Start no more acquisitions. Idempotent.

        The thread ends with the last acquisition in progress. A lease that is lost later is not acquired again.

        Args:
            timeout: seconds to wait for the end of the thread if no acquisition is in progress.
        """
        with self._lock:
            self._closed = True
            idle = self._work if not self._running else None
        if idle is not None:
            idle.close(timeout)

    def _one_ended(self, work: WorkQueue) -> None:
        with self._lock:
            self._running -= 1
            last = self._closed and not self._running
        if last:
            work.close(0.0)
