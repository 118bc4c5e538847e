"""One read of an engine in its scheduler's port, and the values that the engine receives of the read."""

from __future__ import annotations

from kvferry._control.acquire_request import AcquireRequest
from kvferry._control.granted_steps import GrantedPart
from kvferry._loop import Loop
from kvferry._reads.leased_read import LeasedRead, ReadStage
from kvferry._wire.publication import told_fields
from kvferry.engine.values import GrantStep, Offer, ReadEnd, ReadSource
from kvferry.errors import TransferStuck
from kvferry.geometry.blocks import BlockRuns, joined, runs_of


class SchedulerRead(LeasedRead):
    """One read of the engine.

    Attributes:
        granted: the source's blocks of the read's offer, by group, and `latest` the part with the last of them.
        steps: number of the steps that were returned since the attach.
        more: blocks that are neither in the offer nor in a returned step.
        lost: ids of the blocks that the read writes to, by group.
        written: the key of the read's claim on the blocks, see `Writes`.
    """

    def __init__(self, loop: Loop, request: AcquireRequest, request_id: str, ranks: frozenset[int]) -> None:
        super().__init__(loop, request, ranks)
        self.request_id = request_id
        self.granted: dict[str, BlockRuns] = {}
        self.latest = GrantedPart({})
        self.steps = 0
        self.more: list[GrantedPart] = []
        self.lost: dict[str, tuple[int, ...]] = {}
        self.written: int | None = None

    def overdue(self) -> TransferStuck:
        read_id, request = self.read_id, f"request {self.request_id!r}"
        if self.stage is ReadStage.GRANTED:
            return TransferStuck(
                f"{request} was granted but not attached in time: attach it, or cancel it", read_id=read_id
            )
        if not self.silent:
            return TransferStuck(f"read {read_id} of {request} ended after its timeout", read_id=read_id)
        silent = ", ".join(map(str, self.silent))
        message = (
            f"read {read_id} of {request} did not end in time: rank {silent} has not reported its end; was the grant "
            "started there, and is what the worker's `finished` returns collected here?"
        )
        return TransferStuck(message, quiet=False, read_id=read_id, ranks=silent)


def offer_of(read: SchedulerRead, timeout: float) -> Offer | None:
    """Return the offer of a read; None: not granted. Until the attach, the offer grows by the blocks that the source
    publishes.

    The offer grows when the engine asks for it, and by runs alone: an engine may keep a request unattached for long
    while its source publishes many steps, and no step of the engine may wait for that.
    """
    acquired, reference = read.acquired, read.request.reference
    if acquired is None:
        return None
    if read.stage is ReadStage.GRANTED and read.more:
        more, read.more = read.more, []
        read.latest = more[-1]
        for runs in runs_of(joined(part.blocks for part in more)):
            known = read.granted.get(runs.group)
            read.granted[runs.group] = runs if known is None else known.followed_by(runs)
    return Offer(
        request_id=read.request_id,
        read_id=read.read_id,
        home=reference.home,
        engine_id=acquired.source.engine_id,
        incarnation=acquired.source.incarnation,
        publication=reference.publication,
        reference=read.request.text,
        source_request_id=acquired.request_id,
        lease_id=acquired.lease.lease_id,
        timeout=timeout,
        granted=tuple(read.granted.values()),
        **told_fields(read.latest.told),
        traceparent=read.span.traceparent,
        complete=read.latest.complete,
        unfinished=read.latest.unfinished,
    )


def step_of(read: SchedulerRead) -> GrantStep:
    """Make one step of the blocks that workers have not received."""
    more, read.more = read.more, []
    read.steps += 1
    return GrantStep(
        read_id=read.read_id,
        index=read.steps,
        granted=runs_of(joined(part.blocks for part in more)),
        last=more[-1].complete,
        unfinished=more[-1].unfinished,
        lease_id=b"" if read.acquired is None else read.acquired.lease.lease_id,
    )


def end_of(read: SchedulerRead) -> ReadEnd:
    """Return the end of a read on all ranks together."""
    shares = [share.work for share in read.ends.values()]
    source: ReadSource | None = None
    if read.acquired is not None:
        engine, reference, theirs = read.acquired.source, read.request.reference, read.acquired.request_id
        source = ReadSource(reference.home, engine.engine_id, engine.incarnation, reference.publication, theirs)
    return ReadEnd(
        request_id=read.request_id,
        read_id=read.read_id,
        error=read.error,
        quiet=not read.not_quiet,
        ranks=len(read.ends),
        bytes=read.bytes,
        lost=read.lost if read.error is not None else {},
        confirmed=read.confirmed,
        **told_fields(read.told),
        source=source,
        times=read.stamps.times(shares),
        descriptors=sum(share.descriptors for share in shares),
        staged_bytes=sum(share.staged_bytes for share in shares),
        verified=sum(share.verified for share in shares),
        unverified=sum(share.unverified for share in shares),
        prompt=read.request.prompt.found,
    )
