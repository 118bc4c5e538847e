"""The asyncio client: for services, tools and tests. The same core; what would wait runs on a thread.

It stands on the synchronous client rather than on `grpc.aio`: one implementation of what must be right, and a process
that used it may still fork. A read is awaitable in either client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

from kvferry._cache import READ_TIMEOUT, Cache
from kvferry._client import Client
from kvferry._control.session import EngineSession, Publication, Release
from kvferry._engine_spec import EngineSpec
from kvferry._forks import OneProcess
from kvferry._reads.read import Read
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._wire.channel import TlsConfig
from kvferry.geometry.blocks import Blocks
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
        max_reads: int = 256,
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

    async def open_engine(self, spec: EngineSpec, **options: Any) -> AsyncSession:
        """See `Client.open_engine`."""
        return AsyncSession(await asyncio.to_thread(self._client.open_engine, spec, **options))

    async def register_cache(self, engine: EngineSpec, rank: int = 0, **options: Any) -> AsyncCache:
        """See `Client.register_cache`."""
        return AsyncCache(await asyncio.to_thread(self._client.register_cache, engine, rank, **options))

    async def decline(self, reference: str, **options: Any) -> None:
        """See `Client.decline`."""
        await asyncio.to_thread(self._client.decline, reference, **options)

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
    """`EngineSession` for an event loop."""

    def __init__(self, session: EngineSession) -> None:
        self.sync = session
        """The session itself, for what does not wait."""

    async def publish(self, request_id: str, blocks: Mapping[str, Blocks], **options: Any) -> Publication:
        """See `EngineSession.publish`."""
        return await asyncio.to_thread(self.sync.publish, request_id, blocks, **options)

    async def publish_more(self, publication: Publication, blocks: Mapping[str, Blocks], **options: Any) -> None:
        """See `EngineSession.publish_more`."""
        await asyncio.to_thread(self.sync.publish_more, publication, blocks, **options)

    async def abort(self, publication: Publication) -> None:
        """See `EngineSession.abort`."""
        await asyncio.to_thread(self.sync.abort, publication)

    async def released(self, timeout: float = 0.0) -> list[Release]:
        """See `EngineSession.released`."""
        return await asyncio.to_thread(self.sync.released, timeout)


class AsyncCache(OneProcess):
    """`Cache` for an event loop."""

    def __init__(self, cache: Cache) -> None:
        self.sync = cache
        """The cache itself, for what does not wait."""

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

    async def checksum(self, publication: int, blocks: Mapping[str, Blocks], **options: Any) -> int:
        """Sum blocks, and wait until the sums are at the home. See `Cache.checksum`."""
        return await asyncio.wrap_future(self.sync.checksum(publication, blocks, **options))

    async def close(self) -> None:
        """See `Cache.close`."""
        await asyncio.to_thread(self.sync.close)
