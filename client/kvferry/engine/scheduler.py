"""The port of an engine's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry import _arguments as arguments
from kvferry._cache import OPEN_TIMEOUT, READ_TIMEOUT
from kvferry._client import Client, client_runtime_of
from kvferry._control.publications import Publication, Release
from kvferry._engine_spec import EngineSpec
from kvferry._forks import OneProcess
from kvferry._reads.leased_reads import ReadStage
from kvferry._session import home_session_of
from kvferry._wire.token import EngineToken
from kvferry.engine.publisher import Publishing
from kvferry.engine.scheduler_reads import Reads
from kvferry.engine.values import Finished, Grant, Offer, WorkerOutput
from kvferry.geometry.blocks import Blocks, blocks_by_group

MAX_WAITING = 4096
"""Reads that wait for their publication at once unless the engine says otherwise."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of one engine. Those of the first two groups only rise.

    Attributes:
        published, released, refused: publications of this engine; `refused` are those of the released that its home did
            not take. ``published - released`` are pinned.
        done, failed, cancelled, expired, not_granted: reads by how they ended.
        bytes: read by all ranks.
        waiting, granted, reading, judging: reads under way, by where they stand.
        uncertain: reads that ended, and whose blocks may still be written to.
    """

    published: int
    released: int
    refused: int
    done: int
    failed: int
    cancelled: int
    expired: int
    not_granted: int
    bytes: int
    waiting: int
    granted: int
    reading: int
    judging: int
    uncertain: int


class SchedulerPort(OneProcess):
    """An engine's scheduler: offers what it has computed, and holds the leases of what its ranks read.

    One per engine; it opens the engine's session, and judges its reads (PROTOCOL, Leases 4). What workers say reaches
    it through the engine: `WorkerPort.finished` → `collect`.

    Threading: every method may be called from any thread, and returns at once, but for the constructor and `close`. No
    call and nothing of NIXL runs on the caller's thread (R11).

    Args:
        client: of this process; closed by its owner.
        spec: the engine.
        hold_until_quiet: `finished` withholds a failed read until nothing can write to its blocks any more, for engines
            that cannot keep blocks aside.
        max_waiting: reads that wait for their publication at once; `acquire` refuses more.
        timeout: seconds to open the session. Errors as `Client.open_engine`.
    """

    def __init__(
        self,
        client: Client,
        spec: EngineSpec,
        *,
        hold_until_quiet: bool = False,
        max_waiting: int = MAX_WAITING,
        timeout: float = OPEN_TIMEOUT,
    ) -> None:
        max_waiting = arguments.integer("max_waiting", max_waiting, 1)
        arguments.flag("hold_until_quiet", hold_until_quiet)
        self.spec = spec
        self._session = client.open_engine(spec, timeout=timeout)
        home_session = home_session_of(self._session)
        self._publishing = Publishing(home_session)
        self._reads = Reads(
            spec,
            client_runtime_of(client).lease_holder(self._session.token),
            home_session.block_use.writes(),
            max_waiting,
            hold_until_quiet=hold_until_quiet,
        )

    @property
    def token(self) -> EngineToken:
        """What the workers need to belong to this engine. Secret; ``str(token)`` goes into an environment variable."""
        return self._session.token

    @property
    def engine_reference(self) -> str:
        """What routers give to this engine's readers to warm up with; see `WorkerPort.warm`. A capability."""
        return self._session.engine_reference

    # As a source.

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool = True,
        expected_reads: int = 1,
        payload: bytes = b"",
        checksums: bool = False,
    ) -> Publication:
        """Offer a request's blocks. From now until `released` names it, they are neither changed nor freed (R2).

        Args:
            request_id: 1 to 256 bytes.
            blocks: by group; `Blocks.end_token` says how many tokens of the last block are there.
            last: no more will follow; else `publish_more`.
            expected_reads: reads that will be made, released after the last (n-way sampling).
            payload: opaque bytes for the readers, at most 64 KiB.
            checksums: every rank will sum them; see `Cache.checksum`.

        Returns:
            Its number and its reference for the router. The reference is good at once: who reads it before the home
            knows of it waits.

        Raises:
            BadBlock, InvalidField: the blocks are not ones of this engine, one is given twice, or a read is writing to
                one.
            Closed: the engine's session has ended.

        A home that refuses it shows in `released`.
        """
        return self._publishing.publish(
            request_id, blocks, last=last, expected_reads=expected_reads, payload=payload, checksums=checksums
        )

    def publish_more(
        self, publication: Publication, blocks: Mapping[str, Blocks], *, last: bool, payload: bytes = b""
    ) -> None:
        """Offer the next blocks of a publication that was not the last. Errors as `publish`."""
        self._publishing.publish_more(publication, blocks, last=last, payload=payload)

    def abort(self, publication: Publication) -> None:
        """Take a publication back: new reads are refused, and `released` comes when none is left."""
        self._publishing.abort(
            arguments.instance("publication", publication, Publication, "the Publication that publish returned")
        )

    def released(self) -> list[Release]:
        """Publications whose blocks may be changed and freed; each exactly once (R3). To be asked each step."""
        return self._publishing.take_released()

    # As a destination.

    def acquire(
        self, request_id: str, reference: str, *, expected_reads: int = 0, timeout: float = READ_TIMEOUT
    ) -> None:
        """Begin to read a publication: wait for it, and pin it. When the request arrives, before it has blocks.

        Args:
            request_id: the reader's own; one read at a time.
            reference: as it came with the request.
            expected_reads: reads that will be made of the publication; 0: what its source said.
            timeout: seconds until the read fails, all its waiting included (R5). The workers have 10 s more to say how
                their shares ended; ranks that say nothing are named in the error.

        Raises:
            BadReference: not a reference.
            HomeNotAllowed: its home may not be dialled.
            InvalidField: an argument is out of range.
            WrongState: the request is being read already.
            LimitReached: too many wait.
        """
        self._reads.acquire(
            arguments.text("request_id", request_id),
            reference,
            arguments.integer("expected_reads", expected_reads, 0, 2**31 - 1),
            arguments.seconds("timeout", timeout),
        )

    def granted(self, request_id: str) -> Offer | None:
        """What the source offers to a request, for as long as its lease runs; None while the request waits. An offer
        becomes a `Grant`, which workers can start, when `attach` gives it blocks to read into.

        Raises:
            WrongState: the request was not acquired, or has ended.
            KvferryError: it will not be granted, and why: `PublicationTimeout`, `PublicationAborted`, `PeerRestarted`
                ... The request is forgotten then.
        """
        return self._reads.granted(arguments.text("request_id", request_id))

    def attach(
        self,
        request_id: str,
        local_blocks: Mapping[str, Blocks],
        tokens: tuple[int, int] | None = None,
        *,
        allow_overlap: bool = False,
    ) -> Grant:
        """Give a granted request the blocks to read into. From now until `finished` names it, they belong to the read.

        Args:
            request_id: one for which `granted` has returned an `Offer`.
            local_blocks: blocks to read into by group; `Blocks.first_token` is the first token wanted.
            tokens: the tokens wanted, ``[a, b)``; None: all that was published.
            allow_overlap: also blocks that another read of the engine writes, or that it has published: for engines
                that know that the bytes are others.

        Returns:
            The grant: the offer with these blocks, for `WorkerPort.start` on every rank.

        Raises:
            BadBlock: a block is not one of this engine, is given twice, is published, or another read may still write
                to it. The request stays granted, as it does with the next two.
            BlocksShort: there are not enough blocks for the tokens, or not enough tokens were published.
            InvalidField: an argument is of another type, or a group has no blocks.
            WrongState: the request is not granted yet, has its blocks already, or was not acquired.
            KvferryError: the grant has ended since, and why. The request is forgotten then.
        """
        return self._reads.attach(
            arguments.text("request_id", request_id),
            blocks_by_group("local_blocks", local_blocks),
            arguments.token_range(tokens),
            allow_overlap=arguments.flag("allow_overlap", allow_overlap),
        )

    def decline(self, reference: str) -> None:
        """Nobody will read it: a full prefix hit, a rejected request. Its source is released now, not when the hold
        ends. Reads of it that are not attached are forgotten. Errors as `acquire`."""
        self._reads.decline(reference)

    def cancel(self, request_id: str) -> bool:
        """Stop a read. One that is attached ends through `finished`; another one is forgotten.

        Returns:
            Whether there was one.
        """
        return self._reads.cancel(arguments.text("request_id", request_id))

    def collect(self, output: WorkerOutput) -> None:
        """Take what a worker says. Said twice, it counts once. Raises `InvalidField` for a rank the engine has not."""
        self._reads.collect(arguments.instance("output", output, WorkerOutput, "a WorkerOutput, as a worker gave it"))

    def cancels(self) -> list[str]:
        """read_ids that every worker is to stop, by `WorkerPort.cancel`; each once. To be asked each step."""
        return self._reads.take_cancels()

    def finished(self) -> Finished:
        """Reads that have ended for all ranks, each exactly once, and those that became quiet since. To be asked each
        step."""
        return self._reads.take_finished()

    def stats(self) -> SchedulerStats:
        """What became of everything so far."""
        stages, counts = self._reads.stages(), self._reads.counts
        return SchedulerStats(
            published=self._publishing.published,
            released=self._publishing.released,
            refused=self._publishing.refused,
            done=counts["done"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            expired=counts["expired"],
            not_granted=counts["refused"],
            bytes=self._reads.bytes,
            waiting=stages[ReadStage.WAITING],
            granted=stages[ReadStage.GRANTED],
            reading=stages[ReadStage.READING],
            judging=stages[ReadStage.JUDGING],
            uncertain=stages[ReadStage.ENDED],
        )

    def close(self, timeout: float = 5.0) -> None:
        """Tell the homes what is still to be told, and end the session. Idempotent."""
        timeout = arguments.seconds("timeout", timeout, zero=True)
        self._reads.close(timeout)
        self._publishing.close(timeout)
        self._session.close()
