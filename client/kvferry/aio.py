"""The asyncio client: for services, tools and tests. The same core; what would wait runs on a thread.

It stands on the synchronous client rather than on `grpc.aio`: one implementation of what must be right, and a process
that used it may still fork. A read is awaitable in either client.
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
from kvferry.geometry.model import Interval, MemoryRegion, Plane
from kvferry.geometry.tensors import Holding, Tensor
from kvferry.planner.summed_blocks import IntegrityOptions


class AsyncClient(OneProcess):
    """`kvferry.Client` for an event loop. Arguments and errors are the same.

    Threading: made and used on one event loop, which is never blocked.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsConfig | None = None,
        allowed_homes: Sequence[str] = (),
        options: NixlOptions | None = None,
        staging: StagingOptions | None = None,
        integrity: IntegrityOptions | None = None,
        max_reads: int = MAX_READS,
    ) -> None:
        self._client = Client(
            address,
            tls=tls,
            allowed_homes=allowed_homes,
            options=options,
            staging=staging,
            integrity=integrity,
            max_reads=max_reads,
        )

    async def open_engine(self, spec: EngineSpec, *, timeout: float = OPEN_TIMEOUT) -> AsyncSession:
        """Start a new incarnation of an engine. See `Client.open_engine`."""
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
        """Register a rank's cache, with NIXL and at the node server. See `Client.register_cache`."""
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
        """Say that nobody will read a publication. See `Client.decline`."""
        await asyncio.to_thread(self._client.decline, reference, timeout=timeout)

    async def close(self) -> None:
        """See `Client.close`."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSession(OneProcess):
    """`EngineSession` for an event loop. Made by `AsyncClient.open_engine`, or found as `AsyncCache.session`."""

    def __init__(self, session: EngineSession) -> None:
        self.sync = session
        """The session itself, for what does not wait."""
        self.spec = session.spec

    @property
    def token(self) -> EngineToken:
        """What the engine's other processes need. Secret."""
        return self.sync.token

    @property
    def engine_reference(self) -> str:
        """What routers give to this engine's readers to warm up with. See `EngineSession.engine_reference`."""
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
    ) -> Publication:
        """Offer a request's blocks. See `EngineSession.publish`."""
        return await asyncio.to_thread(
            self.sync.publish,
            request_id,
            blocks,
            last=last,
            expected_reads=expected_reads,
            payload=payload,
            checksums=checksums,
            timeout=timeout,
        )

    async def publish_more(
        self,
        publication: Publication,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        payload: bytes = b"",
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        """Offer the next blocks of a publication. See `EngineSession.publish_more`."""
        await asyncio.to_thread(
            self.sync.publish_more, publication, blocks, last=last, payload=payload, timeout=timeout
        )

    async def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """Stop new reads of a publication. See `EngineSession.abort`."""
        await asyncio.to_thread(self.sync.abort, publication, timeout)

    async def released(self, timeout: float = 0.0) -> list[Release]:
        """What was released since the last call. See `EngineSession.released`."""
        return await asyncio.to_thread(self.sync.released, timeout)

    def unreleased(self) -> tuple[Publication, ...]:
        """Publications whose blocks are still pinned."""
        return self.sync.unreleased()

    async def close(self) -> None:
        """End the session. See `EngineSession.close`."""
        await asyncio.to_thread(self.sync.close)


class AsyncCache(OneProcess):
    """`Cache` for an event loop."""

    def __init__(self, cache: Cache) -> None:
        self.sync = cache
        """The cache itself, for what does not wait."""
        self.spec, self.rank, self.reuse_after = cache.spec, cache.rank, cache.reuse_after

    @property
    def session(self) -> AsyncSession:
        """The engine's session; raises `WrongState` where another process has it."""
        return AsyncSession(self.sync.session)

    @property
    def engine_reference(self) -> str:
        """What routers give to this engine's readers to warm up with. See `Cache.engine_reference`."""
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
        timeout: float = READ_TIMEOUT,
        allow_overlap: bool = False,
    ) -> Read:
        """Start a read; await what this returns. See `Cache.read`."""
        return self.sync.read(
            reference,
            blocks,
            tokens,
            layers=layers,
            read_id=read_id,
            parties=parties,
            expected_reads=expected_reads,
            timeout=timeout,
            allow_overlap=allow_overlap,
        )

    async def checksum(
        self, publication: int, blocks: Mapping[str, Blocks], *, last: bool = True, timeout: float = READ_TIMEOUT
    ) -> int:
        """Sum blocks, and wait until the sums are at the home. See `Cache.checksum`."""
        return await asyncio.wrap_future(self.sync.checksum(publication, blocks, last=last, timeout=timeout))

    def prepare(self) -> None:
        """Make the reading agents now; returns at once. See `Cache.prepare`."""
        self.sync.prepare()

    async def warm(self, engine_reference: str, *, timeout: float = OPEN_TIMEOUT) -> tuple[int, ...]:
        """Do now what the first read from an engine would wait for. See `Cache.warm`."""
        return await asyncio.wrap_future(self.sync.warm(engine_reference, timeout=timeout))

    def gauges(self) -> TransportGauges:
        """What the data plane of this rank is doing."""
        return self.sync.gauges()

    async def close(self, timeout: float = 10.0) -> None:
        """Cancel the reads and end the agents. See `Cache.close`."""
        await asyncio.to_thread(self.sync.close, timeout)
