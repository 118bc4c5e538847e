"""A rank's cache as its node server and its readers know it, and the reads into it."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from concurrent.futures import Future

from kvferry import _arguments as arguments
from kvferry._clock import now
from kvferry._control.acquisition import AcquireRequest
from kvferry._control.block_use import BlockUse
from kvferry._forks import OneProcess
from kvferry._reads.cache_reads import Wanted
from kvferry._reads.read import Read, ReadHandle
from kvferry._reads.runtime import RankRuntime
from kvferry._session import EngineSession, home_session_of
from kvferry._transport.transport import TransportGauges
from kvferry._wire.reference import parse_reference
from kvferry.errors import Closed, InvalidField, WrongState
from kvferry.geometry.blocks import Blocks, blocks_by_group
from kvferry.planner.request_blocks import written

OPEN_TIMEOUT = 30.0
"""Seconds to wait for an engine: longer than the engine ttl for which a predecessor keeps the engine_id."""

READ_TIMEOUT = 120.0
"""Seconds a read may take unless it says otherwise, its wait for the publication included."""


class Cache(OneProcess):
    """One registered rank. Made by `Client.register_cache`.

    The memory must stay mapped, and its tensors referenced, for the life of the process: NIXL revokes nothing.

    Threading: every method may be called from any thread; `read`, `prepare` and `warm` never wait.
    """

    def __init__(self, runtime: RankRuntime, session: EngineSession | None, reuse_after: float) -> None:
        self.spec = runtime.spec
        self.rank = runtime.rank
        self.reuse_after = reuse_after
        """Seconds from now for which no block of memory that survived a restart may be given out."""
        self._runtime = runtime
        self._session = session
        # Reads of this rank, beside what this process publishes for all ranks.
        block_use = BlockUse(self.spec.groups) if session is None else home_session_of(session).block_use
        self._writes = block_use.writes(self.rank.rank)
        self._closed = False

    @property
    def session(self) -> EngineSession:
        """The engine's session; raises `WrongState` where another process has it."""
        if self._session is None:
            engine_id = self.spec.engine_id
            raise WrongState(
                f"another process opened engine {engine_id!r} and has its session: publish there, or open the engine "
                "here, with Client.open_engine",
                engine_id=engine_id,
            )
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
        timeout: float = READ_TIMEOUT,
        allow_overlap: bool = False,
    ) -> Read:
        """Start to read a publication into this rank's blocks. Returns at once.

        Args:
            reference: as it came with the request.
            blocks: local blocks by group; `Blocks.first_token` is the first token wanted.
            tokens: the tokens wanted, ``[a, b)``; None: all that was published.
            layers: names of the layers wanted, some of this rank's; None: all. Reads of parts are reads of their own:
                say how many with `expected_reads`.
            read_id: a name that every rank of one read gives it; None: a random one, for an engine of one rank. No
                secret: what the home is told is derived from it and the engine's secret.
            parties: ranks that will report under this read_id.
            expected_reads: reads that will be made of the publication (n-way sampling); 0: what its source said.
            timeout: seconds until the read fails, the wait for the publication included (R5).
            allow_overlap: also into blocks that another read of this cache writes, or that this process has published:
                for engines that know that the bytes are others.

        Raises:
            BadReference: not a reference.
            HomeNotAllowed: its home may not be dialled.
            BadBlock: a block is not one of this engine, another read may still write to it, or it is published.
            InvalidField: an argument is out of range, or of another type.
            LimitReached: too many reads are running.
            ForkedClient, Closed: this cache cannot read any more.

        Everything else is raised by the read's `result`.
        """
        self._check_open()
        parsed = parse_reference(reference)
        parties = arguments.integer("parties", parties, 1, 2**31 - 1)
        if parties > 1 and read_id is None:
            raise InvalidField("read_id", None, f"the name that each of the {parties} parties gives to this read")
        deadline = now() + arguments.seconds("timeout", timeout)
        layers = None if layers is None else frozenset(arguments.texts("layers", layers))
        unknown = sorted((layers or frozenset()) - {plane.layer for plane in self.rank.planes})
        if unknown:
            raise InvalidField("layers", unknown, "names of layers that this rank holds")
        wanted = Wanted(blocks_by_group("blocks", blocks), arguments.token_range(tokens), layers)
        identifier = secrets.token_hex(8) if read_id is None else arguments.text("read_id", read_id)
        if not 1 <= len(identifier.encode()) <= 256:
            raise InvalidField("read_id", identifier, "1 to 256 bytes")
        request = AcquireRequest(
            home=self._runtime.homes.get(parsed.home),
            reference=parsed,
            text=reference,
            read_id=identifier,
            parties=parties,
            expected_reads=arguments.integer("expected_reads", expected_reads, 0, 2**31 - 1),
            deadline=deadline,
        )
        started: list[ReadHandle] = []
        key = self._writes.begin(
            identifier,
            written(self.spec.groups, None, wanted.blocks, wanted.tokens),
            layers=layers,
            quiet=lambda: bool(started) and started[0].quiet,
            allow_overlap=arguments.flag("allow_overlap", allow_overlap),
        )
        try:
            started.append(self._runtime.reads.start(request, wanted))
        except BaseException:
            self._writes.end(key)
            raise
        return Read(started[0])

    def checksum(
        self, publication: int, blocks: Mapping[str, Blocks], *, last: bool = True, timeout: float = READ_TIMEOUT
    ) -> Future[int]:
        """Sum this rank's part of published blocks, and send the sums to the home for readers in integrity mode.

        Returns at once; the work is done on a thread of the cache, on the device that holds the memory. Does nothing
        where the client's integrity mode is off.

        Args:
            publication: its number, `Publication.number`. Publish with ``checksums=True``, or readers do not wait.
            blocks: as they were published; those of one step of a progressive publication.
            last: no more blocks of this publication will be summed.
            timeout: seconds to keep trying.

        Returns:
            How many sums were sent, once they are at the home. Raises there what the home refused.

        Raises:
            BadBlock, InvalidField: the blocks are not ones of this engine, or lie in device memory that is not backed
                by a registered tensor.
            ForkedClient, Closed: this cache cannot be used any more.
        """
        self._check_open()
        return self._runtime.checksummer.submit(
            arguments.integer("publication", publication, 1, 2**63 - 1),
            blocks_by_group("blocks", blocks),
            last=arguments.flag("last", last),
            timeout=arguments.seconds("timeout", timeout),
        )

    def prepare(self) -> None:
        """Make the reading agents now; the first read from anybody is the better part of a second faster for it.

        Returns at once. Raises `ForkedClient`, `Closed`: this cache cannot be used any more.
        """
        self._check_open()
        self._runtime.transport.prepare()

    @property
    def engine_reference(self) -> str:
        """What routers give to this engine's readers to warm up with. A capability: who has it can reach the memory
        that the engine's ranks registered."""
        return self._runtime.token.engine_reference

    def warm(self, engine_reference: str, *, timeout: float = OPEN_TIMEOUT) -> Future[tuple[int, ...]]:
        """Do now what the first read from an engine would wait for: handshake, plan, agents, connections, and one byte
        from each of its ranks that this one reads from.

        Returns at once; a hint, which changes nothing but the time of the first read.

        Args:
            engine_reference: the engine's, `Cache.engine_reference` or `SchedulerPort.engine_reference` there. Another
                start of the engine has another one.
            timeout: seconds to wait until it is complete.

        Returns:
            The ranks that connections are being opened to, once the handshake is done. Raises there what `Read.result`
            would.

        Raises:
            BadReference: not an engine's reference.
            HomeNotAllowed: the home may not be dialled.
            LimitReached: the system gives no thread.
            ForkedClient, Closed: this cache cannot be used any more.
        """
        self._check_open()
        deadline = now() + arguments.seconds("timeout", timeout)
        return self._runtime.warm(arguments.text("engine_reference", engine_reference), deadline)

    def gauges(self) -> TransportGauges:
        """What the data plane of this rank is doing."""
        return self._runtime.transport.gauges()

    def close(self, timeout: float = 10.0) -> None:
        """Cancel the reads and end the agents. Idempotent.

        Args:
            timeout: seconds to wait until all is quiet.
        """
        timeout = arguments.seconds("timeout", timeout, zero=True)
        self._closed = True
        self._runtime.close(timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the cache of rank {self.rank.rank} of engine {self.spec.engine_id!r} is closed")


def runtime_of(cache: Cache) -> RankRuntime:
    """What stands behind a cache: for the rest of kvferry."""
    return cache._runtime
