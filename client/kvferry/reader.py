"""The destination side: one rank's reads, each from its reference to the home's verdict.

Threading: `Reader.start` returns at once; every read then runs on a thread of its own, straight through: ask for the
blocks, handshake if the source is new, expand, hand the descriptors to the transport, wait, report. The bytes move on
the transport's threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.blocks import Blocks, blocks_from_proto
from kvferry.clock import from_duration, now, to_duration
from kvferry.control import BACKOFF_FIRST, BACKOFF_LAST, Control, retrying
from kvferry.errors import (
    BlocksShort,
    KvferryError,
    LimitReached,
    PublicationAborted,
    PublicationTimeout,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
    TransferStuck,
)
from kvferry.expand import Expansion
from kvferry.leases import ReaderLease
from kvferry.peers import Peer, Peers
from kvferry.read import Read, ReadResult
from kvferry.renewals import Renewals
from kvferry.transfers import Part, Transfer, TransferState, Transport
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

VERDICT_TIMEOUT = 1.0
"""Seconds for the home's verdict; without one the reader's own deadline decides (PROTOCOL, Endings)."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """What one read wants. See `Cache.read`."""

    home: Control
    reference: pb.Reference
    text: str
    blocks: Mapping[str, Blocks]
    tokens: tuple[int, int] | None
    layers: frozenset[str] | None
    parties: int
    expected_reads: int
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    """A lease, and the blocks it covers."""

    lease: ReaderLease
    source: pb.EngineRef
    request_id: str
    blocks: dict[str, Blocks]
    payload: bytes


class Reader:
    """The reads of one destination rank.

    Args:
        reader: the destination engine.
        rank: this rank.
        transport: moves the bytes.
        peers: source engines.
        renewals: keeps leases alive.
        max_reads: reads at once; more are refused, since each holds a thread.
    """

    def __init__(
        self, reader: pb.EngineRef, rank: int, transport: Transport, peers: Peers, renewals: Renewals, max_reads: int
    ) -> None:
        self._reader = reader
        self._rank = rank
        self._transport = transport
        self._peers = peers
        self._renewals = renewals
        self._lock = threading.Lock()
        self._max_reads = max_reads
        self._running: set[Read] = set()

    def start(self, request: ReadRequest, read_id: str) -> Read:
        """Start a read; raises `LimitReached`."""
        read = Read(read_id, request.text)
        with self._lock:
            if len(self._running) >= self._max_reads:
                limit = self._max_reads
                raise LimitReached(f"{limit} reads are running", retry_after=0.1, limit="max_reads", value=limit)
            self._running.add(read)
        thread = threading.Thread(target=self._run, args=(request, read), name=f"kvferry-read-{read_id}", daemon=True)
        thread.start()
        return read

    def running(self) -> tuple[Read, ...]:
        """Reads that have not ended."""
        with self._lock:
            return tuple(self._running)

    def _run(self, request: ReadRequest, read: Read) -> None:
        try:
            grant = self._granted(request, read)
        except KvferryError as error:
            self._ended(read, None, error)
            return
        except Exception as error:
            logger.exception("read %s failed", read.read_id)
            self._ended(read, None, TransferFailed(f"read {read.read_id}: {error!r}"))
            return
        try:
            self._move(request, read, grant)
        finally:
            self._renewals.drop(grant.lease)

    def _move(self, request: ReadRequest, read: Read, grant: _Grant) -> None:
        """From the grant to the end; whatever happens, the home is told."""
        moved = 0
        try:
            # Renewals go on meanwhile; whether the lease lasted is judged at the end.
            peer = self._peers.get(request.home, grant.source.engine_id, grant.source.incarnation, request.deadline)
            expansion = peer.plan_of(request.layers).expand(grant.blocks, request.blocks, request.tokens)
            read._check_cancelled()
            transfer = self._transferred(request, read, grant, peer, expansion)
            moved = transfer.progress().bytes_done
            self._raise_unless_done(request, read, grant, transfer)
        except KvferryError as error:
            self._ended(read, None, error)
            self._report(request, grant, _OUTCOMES.get(type(error), pb.RANK_OUTCOME_FAILED), moved)
            return
        except Exception as error:
            logger.exception("read %s failed", read.read_id)
            self._ended(read, None, TransferFailed(f"read {read.read_id}: {error!r}"))
            self._report(request, grant, pb.RANK_OUTCOME_FAILED, moved)
            return
        verdict = self._report(request, grant, pb.RANK_OUTCOME_DONE, moved)
        unanswered = verdict is None
        if verdict == pb.VERDICT_EXPIRED:
            message = f"read {read.read_id}: the home says that the lease had expired"
            self._ended(read, None, TransferExpired(message, read_id=read.read_id))
            return
        result = ReadResult(
            request_id=grant.request_id,
            payload=grant.payload,
            bytes=moved,
            staged_bytes=sum(staged.total_bytes for source in expansion.sources for staged in source.staged),
            descriptors=expansion.descriptors,
            pieces=expansion.pieces,
            source_ranks=tuple(source.source_rank for source in expansion.sources),
            confirmed=verdict == pb.VERDICT_VALID,
        )
        self._ended(read, result, None)
        if unanswered:
            self._report_until_answered(request, grant, moved)

    def _ended(self, read: Read, result: ReadResult | None, error: KvferryError | None) -> None:
        with self._lock:
            self._running.discard(read)
        read._end(result, error)

    def _granted(self, request: ReadRequest, read: Read) -> _Grant:
        """Ask until there is an answer that repeating would not change."""
        backoff = BACKOFF_FIRST
        woken = threading.Event()
        read._cancel_by(woken.set)
        while True:
            read._check_cancelled()
            try:
                return self._ask(request, read, woken)
            except KvferryError as error:
                read._check_cancelled()
                pause = max(error.retry_after or 0.0, backoff)
                if not error.retryable or now() + pause >= request.deadline:
                    raise
            woken.wait(pause)
            backoff = min(2 * backoff, BACKOFF_LAST)

    def _ask(self, request: ReadRequest, read: Read, woken: threading.Event) -> _Grant:
        """One ReadBlocks call, up to Complete. The stream is then left: losing it ends nothing (PROTOCOL, Leases 5)."""
        left = max(0.001, request.deadline - now())
        sent_at = now()
        call = pb.ReadBlocksRequest(
            reference=request.text,
            reader=self._reader,
            read_id=read.read_id,
            parties=request.parties,
            expected_reads=request.expected_reads,
            wait=to_duration(left),
        )
        stream = request.home.read_blocks(call, left)

        def interrupt() -> None:
            woken.set()
            stream.cancel()

        read._cancel_by(interrupt)
        lease: ReaderLease | None = None
        steps: list[pb.Blocks] = []
        source, request_id = pb.EngineRef(), request.reference.request_id
        try:
            for message in request.home.typed(stream):
                kind = message.WhichOneof("message")
                if kind == "accepted":
                    accepted = message.accepted
                    source, request_id = accepted.source, accepted.request_id or request_id
                    remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
                    lease = ReaderLease(accepted.lease_id, sent_at, remaining, every)
                    self._renewals.keep(lease, request.home, self._reader, read._extend)
                elif kind == "blocks":
                    steps.append(message.blocks)
                elif kind == "revoked":
                    reason = pb.RevokeReason.Name(message.revoked.reason).removeprefix("REVOKE_REASON_")
                    raise PublicationAborted(
                        f"the source no longer offers {request_id!r}: {reason}",
                        engine_id=request.reference.engine_id,
                        publication=request.reference.publication,
                    )
                elif kind == "complete" and lease is not None:
                    return _Grant(lease, source, request_id, _joined(steps), message.complete.payload)
            raise self._timeout(request)
        except KvferryError as error:
            if lease is None:
                raise
            self._renewals.drop(lease)
            if error.retryable and request.deadline - now() < BACKOFF_FIRST:
                # The source was heard, its blocks were not: the call's own deadline cut the stream.
                error = self._timeout(request)
            cancelled = woken.is_set()
            if cancelled or not error.retryable:
                # The read is over, so the source need not wait for the lease to run out.
                grant = _Grant(lease, source, request_id, {}, b"")
                self._report(request, grant, pb.RANK_OUTCOME_CANCELLED if cancelled else pb.RANK_OUTCOME_FAILED, 0)
            raise error from None
        finally:
            read._cancel_by(None)
            stream.cancel()

    def _timeout(self, request: ReadRequest) -> PublicationTimeout:
        return PublicationTimeout(
            "the publication was not complete in time",
            engine_id=request.reference.engine_id,
            publication=request.reference.publication,
        )

    def _transferred(
        self, request: ReadRequest, read: Read, grant: _Grant, peer: Peer, expansion: Expansion
    ) -> Transfer:
        """Move the bytes and wait for the end, at most until the read's own deadline."""
        parts = [
            Part(peer.agents[source.source_rank], source.descriptors, source.staged) for source in expansion.sources
        ]
        transfer = self._transport.start(parts, deadline=grant.lease.deadline, label=read.read_id)
        read._moving(transfer)
        # A renewal may have been acknowledged between the two lines above.
        transfer.extend(grant.lease.deadline)
        if not transfer.wait(max(0.0, request.deadline - now())):
            transfer.cancel()
            raise TransferStuck(f"read {read.read_id} did not end in time", quiet=transfer.quiet, read_id=read.read_id)
        return transfer

    def _raise_unless_done(self, request: ReadRequest, read: Read, grant: _Grant, transfer: Transfer) -> None:
        if transfer.state is TransferState.DONE:
            # Judged here again, by the process that holds the lease (PROTOCOL, Leases 4).
            if transfer.ended_at is not None and not grant.lease.live(transfer.ended_at):
                raise TransferExpired(f"read {read.read_id} ended after its lease", read_id=read.read_id)
            return
        if transfer.state is TransferState.FAILED:
            self._peers.forget(request.home.address, grant.source.engine_id, grant.source.incarnation)
        raise transfer.error or TransferFailed(f"read {read.read_id} failed", quiet=transfer.quiet)

    def _report(
        self, request: ReadRequest, grant: _Grant, outcome: pb.RankOutcome.ValueType, moved: int
    ) -> pb.Verdict.ValueType | None:
        """Tell the home how this rank's share ended; its verdict, or None if it did not answer in time."""
        try:
            return self._tell(request, grant, outcome, moved, VERDICT_TIMEOUT)
        except KvferryError as error:
            logger.info("report to %s not answered: %s", request.home.address, error)
            return None

    def _report_until_answered(self, request: ReadRequest, grant: _Grant, moved: int) -> None:
        """The caller has its result; the source still waits for this report, for as long as the lease runs."""
        try:
            retrying(lambda left: self._tell(request, grant, pb.RANK_OUTCOME_DONE, moved, left), grant.lease.deadline)
        except KvferryError as error:
            logger.info("report to %s given up: %s", request.home.address, error)

    def _tell(
        self, request: ReadRequest, grant: _Grant, outcome: pb.RankOutcome.ValueType, moved: int, timeout: float
    ) -> pb.Verdict.ValueType:
        report = pb.RankReport(rank=self._rank, outcome=outcome, bytes=moved)
        done = pb.ReadDone(lease_id=grant.lease.lease_id, reports=[report])
        notify = pb.NotifyRequest(sender=self._reader, notifications=[pb.Notification(read_done=done)])
        return request.home.notify_one(notify, timeout).read_ended.verdict


_OUTCOMES: dict[type[KvferryError], pb.RankOutcome.ValueType] = {
    TransferCancelled: pb.RANK_OUTCOME_CANCELLED,
    TransferExpired: pb.RANK_OUTCOME_EXPIRED,
}


def _joined(steps: list[pb.Blocks]) -> dict[str, Blocks]:
    """The steps of a publication as one list per group; each step goes on where the one before ended."""
    pieces: dict[str, list[pb.GroupBlocks]] = {}
    for step in sorted(steps, key=lambda step: step.step):
        for group in step.groups:
            pieces.setdefault(group.group, []).append(group)
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
