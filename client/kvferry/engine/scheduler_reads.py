"""The destination side of a scheduler: acquires leases ahead of time, holds them while all ranks read, and gives one
verdict on each read. See `kvferry._reads.leased_reads` for the stages of a read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.block_use import Writes
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.lease_holder import LeaseHolder
from kvferry._engine_spec import EngineSpec
from kvferry._loop import Loop, News
from kvferry._prompt import Prompt, check_within
from kvferry._reads.leased_read import ReadStage, ShareEnd
from kvferry._reads.leased_reads import LeasedReads
from kvferry._reads.meters import ReadMeter
from kvferry.engine.scheduler_read import SchedulerRead, end_of, offer_of, step_of
from kvferry.engine.values import Finished, Grant, GrantStep, Offer, ReadEnd, WorkerOutput
from kvferry.errors import (
    Closed,
    InvalidField,
    LimitReached,
    PromptMismatch,
    TransferCancelled,
    WrongState,
)
from kvferry.geometry.blocks import Blocks, runs_of, taken_end
from kvferry.planner.request_blocks import written

CANCEL_AGAIN = 10.0
"""Seconds after which ranks are asked again to cancel a read that has ended and is not quiet."""


class Reads(LeasedReads[SchedulerRead]):
    """The reads of one engine, for its `SchedulerPort`, which explains the methods of the same names. Every method may
    be called from any thread; only `close` waits.

    Attributes:
        news: set when `granted`, `grant_steps` or `finished` has something to return.
    """

    def __init__(
        self,
        loop: Loop,
        spec: EngineSpec,
        holder: LeaseHolder,
        writes: Writes,
        max_waiting: int,
        *,
        hold_until_quiet: bool,
        meter: ReadMeter,
    ) -> None:
        super().__init__(loop, holder, meter)
        self._spec = spec
        self._ranks = frozenset(range(spec.num_ranks))
        self._writes = writes
        self._max_waiting = max_waiting
        self._hold_until_quiet = hold_until_quiet
        self._by_request: dict[str, SchedulerRead] = {}
        self._by_id: dict[str, SchedulerRead] = {}
        self._waiting = 0
        self._ended: list[ReadEnd] = []
        self._quiesced: list[str] = []
        self._cancels: list[str] = []
        self._not_quiet: dict[SchedulerRead, float] = {}
        """Ended reads whose blocks may still be written to, and when to ask the ranks again to cancel them: a grant or
        a report may have been lost."""
        self._gained: dict[SchedulerRead, None] = {}
        """Attached reads whose sources have published more blocks."""
        self._changed: dict[str, None] = {}
        """Requests for which `granted` has a new result."""
        self.news = News()
        self._closed = False

    def acquire(self, request_id: str, request: AcquireRequest) -> None:
        read = SchedulerRead(self._loop, request, request_id, self._ranks)
        with self.lock:
            self._check_open()
            if request_id in self._by_request:
                raise WrongState(
                    f"request {request_id!r} is being read already: cancel it first, and acquire it again when "
                    "`finished` has named it, or give this read another request_id",
                    request_id=request_id,
                )
            if self._waiting >= self._max_waiting:
                message = f"{self._waiting} reads wait for their publications"
                raise LimitReached(message, retry_after=0.1, limit="max_waiting", value=self._waiting)
            # A hint grants it at once, so it may wait no more when it begins to count.
            self.start(read)
            self._waiting += 1
            self._by_request[request_id] = self._by_id[read.read_id] = read

    def granted(self, request_id: str) -> Offer | None:
        with self.lock:
            read = self._unrefused(request_id)
            return offer_of(read, self._left(read))

    def take_changed(self) -> list[str]:
        """See `SchedulerPort.news`."""
        if not self._changed:
            # Without the lock: an engine asks for each of its requests in each step.
            return []
        with self.lock:
            found = list(self._changed)
            self._changed.clear()
        return found

    def attach(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        tokens: tuple[int, int] | None,
        *,
        allow_overlap: bool,
        prompt: Prompt = Prompt.unknown,
    ) -> Grant:
        with self.lock:
            read = self._unrefused(request_id)
            offer = offer_of(read, self._left(read))
            if read.stage is not ReadStage.GRANTED or offer is None:
                advice = "has its blocks already: attach each request once"
                if read.stage is ReadStage.WAITING:
                    advice = "is waiting for its source: attach it after granted() has returned its Offer"
                raise WrongState(f"request {request_id!r} {advice}", request_id=request_id, stage=read.stage.value)
            offered = offer.blocks()
            if not offer.complete and tokens is None:
                raise InvalidField("tokens", None, "the tokens to read, since the offer is not complete")
            own = read.request.prompt
            check_within(prompt or own.prompt, tokens)
            own.prompt = prompt or own.prompt
            error = self.takes(read, taken_end(offered, blocks, tokens))
            if error is not None:
                self._forget(read)
                raise error
            ids = written(self._spec.groups, offered, blocks, tokens, more=not offer.complete)
            read.written = self._writes.begin(read.read_id, ids, allow_overlap=allow_overlap)
            read.lost = {name: tuple(listed.ids.tolist()) for name, listed in blocks.items()}
            grant = offer.attached(runs_of(blocks), tokens, timeout=self._left(read))
            self.begin(read)
            return grant

    def grant_steps(self) -> list[GrantStep]:
        with self.lock:
            found = [step_of(read) for read in self._gained if read.stage is ReadStage.READING and read.error is None]
            self._gained.clear()
        return found

    def decline(self, reference: str, prompt: Prompt) -> None:
        self._holder.check(reference, prompt)
        with self.lock:
            self._check_open()
            reads = [read for read in self._by_id.values() if read.request.is_for(reference)]
            for read in reads:
                if prompt and isinstance(read.error, PromptMismatch):
                    raise read.error
            for read in reads:
                if read.stage in (ReadStage.WAITING, ReadStage.GRANTED):
                    self._withdraw(read)
        if not self._loop.call(partial(self._holder.decline, reference)):
            raise Closed("the client is closed")

    def cancel(self, request_id: str) -> bool:
        with self.lock:
            read = self._by_request.get(request_id)
            if read is None:
                return False
            if read.stage in (ReadStage.WAITING, ReadStage.GRANTED):
                self._withdraw(read)
            elif read.stage is ReadStage.REFUSED:
                self._forget(read)
            else:
                error = TransferCancelled(f"read {read.read_id} was cancelled", read_id=read.read_id)
                if read.stage is ReadStage.READING:
                    self.fail(read, error)
                self.cancel_validation(read, error)
            return True

    def collect(self, output: WorkerOutput) -> None:
        if not 0 <= output.rank < self._spec.num_ranks:
            raise InvalidField("rank", output.rank, f"below {self._spec.num_ranks}")
        with self.lock:
            for end in (*output.ended, *output.failed):
                if (read := self._by_id.get(end.read_id)) is not None:
                    share = ShareEnd(end.error(), end.quiet, end.bytes, end.work)
                    self.share_ended(read, output.rank, share, self._loop.now())
            for read_id in output.quiesced:
                if (read := self._by_id.get(read_id)) is not None:
                    self.share_quiet(read, output.rank)

    def cancels(self) -> list[str]:
        with self.lock:
            found, self._cancels = self._cancels, []
            time = self._loop.now()
            for read in [read for read, at in self._not_quiet.items() if at <= time]:
                self._not_quiet[read] = time + CANCEL_AGAIN
                found.append(read.read_id)
        return found

    def finished(self) -> Finished:
        with self.lock:
            found = Finished(tuple(self._ended), tuple(self._quiesced))
            self._ended, self._quiesced = [], []
        return found

    def stages(self) -> Counter[ReadStage]:
        """Return the numbers of reads by stage; those that have ended may still write. Takes no lock, as
        `ReadMeter.stats`."""
        return Counter(read.stage for read in list(self._by_id.values()))

    def close(self, timeout: float) -> None:
        """Cancel all reads at their homes. Waits at most `timeout` seconds until the homes have the cancellations: an
        accepted lease pins its source's blocks until its end. Idempotent."""
        deadline = self._loop.now() + timeout
        with self.lock:
            if self._closed:
                return
            self._closed = True
            for read in tuple(self._by_id.values()):
                if read.stage is ReadStage.WAITING:
                    self._withdraw(read)
                else:
                    # A read in progress ends, and gives its lease back.
                    self.cancel_lead(read)
        # Once the client is closed, all reads have ended.
        with suppress(Closed):
            self._loop.run(self._end_all(deadline))

    async def _end_all(self, deadline: float) -> None:
        await self.wait_ended(max(0.0, deadline - self._loop.now()))
        await self._holder.close(max(0.0, deadline - self._loop.now()))

    # `LeasedReads`, which documents these, calls them with the lock held.

    def on_granted(self, read: SchedulerRead, acquired: Acquired) -> None:
        self._waiting -= 1
        read.granted, read.latest = {runs.group: runs for runs in runs_of(acquired.part.blocks)}, acquired.part
        self._changed[read.request_id] = None
        self.news.tell()

    def on_more(self, read: SchedulerRead, more: GrantedPart) -> None:
        if read.more:
            # The latest `unfinished` contains the earlier ones. A source may name thousands of layers one by one before
            # the engine asks.
            read.more[-1] = replace(read.more[-1], unfinished=None)
        read.more.append(more)
        if read.stage is ReadStage.READING:
            self._gained[read] = None
        else:
            self._changed[read.request_id] = None
        self.news.tell()

    def on_refused(self, read: SchedulerRead) -> None:
        if read.acquired is None:
            self._waiting -= 1
        self._changed[read.request_id] = None
        self.news.tell()

    def on_stop(self, read: SchedulerRead) -> None:
        self._cancels.append(read.read_id)

    def on_ended(self, read: SchedulerRead) -> None:
        if read.not_quiet:
            self._not_quiet[read] = self._loop.now() + CANCEL_AGAIN
        if read.not_quiet and self._hold_until_quiet:
            return
        self._ended.append(end_of(read))
        self.news.tell()
        self._free_request(read)
        if not read.not_quiet:
            self._forget(read)

    def on_quiesced(self, read: SchedulerRead) -> None:
        if self._hold_until_quiet:
            self._ended.append(end_of(read))
        else:
            self._quiesced.append(read.request_id)
        self.news.tell()
        self._forget(read)

    # Call these with the lock held.

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the port of engine {self._spec.engine_id!r} is closed")

    def _unrefused(self, request_id: str) -> SchedulerRead:
        """Return the read of a request. Raises `WrongState` if there is none, and the error of a refused read, which is
        then forgotten."""
        read = self._by_request.get(request_id)
        if read is None:
            raise WrongState(
                f"request {request_id!r} is not being read: acquire it first, and again if its read has ended or was "
                "refused",
                request_id=request_id,
            )
        if read.stage is ReadStage.REFUSED and read.error is not None:
            self._forget(read)
            raise read.error
        return read

    def _left(self, read: SchedulerRead) -> float:
        return max(0.0, read.request.deadline - self._loop.now())

    def _forget(self, read: SchedulerRead) -> None:
        self._writes.end(read.written)
        self._gained.pop(read, None)
        self._not_quiet.pop(read, None)
        self._by_id.pop(read.read_id, None)
        self._free_request(read)

    def _free_request(self, read: SchedulerRead) -> None:
        # Another read of the same request may have news.
        if self._by_request.get(read.request_id) is read:
            del self._by_request[read.request_id]
            self._changed.pop(read.request_id, None)

    def _withdraw(self, read: SchedulerRead) -> None:
        """Forget a read that is no longer wanted and that no worker has started."""
        if read.stage is ReadStage.WAITING:
            self._waiting -= 1
        self.withdraw(read)
        self._forget(read)
