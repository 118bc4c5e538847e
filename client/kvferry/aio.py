"""The asyncio client, for services, tools and tests.

It wraps the synchronous client: calls that would wait run on threads. It does not use `grpc.aio`, so that a process
that has used it may still fork. The reads of both clients can be awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType

from kvferry._cache import OPEN_TIMEOUT, READ_TIMEOUT, Cache
from kvferry._client import MAX_READS, Client
from kvferry._control.connection import CALL_TIMEOUT
from kvferry._control.publications import Publication, Release
from kvferry._engine_spec import EngineSpec
from kvferry._forks import OneProcess
from kvferry._reads.read import Read
from kvferry._session import EngineSession
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._transport.transport import TransportGauges
from kvferry._wire.channel import TlsConfig
from kvferry._wire.token import EngineToken
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import Interval, Plane
from kvferry.geometry.tensors import Holding, Tensor
from kvferry.planner.summed_blocks import IntegrityOptions
from kvferry.stats import ClientStats


class AsyncClient(OneProcess):
    """`kvferry.Client` for an event loop. Arguments and errors are the same.

    Threading: make and use it on one event loop. Its methods never block the loop.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsConfig | None = None,
        allowed_homes: Sequence[str] = (),
        directory: str | None = None,
        home_in_references: bool = True,
        options: NixlOptions | None = None,
        staging: StagingOptions | None = None,
        integrity: IntegrityOptions | None = None,
        max_reads: int = MAX_READS,
        confirm: str = "before",
    ) -> None:
        self._client = Client(
            address,
            tls=tls,
            allowed_homes=allowed_homes,
            directory=directory,
            home_in_references=home_in_references,
            options=options,
            staging=staging,
            integrity=integrity,
            max_reads=max_reads,
            confirm=confirm,
        )

    def stats(self) -> ClientStats:
        """Return what this client has counted and measured. See `Client.stats`."""
        return self._client.stats()

    async def open_engine(self, spec: EngineSpec, *, timeout: float = OPEN_TIMEOUT) -> AsyncSession:
        """Start a new incarnation of an engine, and open its session. See `Client.open_engine`."""
        return AsyncSession(await asyncio.to_thread(self._client.open_engine, spec, timeout=timeout))

    async def register_cache(
        self,
        engine: EngineSpec,
        rank: int = 0,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        axes: Sequence[str] | None = None,
        heads: range | Interval | None = None,
        total_heads: int | None = None,
        holding: Holding | None = None,
        replicated: bool = False,
        planes: Sequence[Plane] | None = None,
        regions: Sequence[MemoryRegion] | None = None,
        keep: object = None,
        labels: Mapping[str, int] | None = None,
        token: EngineToken | str | None = None,
        serve: bool = True,
        timeout: float = OPEN_TIMEOUT,
    ) -> AsyncCache:
        """Register a rank's cache with NIXL and at the node server. See `Client.register_cache`."""
        cache = await asyncio.to_thread(
            self._client.register_cache,
            engine,
            rank,
            tensors=tensors,
            axes=axes,
            heads=heads,
            total_heads=total_heads,
            holding=holding,
            replicated=replicated,
            planes=planes,
            regions=regions,
            keep=keep,
            labels=labels,
            token=token,
            serve=serve,
            timeout=timeout,
        )
        return AsyncCache(cache)

    async def decline(self, reference: str, *, timeout: float = CALL_TIMEOUT) -> None:
        """Tell a publication's home that nobody will read it. See `Client.decline`."""
        await asyncio.to_thread(self._client.decline, reference, timeout=timeout)

    async def close(self) -> None:
        """Cancel the reads, and end NIXL agents, sessions and connections. See `Client.close`."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSession(OneProcess):
    """`EngineSession` for an event loop. Made by `AsyncClient.open_engine`; `AsyncCache.session` returns one too.

    Attributes:
        sync: the synchronous session.
        spec: the engine.
    """

    def __init__(self, session: EngineSession) -> None:
        self.sync = session
        self.spec = session.spec

    @property
    def token(self) -> EngineToken:
        """The token with which the engine's other processes join it. Secret."""
        return self.sync.token

    @property
    def engine_reference(self) -> str:
        """The engine's reference, for readers to warm up with. See `EngineSession.engine_reference`."""
        return self.sync.engine_reference

    async def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool = True,
        expected_reads: int = 1,
        payload: bytes = b"",
        checksums: bool = False,
        timeout: float = CALL_TIMEOUT,
        traceparent: str = "",
        reference: str = "",
        layers: Collection[str] | None = None,
    ) -> Publication:
        """Publish a request's blocks. See `EngineSession.publish`."""
        return await asyncio.to_thread(
            self.sync.publish,
            request_id,
            blocks,
            last=last,
            expected_reads=expected_reads,
            payload=payload,
            checksums=checksums,
            timeout=timeout,
            traceparent=traceparent,
            reference=reference,
            layers=layers,
        )

    async def publish_more(
        self,
        publication: Publication,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        payload: bytes = b"",
        layers: Collection[str] | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        """Publish the next blocks of a publication. See `EngineSession.publish_more`."""
        await asyncio.to_thread(
            self.sync.publish_more,
            publication,
            blocks,
            last=last,
            payload=payload,
            layers=layers,
            timeout=timeout,
        )

    async def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """Withdraw a publication. See `EngineSession.abort`."""
        await asyncio.to_thread(self.sync.abort, publication, timeout)

    async def released(self, timeout: float = 0.0) -> list[Release]:
        """Return the publications released since the last call. See `EngineSession.released`."""
        return await asyncio.to_thread(self.sync.released, timeout)

    def unreleased(self) -> tuple[Publication, ...]:
        """Return the publications whose blocks are still pinned."""
        return self.sync.unreleased()

    async def close(self) -> None:
        """End the session. See `EngineSession.close`."""
        await asyncio.to_thread(self.sync.close)


class AsyncCache(OneProcess):
    """`Cache` for an event loop. Made by `AsyncClient.register_cache`.

    Attributes:
        sync: the synchronous cache.
        spec, rank, reuse_after: see `Cache`.
    """

    def __init__(self, cache: Cache) -> None:
        self.sync = cache
        self.spec, self.rank, self.reuse_after = cache.spec, cache.rank, cache.reuse_after

    @property
    def session(self) -> AsyncSession:
        """The engine's session; raises `WrongState` if another process has it."""
        return AsyncSession(self.sync.session)

    @property
    def engine_reference(self) -> str:
        """The engine's reference, for readers to warm up with. See `Cache.engine_reference`."""
        return self.sync.engine_reference

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
    ) -> Read:
        """Start to read a publication; await the read that this returns. See `Cache.read`."""
        return self.sync.read(
            reference,
            blocks,
            tokens,
            layers=layers,
            read_id=read_id,
            parties=parties,
            expected_reads=expected_reads,
            progressive=progressive,
            timeout=timeout,
            allow_overlap=allow_overlap,
            traceparent=traceparent,
        )

    async def checksum(
        self, publication: int, blocks: Mapping[str, Blocks], *, last: bool = True, timeout: float = READ_TIMEOUT
    ) -> int:
        """Send checksums of published blocks to the home. See `Cache.checksum`.

        Returns:
            The number of sums sent.
        """
        return await asyncio.wrap_future(self.sync.checksum(publication, blocks, last=last, timeout=timeout))

    def prepare(self) -> None:
        """Make the NIXL agents for reading now. Returns at once. See `Cache.prepare`."""
        self.sync.prepare()

    async def warm(self, engine_reference: str, *, timeout: float = OPEN_TIMEOUT) -> tuple[int, ...]:
        """Connect to a source engine ahead of the first read from it. See `Cache.warm`.

        Returns:
            The source ranks that connections are being opened to.
        """
        return await asyncio.wrap_future(self.sync.warm(engine_reference, timeout=timeout))

    def gauges(self) -> TransportGauges:
        """Return the current state of this rank's data plane."""
        return self.sync.gauges()

    async def close(self, timeout: float = 10.0) -> None:
        """Cancel the reads and end the NIXL agents. See `Cache.close`."""
        await asyncio.to_thread(self.sync.close, timeout)
