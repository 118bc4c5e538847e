"""From a reference to a grant: a lease, and the blocks it covers. Blocks, so it runs on a thread of its caller's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvferry._clock import from_duration, now, to_duration
from kvferry._control.backoff import BACKOFF_FIRST, Backoff
from kvferry._control.connection import SILENCE, Control, retrying
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._threads import start_thread
from kvferry._wire.authority import read_id_of
from kvferry._wire.blocks_codec import blocks_from_proto
from kvferry._wire.token import EngineToken
from kvferry.errors import (
    BlocksShort,
    InvalidField,
    KvferryError,
    PublicationAborted,
    PublicationTimeout,
    TransferCancelled,
    Unreachable,
)
from kvferry.geometry.blocks import MAX_BLOCKS, Blocks
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

HOME_PATIENCE = 15.0
"""Seconds after which a read gives up a home that cannot be reached: longer than one that restarts, or an engine that
counts as dead, takes; the engine can recompute instead of waiting for the read's whole timeout."""

RENEW_LEAST = 0.05
"""Seconds between renewals, whatever a home asks for: one that said 0 would keep a thread busy."""

GRANT_BYTES = 128 << 20
"""The most that the blocks of one publication take on the wire: `MAX_BLOCKS` ids that follow no other, with room. A
home that went on sending would fill our memory."""

STEP_BYTES = 256
"""What one step takes beside its blocks."""

ACCEPTED_PATIENCE = 1.0
"""Seconds that a read which was cancelled waits for its lease, to end it."""


