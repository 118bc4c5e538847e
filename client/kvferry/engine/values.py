"""Plain values that an engine passes between its scheduler and its workers.

They can be pickled. Their fields are typed, and hold only dataclasses, tuples, mappings, strings, numbers and bytes, so
that libraries such as msgspec and pydantic encode them, and decode and check them by their types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from kvferry._arguments import integer
from kvferry._reads.leased_read import ReadTimes, ShareWork
from kvferry._wire.publication import Told
from kvferry.errors import KvferryError, from_name
from kvferry.geometry.blocks import BlockRuns, Blocks, Unfinished


@dataclass(frozen=True, slots=True)
class Offer(Told):
    """Names the source's blocks, which are pinned for a request that has no blocks of its own yet.

    Returned by `SchedulerPort.granted`. `SchedulerPort.attach` adds blocks to read into, and returns the `Grant` that
    workers start. Has the attributes of `Told` as well. `ReadEnd` has them, too: without a lease, they are the source's
    only if the read ends well.

    Attributes:
        request_id: the reader engine's name for the request.
        read_id: name of this read; the same on all ranks.
        home, engine_id, incarnation, publication: address of the source's home, the source engine, and the number of
            its publication.
        reference: the publication's reference, a capability; entitles ranks to the handshake with the source.
        source_request_id: the source's name for the request.
        lease_id: id of the lease. A secret: its owner can end the lease. Empty: the blocks are those in the
            reference, and the home says at the end of the read whether they were still published.
        timeout: seconds left until the read fails (R5), counted from when the port returned this value.
        granted: the source's blocks by group, as far as they are known; see `blocks`.
        traceparent: of the read's span, for the spans of its ranks; empty: not traced.
        complete: the source has published all blocks, and `granted` are all. False only for a read that was acquired
            with ``progressive=True``; `SchedulerPort.attach` then needs `tokens`, and `SchedulerPort.grant_steps`
            returns the other blocks as they are published.
        unfinished: the blocks after `granted` of which only some layers are complete; None: there are none.
    """

    request_id: str
    read_id: str
    home: str
    engine_id: str
    incarnation: bytes
    publication: int
    reference: str = field(repr=False)
    source_request_id: str
    lease_id: bytes = field(repr=False)
    timeout: float
    granted: tuple[BlockRuns, ...]
    traceparent: str = field(default="", kw_only=True)
    complete: bool = field(default=True, kw_only=True)
    unfinished: Unfinished | None = field(default=None, kw_only=True)

    def blocks(self) -> dict[str, Blocks]:
        """Decode the source's blocks, by group."""
        return {runs.group: runs.blocks() for runs in self.granted}

    def attached(self, local: tuple[BlockRuns, ...], tokens: tuple[int, int] | None, *, timeout: float) -> Grant:
        """Make a grant of this offer: add the blocks to read into."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Grant(**{**given, "timeout": timeout}, local=local, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Grant(Offer):
    """An order to workers to read from a publication whose lease their scheduler holds: an `Offer` with blocks to read
    into. Has the attributes of `Offer`, and these:

    Attributes:
        local: the blocks to read into, by group; see `local_blocks`.
        tokens: the tokens wanted, ``[a, b)``; None: all published tokens.
    """

    local: tuple[BlockRuns, ...] = ()
    tokens: tuple[int, int] | None = None

    def local_blocks(self) -> dict[str, Blocks]:
        """Decode the blocks to read into, by group."""
        return {runs.group: runs.blocks() for runs in self.local}


@dataclass(frozen=True, slots=True)
class GrantStep:
    """The blocks that the source of a `Grant` has published since: for `WorkerPort.add_step` on every rank.

    Workers may receive a step twice, before its grant, or out of order.

    Attributes:
        index: from 1, without gaps within a read; the `Grant` itself stands for 0.
        granted: the new blocks by group; each continues where the step before ended.
        last: no step follows.
        unfinished: the blocks after these of which only some layers are complete; None: there are none.
        lease_id: the present id of the lease, which differs from the grant's if the home has restarted since. A secret.
    """

    read_id: str
    index: int
    granted: tuple[BlockRuns, ...]
    last: bool
    unfinished: Unfinished | None = None
    lease_id: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        integer("index", self.index, 1)

    def blocks(self) -> dict[str, Blocks]:
        """Decode the source's blocks, by group."""
        return {runs.group: runs.blocks() for runs in self.granted}


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of one rank's share of a read.

    Attributes:
        ok: every byte of the share has arrived; `bytes` is their number.
        quiet: no write to the blocks is possible any more.
        lost: ids of the blocks whose bytes do not count, by group; empty if `ok`.
        error_name, message, values, retry_after: class and contents of the error; empty if `ok`.
    """

    read_id: str
    request_id: str
    ok: bool
    quiet: bool
    bytes: int
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    error_name: str = ""
    message: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    retry_after: float | None = None
    work: ShareWork = field(default=ShareWork(), compare=False)

    def error(self) -> KvferryError | None:
        """Rebuild the typed error with which the share ended; None if `ok`."""
        if self.ok:
            return None
        return from_name(self.error_name, self.message, self.values, retry_after=self.retry_after, quiet=self.quiet)


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """Reports the ends of shares on one worker to the scheduler.

    Attributes:
        ended, failed: shares that succeeded, and that failed.
        quiesced: read_ids of shares that had failed without being quiet, and are quiet now.
    """

    rank: int
    ended: tuple[RankEnd, ...] = ()
    failed: tuple[RankEnd, ...] = ()
    quiesced: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.ended or self.failed or self.quiesced)


@dataclass(frozen=True, slots=True)
class ReadSource:
    """Names the source of a read, as the source's log does: see `Offer`; `request_id` is the source's. Contains no
    secret."""

    home: str
    engine_id: str
    incarnation: bytes
    publication: int
    request_id: str


@dataclass(frozen=True, slots=True)
class ReadEnd(Told):
    """The end of a read on all ranks together. Has the attributes of `Told` as well, which are empty if they came from
    a reference, and the read failed.

    Attributes:
        error: why the bytes do not count; None: they count.
        quiet: no write to the blocks is possible any more, on any rank.
        ranks: number of ranks that have reported: all of them, unless the scheduler's port gave up waiting.
        lost: ids of the blocks whose bytes do not count, by group: all blocks of a failed read.
        confirmed: see `ReadResult`.
        source: None: no home has granted the read.
        times: of the stages, for metrics.
        bytes, descriptors, staged_bytes, verified, unverified: of all ranks; see `ShareWork`.
        prompt: whether the source has marked the same prompt; see `ReadStats.prompts`.
    """

    request_id: str
    read_id: str
    error: KvferryError | None
    quiet: bool
    ranks: int
    bytes: int
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    confirmed: bool = False
    source: ReadSource | None = None
    times: ReadTimes = field(default=ReadTimes(), compare=False)
    descriptors: int = 0
    staged_bytes: int = 0
    verified: int = 0
    unverified: int = 0
    prompt: str = "unknown"


@dataclass(frozen=True, slots=True)
class Finished:
    """Lists the reads that have ended since the last call of `SchedulerPort.finished`.

    Attributes:
        reads: ends of reads; each read of the engine appears exactly once.
        quiesced: request_ids of reads that had ended without being quiet, and are quiet now.
    """

    reads: tuple[ReadEnd, ...] = ()
    quiesced: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether any read has ended or become quiet."""
        return bool(self.reads or self.quiesced)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts what one engine has under way. `Client.stats` has the totals since the start.

    Attributes:
        pinned: publications that `SchedulerPort.released` has not returned.
        waiting, granted, reading, judging: reads in progress, by stage.
        uncertain: ended reads whose blocks may still be written to.
    """

    pinned: int
    waiting: int
    granted: int
    reading: int
    judging: int
    uncertain: int

    @property
    def quiet(self) -> bool:
        """Whether no block is pinned for readers, and no read is in progress or may still write: an engine that takes
        no new work may use all of its memory for another purpose."""
        return not any(astuple(self))
