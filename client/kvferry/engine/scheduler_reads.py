"""The destination side of a scheduler: leases asked for ahead of time, held while all ranks read, and judged once.

    acquire ──► WAITING ──► GRANTED ──(attach)──► READING ──(all ranks have ended)──► JUDGING ──► its ReadEnd
                   └──► REFUSED: `granted` raises it

A read of which a rank has failed, whose lease has ended, or that was cancelled is stopped on the others, and ends when
all have said how it ended for them.
"""

from __future__ import annotations

import enum
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from kvferry._clock import now
from kvferry._control.acquisition import Acquired, AcquireRequest, Cancellation
from kvferry._control.block_use import Writes
from kvferry._control.judgement import Judgement, judge
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.reporting import VERDICT_TIMEOUT
from kvferry._engine_spec import EngineSpec
from kvferry._threads import start_thread
from kvferry._work_queue import WorkQueue
from kvferry.engine.values import BlockRuns, Finished, Grant, Offer, RankEnd, ReadEnd, WorkerOutput
from kvferry.errors import (
    Closed,
    InvalidField,
    KvferryError,
    LimitReached,
    TransferCancelled,
    TransferError,
    TransferExpired,
    TransferFailed,
    TransferStuck,
    WrongState,
)
from kvferry.geometry.blocks import Blocks
from kvferry.planner.request_blocks import written
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.25
"""Seconds between looks at the deadlines of reads under way."""

WORKERS_GRACE = 10.0
"""Seconds after a read's deadline for which its workers are waited for; they end it by themselves."""

LAST_WORD = 1.0
"""Seconds for a home to hear, when the port is closed, that a lease is not needed; else it ends with its time."""