class Cancellation:
    """Whether somebody no longer wants something, and how to interrupt what waits for it. Thread-safe."""

    def __init__(self, read_id: str) -> None:
        self._read_id = read_id
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._interrupt: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Cancel it; interrupts what waits. Idempotent."""
        with self._lock:
            self._cancelled.set()
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    def check(self) -> None:
        """Raise `TransferCancelled` if it was cancelled."""
        if self.cancelled:
            raise TransferCancelled(f"read {self._read_id} was cancelled", read_id=self._read_id)

    def wait(self, seconds: float) -> bool:
        """Wait that long, or until it is cancelled; whether it is."""
        return self._cancelled.wait(seconds)

    def interrupt_by(self, interrupt: Callable[[], None] | None) -> None:
        """How to interrupt what waits from now on."""
        with self._lock:
            self._interrupt = interrupt
        if self.cancelled and interrupt is not None:
            interrupt()


@dataclass(frozen=True, slots=True, eq=False)
class AcquireRequest:
    """One read of one publication.

    Attributes:
        home: the source's home.
        reference: the parsed reference.
        text: the reference as it came.
        read_id: what the ranks of the read call it; the home is told what is derived from it.
        parties: ranks that will report.
        expected_reads: reads that will be made; 0: what the source said.
        deadline: on `kvferry._clock`, until when to wait for the publication.
    """

    home: Control
    reference: pb.Reference = field(repr=False)
    text: str = field(repr=False)
    read_id: str
    parties: int
    expected_reads: int
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Acquired:
    """A lease, and the blocks it covers.

    Attributes:
        lease: renewed until it is dropped from the renewals.
        source: the source engine, as it lives now.
        request_id: at the source.
        blocks: by group.
        payload: opaque bytes from the source.
    """

    lease: ReaderLease
    source: pb.EngineRef
    request_id: str
    blocks: dict[str, Blocks]
    payload: bytes


class Acquirer:
    """Acquires publications for one engine.

    Args:
        token: of the engine that reads.
        renewals: keeps the leases alive from their acceptance on.
        gave_up: called with a lease that was had and is not needed any more, and why; tells its home.
    """

    def __init__(
        self,
        token: EngineToken,
        renewals: Renewals,
        gave_up: Callable[[Control, ReaderLease, pb.RankOutcome.ValueType], object],
    ) -> None:
        self._reader = token.ref()
        self._secret = token.session_secret
        self._renewals = renewals
        self._gave_up = gave_up

    def acquire(
        self, request: AcquireRequest, cancellation: Cancellation, extended: Callable[[float], None]
    ) -> Acquired:
        """Ask until there is an answer that repeating would not change.

        Args:
            request: what to read.
            cancellation: interrupts the wait.
            extended: called with the new deadline after each acknowledged renewal.

        Raises:
            TransferCancelled: it was cancelled.
            PublicationTimeout: the publication was not complete in time.
            PublicationAborted: the source no longer offers it.
            KvferryError: what the home answered.
        """
        backoff = Backoff()
        began, said = now(), False
        while True:
            cancellation.check()
            try:
                return self._ask(request, cancellation, extended)
            except KvferryError as error:
                cancellation.check()
                pause = backoff.next(error.retry_after)
                if not error.retryable or now() + pause >= request.deadline:
                    raise
                if isinstance(error, Unreachable) and request.home.unreachable_for > HOME_PATIENCE:
                    raise
                if not said and now() - began >= SILENCE:
                    said = True
                    number, engine_id = request.reference.publication, request.reference.engine_id
                    what = f"publication {number} of engine {engine_id!r} at {request.home.address}"
                    logger.warning("still waiting for %s: %s", what, error)
            cancellation.wait(pause)

    def _ask(self, request: AcquireRequest, cancellation: Cancellation, extended: Callable[[float], None]) -> Acquired:
        """One ReadBlocks call, up to Complete. The stream is then left: losing it ends nothing (PROTOCOL, Leases 5)."""
        left = max(0.001, request.deadline - now())
        sent_at = now()
        call = pb.ReadBlocksRequest(
            reference=request.text,
            reader=self._reader,
            read_id=read_id_of(self._secret, request.read_id),
            parties=request.parties,
            expected_reads=request.expected_reads,
            wait=to_duration(left),
        )
        stream = request.home.read_blocks(call, left)

        lease: ReaderLease | None = None

        def interrupt() -> None:
            if lease is not None:
                stream.cancel()
                return
            # A lease that was granted, and whose answer we did not wait for, would pin the source until it ends.
            timer = threading.Timer(ACCEPTED_PATIENCE, stream.cancel)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:
                # No thread to be had: then the lease ends with its time.
                stream.cancel()

        cancellation.interrupt_by(interrupt)
        steps: list[pb.Blocks] = []
        size = 0
        source, request_id = pb.EngineRef(), request.reference.request_id
        try:
            for message in request.home.typed(stream):
                kind = message.WhichOneof("message")
                if kind == "accepted" and lease is None:
                    accepted = message.accepted
                    source, request_id = accepted.source, accepted.request_id or request_id
                    remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
                    lease = ReaderLease(accepted.lease_id, sent_at, remaining, max(RENEW_LEAST, every))
                    self._keep(request, lease, extended)
                    cancellation.check()
                elif kind == "blocks":
                    size += message.ByteSize() + STEP_BYTES
                    if size > GRANT_BYTES:
                        raise InvalidField("size of a publication's blocks", f"{size} bytes", f"at most {GRANT_BYTES}")
                    steps.append(message.blocks)
                elif kind == "revoked":
                    number = message.revoked.reason
                    known = number in pb.RevokeReason.values()
                    reason = pb.RevokeReason.Name(number).removeprefix("REVOKE_REASON_") if known else f"{number}"
                    raise PublicationAborted(
                        f"the source no longer offers {request_id!r}: {reason}",
                        engine_id=request.reference.engine_id,
                        publication=request.reference.publication,
                    )
                elif kind == "complete" and lease is not None:
                    return Acquired(lease, source, request_id, joined(steps), message.complete.payload)
            raise _timeout(request)
        except Exception as failure:
            if lease is None:
                raise
            self._renewals.drop(lease)
            if not isinstance(failure, KvferryError):
                self._gave_up(request.home, lease, pb.RANK_OUTCOME_FAILED)
                raise
            error: KvferryError = failure
            if error.retryable and request.deadline - now() < BACKOFF_FIRST:
                # The source was heard, its blocks were not: the call's own deadline cut the stream.
                error = _timeout(request)
            cancelled = cancellation.cancelled
            if cancelled or not error.retryable:
                # The read is over, so the source need not wait for the lease to run out.
                outcome = pb.RANK_OUTCOME_CANCELLED if cancelled else pb.RANK_OUTCOME_FAILED
                self._gave_up(request.home, lease, outcome)
            raise error from None
        finally:
            cancellation.interrupt_by(None)
            stream.cancel()

    def _keep(self, request: AcquireRequest, lease: ReaderLease, extended: Callable[[float], None]) -> None:
        def lost() -> None:
            start_thread(
                partial(self._acquire_again, request, lease, extended),
                f"kvferry-reacquire-{request.reference.engine_id}-{request.reference.publication}",
            )

        name = f"the read of publication {request.reference.publication} of engine {request.reference.engine_id!r}"
        self._renewals.keep(lease, request.home, self._reader, name, extended, lost)

    def _acquire_again(self, request: AcquireRequest, lease: ReaderLease, extended: Callable[[float], None]) -> None:
        """The home restarted. Ask for the same read again, so that a transfer under way need not start anew."""

        def ask(left: float) -> None:
            if lease.ended:
                return
            sent_at = now()
            call = pb.ReadBlocksRequest(
                reference=request.text,
                reader=self._reader,
                read_id=read_id_of(self._secret, request.read_id),
                parties=request.parties,
                expected_reads=request.expected_reads,
            )
            stream = request.home.read_blocks(call, left)
            try:
                first = next(request.home.typed(stream), None)
            finally:
                stream.cancel()
            if first is None or first.WhichOneof("message") != "accepted":
                raise Unreachable(f"{request.home.address} did not accept the read", address=request.home.address)
            lease_id, remaining = first.accepted.lease_id, from_duration(first.accepted.remaining)
            if lease.acquired_again(lease_id, sent_at, now(), remaining):
                self._keep(request, lease, extended)
                extended(lease.deadline)
            else:
                # Too late: nobody needs the new one, and it pins the source.
                self._gave_up(
                    request.home, ReaderLease(lease_id, sent_at, remaining, remaining), pb.RANK_OUTCOME_CANCELLED
                )

        what = f"publication {request.reference.publication} of engine {request.reference.engine_id!r}"
        try:
            retrying(ask, lease.deadline)
        except KvferryError as error:
            logger.warning("the read of %s has lost its lease, which was not acquired again: %s", what, error)
        except Exception:
            logger.exception("the read of %s has lost its lease, which was not acquired again", what)


def _timeout(request: AcquireRequest) -> PublicationTimeout:
    number, engine_id = request.reference.publication, request.reference.engine_id
    message = f"publication {number} of engine {engine_id!r} was not complete in time"
    return PublicationTimeout(message, engine_id=engine_id, publication=number)


def joined(steps: list[pb.Blocks]) -> dict[str, Blocks]:
    """The steps of a publication as one list per group; each step goes on where the one before ended."""
    pieces: dict[str, list[pb.GroupBlocks]] = {}
    for step in sorted(steps, key=lambda step: step.step):
        for group in step.groups:
            pieces.setdefault(group.group, []).append(group)
    # Before any is written out: a few bytes of runs are as many ids as their sender likes, in each group.
    count = sum(sum(part.run_counts) for parts in pieces.values() for part in parts)
    if count > MAX_BLOCKS:
        raise InvalidField("number of blocks of all groups", count, f"at most {MAX_BLOCKS}")
    joined = {}
    for name, parts in pieces.items():
        whole = pb.GroupBlocks()
        whole.CopyFrom(parts[0])
        for part in parts[1:]:
            if part.first_token != whole.end_token:
                asked, available = f"tokens from {whole.end_token}", f"tokens from {part.first_token}"
                raise BlocksShort(name, "source", asked, available)
            whole.end_token = part.end_token
            whole.run_starts.extend(part.run_starts)
            whole.run_counts.extend(part.run_counts)
        joined[name] = blocks_from_proto(whole)
    return joined
