"""The destination side: one rank's reads, each from its reference to the home's verdict.

Threading: `Reader.start` returns at once; every read then runs on a thread of its own, straight through: ask for the
blocks, handshake if the source is new, expand, hand the descriptors to the transport, wait, report. The bytes move on
the transport's threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry._clock import now
from kvferry._control.acquisition import Acquired, Acquirer, AcquireRequest
from kvferry._control.batches import read_done
from kvferry._control.connection import Control
from kvferry._control.judgement import Judgement, judge
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._control.reporting import Reporter
from kvferry._control.teller import Teller
from kvferry._reads.read import Read, ReadResult
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._reads.verifier import Arrived, Verifier
from kvferry._transport.transport import Transfer, TransferPart, TransferState, Transport
from kvferry._wire.token import EngineToken
from kvferry.errors import (
    EngineUnknown,
    KvferryError,
    LimitReached,
    PeerRestarted,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
    TransferStuck,
)
from kvferry.geometry.blocks import Blocks
from kvferry.planner.expansion import Expansion
from kvferry.planner.summed_blocks import Verification
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 1.0
"""Seconds to wait for the end of a thread that has nothing to do."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """What one read wants. See `Cache.read`."""

    home: Control
    reference: pb.Reference = field(repr=False)
    text: str = field(repr=False)
    blocks: Mapping[str, Blocks]
    tokens: tuple[int, int] | None
    layers: frozenset[str] | None
    parties: int
    expected_reads: int
    deadline: float


class Reader:
    """The reads of one destination rank.

    Args:
        token: of the destination engine.
        rank: this rank.
        transport: moves the bytes.
        peers: source engines.
        renewals: keeps leases alive.
        max_reads: reads at once; more are refused, since each holds a thread.
        verifier: compares what has arrived; None: integrity mode is off.
    """

    def __init__(
        self,
        token: EngineToken,
        rank: int,
        transport: Transport,
        peers: SourceEngines,
        renewals: Renewals,
        max_reads: int,
        verifier: Verifier | None = None,
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._peers = peers
        self._renewals = renewals
        self._reporter = Reporter(token.ref())
        self._teller = Teller(token.ref())
        self._acquirer = Acquirer(token, renewals, self._gave_up)
        self._lock = threading.Lock()
        self._max_reads = max_reads
        self._verifier = verifier
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
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            with self._lock:
                self._running.discard(read)
            raise LimitReached(f"no thread for a read: {error}", retry_after=0.1, limit="threads", value=0) from error
        return read

    def close(self) -> None:
        """Tell no home again how a read ended. Idempotent."""
        self._acquirer.close(CLOSE_TIMEOUT)
        self._teller.close()

    def running(self) -> tuple[Read, ...]:
        """Reads that have not ended."""
        with self._lock:
            return tuple(self._running)

    def _run(self, request: ReadRequest, read: Read) -> None:
        try:
            acquire = AcquireRequest(
                request.home,
                request.reference,
                request.text,
                read.read_id,
                request.parties,
                request.expected_reads,
                request.deadline,
            )
            grant = self._acquirer.acquire(acquire, read._cancellation, read._extend)
        except KvferryError as error:
            if isinstance(error, (PeerRestarted, EngineUnknown)):
                reference = request.reference
                self._peers.gone(request.home.address, reference.engine_id, reference.incarnation)
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

    def _move(self, request: ReadRequest, read: Read, grant: Acquired) -> None:
        """From the grant to the end; whatever happens, the home is told."""
        moved = 0
        try:
            # Renewals go on meanwhile; whether the lease lasted is judged at the end.
            source = grant.source
            peer = self._peers.get(request.home, source.engine_id, source.incarnation, request.text, request.deadline)
            expansion = peer.plan_of(request.layers).expand(grant.blocks, request.blocks, request.tokens)
            transfer = self._transferred(request, read, grant, peer, expansion)
            moved = transfer.progress().bytes_done
            ended_at = self._ended_well(request, read, grant, transfer)
            verification = self._verified(request, read, grant, peer)
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
        judgement = judge(ended_at, grant.lease.deadline, verdict)
        if judgement is Judgement.EXPIRED:
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
            confirmed=judgement is Judgement.CONFIRMED,
            verification=verification,
        )
        self._ended(read, result, None)
        if unanswered:
            # The engine has its result; the source still waits for this, for as long as the lease runs.
            report = pb.RankReport(rank=self._rank, outcome=pb.RANK_OUTCOME_DONE, bytes=moved)
            lease = grant.lease
            self._teller.tell(request.home, read_done(lease.lease_id, [report]), lease.deadline)

    def _gave_up(self, home: Control, lease: ReaderLease, outcome: pb.RankOutcome.ValueType) -> None:
        report = pb.RankReport(rank=self._rank, outcome=outcome)
        self._teller.tell(home, read_done(lease.lease_id, [report]), lease.deadline)

    def _ended(self, read: Read, result: ReadResult | None, error: KvferryError | None) -> None:
        with self._lock:
            self._running.discard(read)
        read._end(result, error)

    def _transferred(
        self, request: ReadRequest, read: Read, grant: Acquired, peer: SourceEngine, expansion: Expansion
    ) -> Transfer:
        """Move the bytes and wait for the end, at most until the read's own deadline."""
        parts = [TransferPart.of(peer.agents[source.source_rank], source) for source in expansion.sources]
        transfer = read._begin(lambda: self._transport.start(parts, deadline=grant.lease.deadline, label=read.read_id))
        # A renewal may have been acknowledged between the two lines above.
        transfer.extend(grant.lease.deadline)
        if not transfer.wait(max(0.0, request.deadline - now())):
            transfer.cancel()
            stuck = TransferStuck(f"read {read.read_id} did not end in time", read_id=read.read_id)
            transfer.tell(stuck)
            raise stuck
        return transfer

    def _ended_well(self, request: ReadRequest, read: Read, grant: Acquired, transfer: Transfer) -> float:
        """When the transfer's last part ended, within the lease; raises if it did not."""
        if transfer.state is TransferState.DONE:
            ended_at = now() if transfer.ended_at is None else transfer.ended_at
            # Judged here again, by the process that holds the lease (PROTOCOL, Leases 4).
            if judge(ended_at, grant.lease.deadline, None) is Judgement.EXPIRED:
                raise TransferExpired(f"read {read.read_id} ended after its lease", read_id=read.read_id)
            self._peers.succeeded(request.home.address, grant.source.engine_id, grant.source.incarnation)
            return ended_at
        if transfer.state is TransferState.FAILED:
            self._peers.failed(request.home.address, grant.source.engine_id, grant.source.incarnation)
        raise transfer.error or TransferFailed(f"read {read.read_id} failed", quiet=transfer.quiet)

    def _verified(self, request: ReadRequest, read: Read, grant: Acquired, peer: SourceEngine) -> Verification | None:
        """What integrity mode says of the bytes; raises `DataLoss`."""
        if self._verifier is None:
            return None
        arrived = Arrived(
            home=request.home,
            lease=grant.lease,
            publication=request.reference.publication,
            plan=peer.plan_of(request.layers),
            granted=grant.blocks,
            blocks=request.blocks,
            tokens=request.tokens,
            deadline=request.deadline,
            check=read._cancellation.check,
        )
        return self._verifier.verify(arrived)

    def _report(
        self, request: ReadRequest, grant: Acquired, outcome: pb.RankOutcome.ValueType, moved: int
    ) -> pb.Verdict.ValueType | None:
        report = pb.RankReport(rank=self._rank, outcome=outcome, bytes=moved)
        return self._reporter.report(request.home, grant.lease, [report])


_OUTCOMES: dict[type[KvferryError], pb.RankOutcome.ValueType] = {
    TransferCancelled: pb.RANK_OUTCOME_CANCELLED,
    TransferExpired: pb.RANK_OUTCOME_EXPIRED,
}