class ReadStage(enum.Enum):
    """Where a read stands; see the module."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"
    READING = "reading"
    JUDGING = "judging"
    ENDED = "ended"


UNDER_WAY = (ReadStage.GRANTED, ReadStage.READING, ReadStage.JUDGING)
"""Stages whose time is looked at."""


@dataclass(slots=True, eq=False)
class _Read:
    """One read of the engine.

    Attributes:
        error: why it fails, once it is known that it does.
        ends: how it ended for each rank that has said so.
        loud: ranks that ended it and still may be written to.
        ended_at: when the last rank's good end came here, before which its bytes had arrived.
        withheld: its end, until it is quiet.
        written: names what it writes to, see `Writes`.
    """

    request: AcquireRequest
    request_id: str
    cancellation: Cancellation
    stage: ReadStage = ReadStage.WAITING
    acquired: Acquired | None = None
    offer: Offer | None = None
    error: KvferryError | None = None
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    loud: set[int] = field(default_factory=set)
    ended_at: float = 0.0
    withheld: ReadEnd | None = None
    written: object = None

    @property
    def read_id(self) -> str:
        return self.request.read_id


class Reads:
    """The reads of one engine. Thread-safe; nothing but `close` waits.

    Args:
        spec: the engine.
        holder: of its leases.
        writes: the blocks that its reads write.
        max_waiting: acquisitions that may wait at once; each holds a thread.
        hold_until_quiet: `finished` withholds reads that failed until nothing can write to their blocks any more.

    Attributes:
        counts: ends of reads by kind, since the start: "done", "failed", "cancelled", "expired", "refused".
        bytes: read by all ranks, since the start.
    """

    def __init__(
        self, spec: EngineSpec, holder: LeaseHolder, writes: Writes, max_waiting: int, *, hold_until_quiet: bool
    ) -> None:
        self._spec = spec
        self._writes = writes
        self._holder = holder
        self._max_waiting = max_waiting
        self._hold_until_quiet = hold_until_quiet
        self._lock = threading.Lock()
        self._acquisition_ended = threading.Condition(self._lock)
        self._acquiring = 0
        """Threads of acquisitions, those of forgotten reads included."""
        self._by_request: dict[str, _Read] = {}
        self._by_id: dict[str, _Read] = {}
        self._ended: list[ReadEnd] = []
        self._quiesced: list[str] = []
        self._cancels: list[str] = []
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self._closed = False
        self._work = WorkQueue(f"kvferry-leases-{spec.engine_id}", self._look)

    def acquire(self, request_id: str, reference: str, expected_reads: int, timeout: float) -> None:
        """See `SchedulerPort.acquire`."""
        read_id = secrets.token_hex(8)
        request = self._holder.request(
            reference, read_id, parties=self._spec.num_ranks, expected_reads=expected_reads, timeout=timeout
        )
        read = _Read(request, request_id, Cancellation(read_id))
        with self._lock:
            self._check_open()
            if request_id in self._by_request:
                raise WrongState(
                    f"request {request_id!r} is being read already: cancel it first, and acquire it again when "
                    "`finished` has named it, or give this read another request_id",
                    request_id=request_id,
                )
            waiting = self._count(ReadStage.WAITING)
            if waiting >= self._max_waiting:
                raise LimitReached(
                    f"{waiting} reads wait for their publications",
                    retry_after=0.1,
                    limit="max_waiting",
                    value=waiting,
                )
            self._by_request[request_id] = self._by_id[read_id] = read
            self._acquiring += 1
        try:
            start_thread(partial(self._acquire, read), f"kvferry-acquire-{request_id}")
        except KvferryError:
            with self._lock:
                self._acquiring -= 1
                self._forget(read)
            raise

    def granted(self, request_id: str) -> Offer | None:
        """See `SchedulerPort.granted`."""
        with self._lock:
            read = self._find(request_id)
            if read.stage is ReadStage.REFUSED and read.error is not None:
                self._forget(read)
                raise read.error
            return None if read.offer is None else replace(read.offer, timeout=self._left(read))

    def attach(
        self, request_id: str, blocks: Mapping[str, Blocks], tokens: tuple[int, int] | None, *, allow_overlap: bool
    ) -> Grant:
        """See `SchedulerPort.attach`."""
        with self._lock:
            read = self._find(request_id)
            if read.stage is ReadStage.REFUSED and read.error is not None:
                self._forget(read)
                raise read.error
            if read.stage is not ReadStage.GRANTED or read.offer is None:
                raise _not_attachable(request_id, read.stage)
            ids = written(self._spec.groups, read.offer.blocks(), blocks, tokens)
            read.written = self._writes.begin(read.read_id, ids, allow_overlap=allow_overlap)
            local = tuple(BlockRuns.of_blocks(name, listed) for name, listed in blocks.items())
            read.stage = ReadStage.READING
            read.lost = {name: tuple(listed.ids.tolist()) for name, listed in blocks.items()}
            grant = read.offer.attached(local, tokens, timeout=self._left(read))
        self._work.do(_nothing)
        return grant

    def decline(self, reference: str) -> None:
        """See `SchedulerPort.decline`."""
        self._holder.check(reference)
        with self._lock:
            self._check_open()
            reads = [read for read in self._by_id.values() if read.request.text == reference]
            early = [read for read in reads if read.stage in (ReadStage.WAITING, ReadStage.GRANTED)]
            leases = [read.acquired.lease for read in early if read.acquired is not None]
            for read in early:
                self._withdraw(read)
        self._work.do(partial(self._holder.decline, reference, leases))

    def cancel(self, request_id: str) -> bool:
        """See `SchedulerPort.cancel`."""
        with self._lock:
            read = self._by_request.get(request_id)
            if read is None:
                return False
            if read.stage in (ReadStage.WAITING, ReadStage.GRANTED):
                self._withdraw(read)
                if read.acquired is not None:
                    self._work.do(partial(self._holder.cancel, read.request.home, read.acquired.lease))
            elif read.stage is ReadStage.REFUSED:
                self._forget(read)
            elif read.stage is ReadStage.READING:
                self._fail(read, TransferCancelled(f"read {read.read_id} was cancelled", read_id=read.read_id))
            return True

    def collect(self, output: WorkerOutput) -> None:
        """See `SchedulerPort.collect`."""
        if not 0 <= output.rank < self._spec.num_ranks:
            raise InvalidField("rank", output.rank, f"below {self._spec.num_ranks}")
        with self._lock:
            for end in (*output.ended, *output.failed):
                read = self._by_id.get(end.read_id)
                if read is not None and output.rank not in read.ends:
                    self._rank_ended(read, output.rank, end)
            for read_id in output.quiesced:
                read = self._by_id.get(read_id)
                if read is not None:
                    read.loud.discard(output.rank)
                    self._settle(read)

    def take_cancels(self) -> list[str]:
        """See `SchedulerPort.cancels`."""
        with self._lock:
            found, self._cancels = self._cancels, []
        return found

    def take_finished(self) -> Finished:
        """See `SchedulerPort.finished`."""
        with self._lock:
            found = Finished(tuple(self._ended), tuple(self._quiesced))
            self._ended, self._quiesced = [], []
        return found

    def stages(self) -> Counter[ReadStage]:
        """How many reads stand where; those that ended and are not quiet count as ENDED."""
        with self._lock:
            return Counter(read.stage for read in self._by_id.values())

    def close(self, timeout: float) -> None:
        """Cancel everything at the homes, and wait at most `timeout` seconds until they have heard it: a lease that
        was accepted pins its source until it ends. Then end the thread. Idempotent."""
        deadline = now() + timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for read in self._by_id.values():
                self._work.do(read.cancellation.cancel)
                if read.acquired is not None and read.stage is not ReadStage.ENDED:
                    self._work.do(partial(self._holder.end, read.request.home, read.acquired, LAST_WORD))
        self._work.close(timeout)
        with self._lock:
            self._acquisition_ended.wait_for(lambda: not self._acquiring, max(0.0, deadline - now()))
        self._holder.close(max(0.0, deadline - now()))

    # On the thread of an acquisition.

    def _acquire(self, read: _Read) -> None:
        try:
            self._wait_granted(read)
        finally:
            with self._lock:
                self._acquiring -= 1
                self._acquisition_ended.notify_all()

    def _wait_granted(self, read: _Read) -> None:
        error: KvferryError
        try:
            granted = self._holder.acquire(read.request, read.cancellation)
        except KvferryError as failure:
            error = failure
        except Exception as failure:
            logger.exception("read %s was not acquired", read.read_id)
            error = TransferFailed(f"read {read.read_id}: {failure!r}")
        else:
            with self._lock:
                wanted = read.stage is ReadStage.WAITING
                if wanted:
                    read.acquired, read.offer, read.stage = granted, _offer(read, granted), ReadStage.GRANTED
            if wanted:
                self._work.do(_nothing)
            else:
                self._let_go(read, granted)
            return
        with self._lock:
            if read.stage is ReadStage.WAITING:
                read.error, read.stage = error, ReadStage.REFUSED
                self.counts["refused"] += 1

    # On the desk's thread.

    def _look(self) -> float | None:
        """Look at deadlines; answers when to look again."""
        with self._lock:
            under_way = [read for read in self._by_id.values() if read.stage in UNDER_WAY]
            for read in under_way:
                self._judge_time(read)
            return LOOK_EVERY if under_way else None

    def _judge_time(self, read: _Read) -> None:
        if read.acquired is None:
            return
        time, read_id = now(), read.read_id
        if read.stage is ReadStage.JUDGING:
            if time >= read.ended_at + VERDICT_TIMEOUT + LOOK_EVERY:
                self._judged(read, None)
            return
        overdue = time >= read.request.deadline
        if read.error is None and not read.acquired.lease.live(time):
            self._fail(read, TransferExpired(f"read {read_id}: its lease ended before its last byte", read_id=read_id))
        elif read.error is None and overdue:
            self._fail(read, self._overdue(read))
        if read.stage is ReadStage.GRANTED and read.error is not None:
            read.stage, read.offer = ReadStage.REFUSED, None
            self.counts["refused"] += 1
            self._work.do(partial(self._let_go, read, read.acquired))
        elif read.stage is ReadStage.READING and time >= read.request.deadline + WORKERS_GRACE:
            read.loud.update(set(range(self._spec.num_ranks)) - set(read.ends))
            self._all_ended(read)

    def _overdue(self, read: _Read) -> TransferStuck:
        read_id = read.read_id
        if read.stage is ReadStage.GRANTED:
            message = f"request {read.request_id!r} was granted, and given no blocks in time: attach it, or cancel it"
            return TransferStuck(message, read_id=read_id)
        silent = ", ".join(str(rank) for rank in range(self._spec.num_ranks) if rank not in read.ends)
        message = (
            f"read {read_id} of request {read.request_id!r} did not end in time: rank {silent} has not reported its "
            "end; was the grant started there, and is what the worker's `finished` returns collected here?"
        )
        return TransferStuck(message, quiet=False, read_id=read_id, ranks=silent)

    def _let_go(self, read: _Read, granted: Acquired) -> None:
        self._holder.drop(granted)
        self._holder.cancel(read.request.home, granted.lease)

    def _report(self, read: _Read, lease: ReaderLease) -> None:
        reports = [
            pb.RankReport(rank=rank, outcome=_outcome(end), bytes=end.bytes) for rank, end in sorted(read.ends.items())
        ]
        self._holder.report(read.request.home, lease, reports, partial(self._answered, read))

    # On a thread of gRPC, or the desk's.

    def _answered(self, read: _Read, verdict: pb.Verdict.ValueType | None) -> None:
        with self._lock:
            self._judged(read, verdict)

    # With the lock held.

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the port of engine {self._spec.engine_id!r} is closed")

    def _judged(self, read: _Read, verdict: pb.Verdict.ValueType | None) -> None:
        """The home's verdict, or that there is none, and the reader's own deadline decides."""
        if read.stage is not ReadStage.JUDGING or read.acquired is None:
            return
        judgement = judge(read.ended_at, read.acquired.lease.deadline, verdict)
        if judgement is Judgement.EXPIRED:
            read_id = read.read_id
            read.error = TransferExpired(f"read {read_id}: the home says that its lease ended", read_id=read_id)
        self._end(read, confirmed=judgement is Judgement.CONFIRMED)

    def _find(self, request_id: str) -> _Read:
        read = self._by_request.get(request_id)
        if read is None:
            raise WrongState(
                f"request {request_id!r} is not being read: acquire it first; one that has ended or was refused has to "
                "be acquired again",
                request_id=request_id,
            )
        return read

    def _count(self, stage: ReadStage) -> int:
        return sum(read.stage is stage for read in self._by_id.values())

    def _left(self, read: _Read) -> float:
        return max(0.0, read.request.deadline - now())

    def _forget(self, read: _Read) -> None:
        self._writes.end(read.written)
        self._by_id.pop(read.read_id, None)
        if self._by_request.get(read.request_id) is read:
            del self._by_request[read.request_id]

    def _withdraw(self, read: _Read) -> None:
        """Nobody wants it, and no worker has heard of it."""
        read.stage = ReadStage.ENDED
        self.counts["cancelled"] += 1
        self._forget(read)
        self._work.do(read.cancellation.cancel)
        if read.acquired is not None:
            self._work.do(partial(self._holder.drop, read.acquired))

    def _fail(self, read: _Read, error: KvferryError) -> None:
        """It cannot end well: stop it where it goes on."""
        if read.error is None:
            read.error = error
            if read.stage is ReadStage.READING and len(read.ends) < self._spec.num_ranks:
                self._cancels.append(read.read_id)

    def _rank_ended(self, read: _Read, rank: int, end: RankEnd) -> None:
        read.ends[rank] = end
        if end.quiet:
            read.loud.discard(rank)
        else:
            read.loud.add(rank)
        if read.stage is ReadStage.ENDED:
            # It was given up before this rank had said anything.
            self._settle(read)
            return
        error = end.error()
        if error is not None:
            self._fail(read, error)
        if read.stage is ReadStage.READING and len(read.ends) == self._spec.num_ranks:
            self._all_ended(read)

    def _all_ended(self, read: _Read) -> None:
        if read.acquired is None:
            return
        read.ended_at = now()
        if read.error is None and not read.acquired.lease.live(read.ended_at):
            read.error = TransferExpired(f"read {read.read_id} ended after its lease", read_id=read.read_id)
        self._work.do(partial(self._report, read, read.acquired.lease))
        if read.error is None:
            read.stage = ReadStage.JUDGING
        else:
            self._end(read, confirmed=False)

    def _end(self, read: _Read, *, confirmed: bool) -> None:
        read.stage = ReadStage.ENDED
        if read.acquired is not None:
            self._work.do(partial(self._holder.drop, read.acquired))
        _tell_quiet(read)
        moved = sum(end.bytes for end in read.ends.values())
        self.counts[_kind(read.error)] += 1
        self.bytes += moved
        end = ReadEnd(
            request_id=read.request_id,
            read_id=read.read_id,
            error=read.error,
            quiet=not read.loud,
            ranks=len(read.ends),
            bytes=moved,
            lost=read.lost if read.error is not None else {},
            confirmed=confirmed,
            payload=b"" if read.offer is None else read.offer.payload,
        )
        if read.loud and self._hold_until_quiet:
            read.withheld = end
            return
        self._ended.append(end)
        if self._by_request.get(read.request_id) is read:
            del self._by_request[read.request_id]
        if not read.loud:
            self._forget(read)

    def _settle(self, read: _Read) -> None:
        """A rank became quiet."""
        if read.stage is not ReadStage.ENDED or read.loud:
            return
        _tell_quiet(read)
        if read.withheld is not None:
            self._ended.append(replace(read.withheld, quiet=True))
        else:
            self._quiesced.append(read.request_id)
        self._forget(read)


def _not_attachable(request_id: str, stage: ReadStage) -> WrongState:
    if stage is ReadStage.WAITING:
        message = f"request {request_id!r} is waiting for its source: attach it when granted() has returned its Offer"
    else:
        message = f"request {request_id!r} was given its blocks already: attach each request once"
    return WrongState(message, request_id=request_id, stage=stage.value)


def _nothing() -> None:
    """Has the desk look at deadlines again."""


def _tell_quiet(read: _Read) -> None:
    """The error that the engine gets says the same of its blocks as its `ReadEnd`."""
    if isinstance(read.error, TransferError):
        read.error.quiet = not read.loud


def _offer(read: _Read, granted: Acquired) -> Offer:
    reference = read.request.reference
    return Offer(
        request_id=read.request_id,
        read_id=read.read_id,
        home=reference.home,
        engine_id=granted.source.engine_id,
        incarnation=granted.source.incarnation,
        publication=reference.publication,
        reference=read.request.text,
        source_request_id=granted.request_id,
        lease_id=granted.lease.lease_id,
        timeout=0.0,
        granted=tuple(BlockRuns.of_blocks(name, blocks) for name, blocks in granted.blocks.items()),
        payload=granted.payload,
    )


def _outcome(end: RankEnd) -> pb.RankOutcome.ValueType:
    if end.ok:
        return pb.RANK_OUTCOME_DONE
    cancelled = isinstance(end.error(), TransferCancelled)
    return pb.RANK_OUTCOME_CANCELLED if cancelled else pb.RANK_OUTCOME_FAILED


def _kind(error: KvferryError | None) -> str:
    if error is None:
        return "done"
    if isinstance(error, TransferExpired):
        return "expired"
    return "cancelled" if isinstance(error, TransferCancelled) else "failed"
