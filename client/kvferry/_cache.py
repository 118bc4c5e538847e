"""The registered cache of one rank, and the reads into it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future

from kvferry import _arguments as arguments
from kvferry._control.acquire_request import AcquireRequest, ReadTerms
from kvferry._control.block_use import BlockUse
from kvferry._control.questions import ANSWER_WAIT, AskedPrefix
from kvferry._directory.directory import Listing
from kvferry._forks import Closing
from kvferry._prompt import Prompt, check_within
from kvferry._reads.cache_reads import OwnRead, Read
from kvferry._reads.rank_read import Wanted
from kvferry._reads.runtime import RankRuntime
from kvferry._session import EngineSession, home_session_of
from kvferry.errors import Closed, InvalidField, WrongState
from kvferry.geometry.blocks import Blocks, blocks_by_group
from kvferry.geometry.model import GroupKind
from kvferry.planner.request_blocks import written
from kvferry.stats import TransportGauges

OPEN_TIMEOUT = 30.0
"""Default seconds to wait for an engine: longer than its ttl, during which a predecessor still holds the engine_id."""

READ_TIMEOUT = 120.0
"""Default seconds for a read, its wait for the publication included."""


class Cache(Closing):
    """The registered cache of one rank: reads publications into it. Made by `Client.register_cache`.

    The memory must stay mapped, and its tensors referenced, until the process ends: NIXL cannot revoke the access of
    other ranks.

    Threading: every method may be called from any thread. Only `close` waits. Methods raise `Closed` after it, and
    `ForkedClient` in a child of the process.

    Attributes:
        spec: the engine.
        rank: geometry of the rank.
        reuse_after: seconds, counted from the registration, during which the engine must not reuse blocks of memory
            that survived a restart. The engine's home knows its own leases only: an engine that was at another home
            before waits for the max_ttl of that home (30 s), counted from the end of its last session there.
    """

    def __init__(self, runtime: RankRuntime, session: EngineSession | None, reuse_after: float) -> None:
        self.spec = runtime.spec
        self.rank = runtime.rank
        self.reuse_after = reuse_after
        self._runtime = runtime
        self._session = session
        # Holds the reads of this rank, and if this process has the session, the publications of all ranks.
        block_use = BlockUse(self.spec.groups) if session is None else home_session_of(session).block_use
        self._writes = block_use.writes(self.rank.rank)
        self._closed = False

    @property
    def session(self) -> EngineSession:
        """The engine's session; raises `WrongState` if another process has it."""
        if self._session is None:
            engine_id = self.spec.engine_id
            problem = f"another process opened engine {engine_id!r} and has its session"
            advice = "publish there, or open the engine here, with Client.open_engine"
            raise WrongState(f"{problem}: {advice}", engine_id=engine_id)
        return self._session

    def read(
        self,
        reference: str,
        blocks: Mapping[str, Blocks],
        tokens: tuple[int, int] | None = None,
        *,
        layers: Collection[str] | None = None,
        read_id: str | None = None,
        parties: int = 1,
        expected_reads: int = 0,
        progressive: bool = False,
        timeout: float = READ_TIMEOUT,
        allow_overlap: bool = False,
        traceparent: str = "",
        prompt: Prompt = Prompt.unknown,
    ) -> Read:
        """Start to read a publication into this rank's blocks. Returns at once.

        Args:
            reference: the reference that came with the request. If a router made it (`kvferry.router_reference`), its
                publication may come later: `PublicationReleased` means that the publication was declined.
            blocks: the blocks to read into, by group; `Blocks.first_token` is the first token wanted.
            tokens: the tokens wanted, ``[a, b)``; None: all published tokens.
            layers: names of the layers wanted, a subset of this rank's; None: all. Each read of some layers counts as a
                read of the publication: give their number as `expected_reads`.
            read_id: a name that all ranks of one read share; None: a random name, for an engine of one rank. Not
                secret: the home gets a value derived from this name and the engine's secret. With `parties` above 1,
                give no other read of the same publication this name: of two, one fails.
            parties: number of ranks that will report under this read_id.
            expected_reads: number of reads that will be made of the publication (n-way sampling); 0: the number that
                its source gave.
            progressive: read each step of the publication as soon as its source publishes it, while the source still
                computes; `tokens` must then be given. If False, the read begins when the publication is complete.
            timeout: seconds until the read fails, the wait for the publication included (R5).
            allow_overlap: accept blocks that another read of this cache writes to, or that this process has published.
                For engines that know that the bytes do not overlap.
            traceparent: the W3C traceparent that came with the reference, if any. See docs/monitoring.md.
            prompt: the prompt of this request. A publication of another prompt is refused (`PromptMismatch`).

        Returns:
            The read, which can be awaited, polled and cancelled. Its `result` raises all errors not listed here.

        Raises:
            BadReference: the string is not a reference.
            HomeNotAllowed: this client may not connect to the home in the reference.
            BadBlock: a block does not belong to this engine, may still be written to by another read, or is published.
            InvalidField: an argument has the wrong type, or is out of range.
        """
        self._check_open()
        parties = arguments.integer("parties", parties, 1, 2**31 - 1)
        if parties > 1 and read_id is None:
            raise InvalidField("read_id", None, f"the name that each of the {parties} parties gives to this read")
        layers = None if layers is None else frozenset(arguments.texts("layers", layers))
        unknown = sorted((layers or frozenset()) - {plane.layer for plane in self.rank.planes})
        if unknown:
            raise InvalidField("layers", unknown, "names of layers that this rank holds")
        wanted = Wanted(blocks_by_group("blocks", blocks), arguments.token_range(tokens), layers)
        if arguments.flag("progressive", progressive) and wanted.tokens is None:
            raise InvalidField("tokens", None, "the tokens to read, since the read may begin before all are published")
        check_within(prompt, wanted.tokens)
        if read_id is not None and not 1 <= len(arguments.text("read_id", read_id).encode()) <= 256:
            raise InvalidField("read_id", read_id, "1 to 256 bytes")
        terms = ReadTerms(timeout, traceparent, prompt, progressive, expected_reads)
        request = self._runtime.holder.request(reference, terms, read_id=read_id or "", parties=parties)
        return self._begin(request, wanted, allow_overlap)

    def fetch(
        self,
        engine: str | Listing,
        prompt: Prompt,
        blocks: Mapping[str, Blocks],
        *,
        wait: float = ANSWER_WAIT,
        timeout: float = READ_TIMEOUT,
        allow_overlap: bool = False,
        traceparent: str = "",
    ) -> Read:
        """Ask an engine for what it has cached of a prompt's beginning, and read all of that. Returns at once. For
        engines of one rank; others use `SchedulerPort.ask`.

        Args:
            engine, prompt, wait: see `SchedulerPort.ask`.
            blocks: the blocks to read into, by group, with room for the whole prompt; `Blocks.first_token` is the first
                token wanted, the same in all groups of kind TOKENS.
            timeout, allow_overlap, traceparent: see `read`.

        Returns:
            The read. `ReadResult.end_token` is the end of the tokens that were read; `result` raises `PrefixMiss` if
            there is nothing to read.

        Raises:
            BadReference, HomeNotAllowed, BadBlock: see `read`.
            InvalidField: see `SchedulerPort.ask`.
        """
        self._check_open()
        wanted = Wanted(blocks_by_group("blocks", blocks), None, None)
        tokens = [group.name for group in self.spec.groups if group.kind is GroupKind.TOKENS]
        first = min((wanted.blocks[name].first_token for name in tokens if name in wanted.blocks), default=0)
        asked = AskedPrefix(engine, prompt, first, wait, self.spec.groups)
        request = self._runtime.holder.request(asked, ReadTerms(timeout, traceparent, prompt))
        return self._begin(request, wanted, allow_overlap)

    def _begin(self, request: AcquireRequest, wanted: Wanted, allow_overlap: bool) -> Read:
        started: list[OwnRead] = []
        key = self._writes.begin(
            request.read_id,
            written(self.spec.groups, None, wanted.blocks, wanted.tokens),
            layers=wanted.layers,
            quiet=lambda: bool(started) and started[0].quiet,
            allow_overlap=arguments.flag("allow_overlap", allow_overlap),
        )
        try:
            started.append(self._runtime.reads.begin_read(request, wanted))
        except BaseException:
            self._writes.end(key)
            raise
        return Read(started[0])

    def checksum(
        self, publication: int, blocks: Mapping[str, Blocks], *, last: bool = True, timeout: float = READ_TIMEOUT
    ) -> Future[int]:
        """Compute checksums of this rank's part of published blocks, and send them to the home.

        Readers in integrity mode compare the bytes that they have read with these sums. Returns at once; a thread of
        the cache does the work, on the device that holds the memory. Does nothing if the client's integrity mode is
        off. As for `publish`, a device must have completed the kernels that write the blocks.

        Args:
            publication: the publication's number, `Publication.number`. Readers wait for the sums only of publications
                with ``checksums=True``.
            blocks: the blocks by group, as published; in a publication of several steps, those of one step.
            last: no more blocks of this publication will be summed.
            timeout: seconds to keep trying.

        Returns:
            A future of the number of sums sent, done when the home has them, or has refused them.

        Raises:
            BadBlock, InvalidField: a block does not belong to this engine, or lies in device memory that is not backed
                by a registered tensor.
        """
        self._check_open()
        return self._runtime.checksummer.submit(
            arguments.integer("publication", publication, 1, 2**63 - 1),
            blocks_by_group("blocks", blocks),
            last=arguments.flag("last", last),
            timeout=arguments.seconds("timeout", timeout),
        )

    def prepare(self) -> None:
        """Make the NIXL agents for reading now, which saves the first read most of a second. Returns at once."""
        self._check_open()
        self._runtime.transport.prepare()

    @property
    def engine_reference(self) -> str:
        """The engine's reference, which routers give to readers for `warm`. A capability: its owner can reach the
        memory that the engine's ranks registered."""
        return self._runtime.token.engine_reference

    def warm(self, engine_reference: str, *, timeout: float = OPEN_TIMEOUT) -> Future[tuple[int, ...]]:
        """Connect to a source engine, which makes the first read from it faster. Returns at once.

        Makes the handshake, plans the read, makes the agents, opens the connections, and reads one byte from each
        source rank that this rank reads from.

        Args:
            engine_reference: the source engine's `Cache.engine_reference` or `SchedulerPort.engine_reference`, which
                changes whenever that engine restarts; or the reference of one of its publications, while that lives.
            timeout: seconds to wait until the source engine is complete.

        Returns:
            A future of the source ranks that connections are being opened to, done after the handshake, with the errors
            that `Read.result` would raise.

        Raises:
            BadReference: the string is not an engine's reference.
            HomeNotAllowed: this client may not connect to the home in the reference.
            LimitReached: the system refused another thread.
        """
        self._check_open()
        deadline = self._runtime.loop.now() + arguments.seconds("timeout", timeout)
        return self._runtime.warm(arguments.text("engine_reference", engine_reference), deadline)

    def gauges(self) -> TransportGauges:
        """Return the current state of this rank's data plane."""
        return self._runtime.transport.gauges()

    def close(self, timeout: float = 10.0) -> None:
        """Cancel the reads and end the NIXL agents. Idempotent. Waits at most `timeout` seconds until no write to the
        blocks is possible any more."""
        timeout = arguments.seconds("timeout", timeout, zero=True)
        self._closed = True
        self._runtime.close(timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the cache of rank {self.rank.rank} of engine {self.spec.engine_id!r} is closed")


def runtime_of(cache: Cache) -> RankRuntime:
    """Return the internal runtime behind a cache, for the rest of kvferry."""
    return cache._runtime
