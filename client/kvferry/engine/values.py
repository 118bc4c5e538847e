"""What passes between an engine's scheduler and its workers, in the engine's own way: plain values.

They pickle as they are. `plain` gives the same as dicts, lists, strings, numbers and bytes, for msgpack and its kin,
and `of` takes it back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvferry._arguments import integer, mapping, several, texts, token_range
from kvferry.errors import InvalidField, KvferryError, from_name
from kvferry.geometry.blocks import MAX_BLOCKS, Blocks

Plain = dict[str, object]
"""Dicts, lists, tuples, strings, numbers, bytes, booleans and None."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Blocks of one group, as runs of consecutive ids; see `Blocks`."""

    group: str
    first_token: int
    end_token: int | None
    state_token: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of_blocks(cls, group: str, blocks: Blocks) -> BlockRuns:
        """The same blocks."""
        starts, counts = blocks.runs()
        return cls(
            group,
            blocks.first_token,
            blocks.end_token,
            blocks.state_token,
            tuple(starts.tolist()),
            tuple(counts.tolist()),
        )

    def blocks(self) -> Blocks:
        """The same blocks; raises `InvalidField` for what no `of_blocks` made."""
        total = sum(self.counts)
        if len(self.starts) != len(self.counts) or min(self.counts, default=1) < 1 or total > MAX_BLOCKS:
            raise InvalidField("blocks", self.group, f"as many starts as counts, together at most {MAX_BLOCKS} blocks")
        runs = [np.arange(start, start + count) for start, count in zip(self.starts, self.counts, strict=True)]
        ids = np.concatenate(runs) if runs else np.empty(0, np.int32)
        return Blocks(ids, self.first_token, self.end_token, self.state_token)


@dataclass(frozen=True, slots=True)
class _Leased:
    """A publication whose lease this engine's scheduler holds.

    Attributes:
        request_id: the reader's own request.
        read_id: of this read; the same in all ranks.
        home, engine_id, incarnation, publication: the source and what it offers.
        reference: to the publication; what shows the source's home that its ranks may be reached.
        source_request_id: the request at the source.
        lease_id: of the lease. A secret: it allows to end the lease.
        timeout: seconds from now until the read is given up (R5); taken anew when the value is handed out.
        granted: the source's blocks by group.
        payload: opaque bytes from the source.
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
    payload: bytes = b""

    def blocks(self) -> dict[str, Blocks]:
        """The source's blocks by group."""
        return {runs.group: runs.blocks() for runs in self.granted}


@dataclass(frozen=True, slots=True)
class Offer(_Leased):
    """What `SchedulerPort.granted` returns: the source's blocks are pinned for this request, which has no blocks of its
    own yet. `SchedulerPort.attach` gives it some, and returns the `Grant` that workers start.

    Attributes:
        request_id: the reader's own request.
        read_id: of this read; the same in all ranks.
        home, engine_id, incarnation, publication: the source and what it offers.
        reference: to the publication; a capability.
        source_request_id: the request at the source.
        lease_id: of the lease. A secret: it allows to end the lease.
        timeout: seconds from now until the read is given up.
        granted: the source's blocks by group; see `blocks`.
        payload: opaque bytes from the source.
    """

    def attached(self, local: tuple[BlockRuns, ...], tokens: tuple[int, int] | None, *, timeout: float) -> Grant:
        """The grant of this offer, with blocks to read into."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Grant(**{**given, "timeout": timeout}, local=local, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Grant(_Leased):
    """What workers need to read a publication whose lease their scheduler holds: an `Offer` with blocks to read into.

    Attributes:
        local: the blocks to read into, by group; see `local_blocks`.
        tokens: the tokens wanted, ``[a, b)``; None: what was granted.

    The others are those of the `Offer`.
    """

    local: tuple[BlockRuns, ...] = ()
    tokens: tuple[int, int] | None = None

    def local_blocks(self) -> dict[str, Blocks]:
        """The blocks to read into, by group."""
        return {runs.group: runs.blocks() for runs in self.local}

    def plain(self) -> Plain:
        """For encoders."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, plain: Plain) -> Grant:
        """What `plain` gave; raises `InvalidField` for anything else."""
        runs = {name: _each(BlockRuns, plain, name) for name in ("granted", "local")}
        found = _made(cls, {**plain, **runs})
        return dataclasses.replace(found, tokens=token_range(found.tokens))


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank's share of a read ended.

    Attributes:
        read_id, request_id: of the read.
        ok: every byte of the share has arrived.
        quiet: nothing can write to its blocks any more.
        bytes: read by the rank.
        lost: blocks whose bytes do not count, by group; none if it is ok.
        error_name, message, values, retry_after: class of the error, and what it says; empty if it is ok.
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

    def error(self) -> KvferryError | None:
        """Why it failed, typed."""
        if self.ok:
            return None
        return from_name(self.error_name, self.message, self.values, retry_after=self.retry_after, quiet=self.quiet)


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What has happened at one worker since it was last asked.

    Attributes:
        rank: the worker's.
        ended: shares that ended well.
        failed: shares that did not, with the blocks that they lost.
        quiesced: read_ids of failed shares that were not quiet, and are now.
    """

    rank: int
    ended: tuple[RankEnd, ...] = ()
    failed: tuple[RankEnd, ...] = ()
    quiesced: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything has."""
        return bool(self.ended or self.failed or self.quiesced)

    def plain(self) -> Plain:
        """For encoders."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, plain: Plain) -> WorkerOutput:
        """What `plain` gave; raises `InvalidField` for anything else."""
        ends = {name: _each(RankEnd, plain, name) for name in ("ended", "failed")}
        found = _made(cls, {**plain, **ends})
        return dataclasses.replace(found, rank=integer("rank", found.rank), quiesced=texts("quiesced", found.quiesced))


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """How a read ended, for all ranks together.

    Attributes:
        request_id, read_id: of the read.
        error: why its bytes do not count; None: they do.
        quiet: nothing can write to its blocks any more, on any rank.
        ranks: ranks that have reported: all of them, unless the lease's holder gave up waiting.
        payload: opaque bytes from the source.
        bytes: read by all ranks.
        lost: blocks whose bytes do not count, by group: all that were asked for.
        confirmed: the home answered VALID; False: it did not answer, and the reader's own deadline decided.
    """

    request_id: str
    read_id: str
    error: KvferryError | None
    quiet: bool
    ranks: int
    payload: bytes
    bytes: int
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """Reads that have ended since the scheduler was last asked.

    Attributes:
        reads: each read of the engine exactly once.
        quiesced: request_ids of reads that ended without being quiet, and are now.
    """

    reads: tuple[ReadEnd, ...] = ()
    quiesced: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything has."""
        return bool(self.reads or self.quiesced)


def _made(cls: type[Value], plain: object) -> Value:
    """A value of what `plain` gave, which an encoder may have turned from tuples into lists; raises `InvalidField`."""
    name = cls.__name__
    given = mapping(name, plain, f"what {name}.plain() gave")
    try:
        return cls(**{str(field): _tuples(value) for field, value in given.items()})
    except TypeError:
        raise InvalidField(name, sorted(map(str, given)), f"the fields that {name}.plain() gave") from None


def _each(cls: type[Value], plain: object, name: str) -> tuple[Value, ...]:
    """Values in a field of what `plain` gave."""
    given = mapping(name, plain, "what plain() gave").get(name)
    return tuple(_made(cls, item) for item in several(name, given, object, f"several {cls.__name__}s, as plain() gave"))


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return value
