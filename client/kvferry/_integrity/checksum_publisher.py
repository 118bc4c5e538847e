"""The source side of integrity mode: a rank sums its published blocks and sends the sums to its engine's home."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np

from kvferry._control.backoff import retrying
from kvferry._control.connection import Control
from kvferry._engine_spec import EngineSpec
from kvferry._integrity.summed_blocks import IntegrityOptions, divided, source_blocks
from kvferry._loop import Loop
from kvferry._memory.access import MemoryAccess
from kvferry._memory.rank_memory import RankMemory
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import Closed, InvalidField, PublicationReleased, PublicationStale
from kvferry.geometry.blocks import Blocks, check_ids, id_runs, without_nulls
from kvferry.geometry.model import RankGeometry
from kvferry.geometry.plane import Plane
from kvferry.v1 import kv_transfer_pb2 as pb

PAGE_SUMS = 1 << 16
"""Most sums in one notification; the contract allows twice as many."""

PAGE_PARTS = 1024
"""Most planes in one notification: their names take space as well."""


_Part: TypeAlias = tuple[Plane, MemoryAccess, Blocks]
"""A plane, the memory in which it lies, and its blocks to sum."""


class Checksummer:
    """Sums the published blocks of one rank. `submit` and `close` may be called from any thread; the rest belongs to
    the client's event loop, and threads compute the sums, one page at a time.

    Publications do not wait for each other: while the home does not take the sums of one publication, those of others
    are sent. The sums of one publication are sent in the order of the calls: the last page is marked as the last.
    """

    def __init__(
        self,
        loop: Loop,
        home: Control,
        spec: EngineSpec,
        token: EngineToken,
        rank: RankGeometry,
        memory: RankMemory,
        options: IntegrityOptions,
    ) -> None:
        self._loop = loop
        self._home = home
        self._spec = spec
        self._token = token
        self._rank = rank
        self._memory = memory
        self._share = options.share
        self._senders: set[asyncio.Task[Any]] = set()
        self._turns: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """By publication: the senders of its sums take turns, in the order of the calls."""
        self._computing = asyncio.Lock()
        self._page: asyncio.Future[pb.PublishChecksums | None] | None = None
        """The page that a thread computes, or has computed last."""
        self._closed = False
        """Set by `close`, on any thread: sums that reach the loop later are dropped there."""
        problem = f"the cache of rank {rank.rank} of engine {spec.engine_id!r} is closed"
        self._why_closed = f"{problem}: sums were not sent"

    def submit(self, publication: int, blocks: Mapping[str, Blocks], *, last: bool, timeout: float) -> Future[int]:
        """See `Cache.checksum`."""
        if self._share == 0:
            done: Future[int] = Future()
            done.set_result(0)
            return done
        parts = [part for name, listed in blocks.items() for part in self._parts(name, listed)]
        self._check_open()
        pages = self._pages(publication, parts, last)
        return self._loop.answer(self._send(publication, pages, self._loop.now() + timeout), self._why_closed)

    def close(self) -> None:
        """Drop the queued work, and wait for the page being computed: then the memory may be unmapped. Idempotent."""
        self._closed = True
        # A client that has ended has ended all senders.
        with suppress(Closed):
            if self._loop.started:
                self._loop.run(self._end())

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._why_closed)

    async def _end(self) -> None:
        for sender in self._senders:
            sender.cancel()
        running: list[asyncio.Future[Any]] = [*self._senders, *([] if self._page is None else [self._page])]
        if running:
            await asyncio.wait(running)

    async def _send(self, publication: int, pages: Iterator[pb.PublishChecksums], deadline: float) -> int:
        """Send pages until `deadline`, on the loop's clock; returns the number of sums."""
        self._check_open()
        sender = cast("asyncio.Task[Any]", asyncio.current_task())
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)
        sent = 0
        # Sums of a publication that was released are no longer needed.
        with suppress(PublicationReleased, PublicationStale):
            async with self._turns.setdefault(publication, asyncio.Lock()):
                while (page := await self._computed(pages)) is not None:
                    sent += sum(len(part.sums) for part in page.checksums)
                    request = pb.NotifyRequest(
                        sender=engine_ref(self._token),
                        session_secret=self._token.session_secret,
                        notifications=[pb.Notification(checksums=page)],
                    )
                    await retrying(partial(self._home.notify_one, request), deadline)
        return sent

    async def _computed(self, pages: Iterator[pb.PublishChecksums]) -> pb.PublishChecksums | None:
        """The next page; None: there is none. One page is computed at a time."""
        async with self._computing:
            computed = self._loop.on_thread(partial(next, pages, None), "kvferry-checksums")
            # The thread goes on if the sender is cancelled.
            self._page = asyncio.ensure_future(computed)
            return await asyncio.shield(self._page)

    def _parts(self, name: str, blocks: Blocks) -> Iterator[_Part]:
        group = self._spec.group(name)
        blocks = without_nulls(group, blocks)
        check_ids(name, "source", blocks.ids, group.num_blocks, group.null_block)
        for plane in self._rank.planes:
            if plane.group == name:
                memory = self._memory.of(plane)
                if memory is None:
                    raise InvalidField("plane", plane.name, "a plane in host memory or in a registered tensor")
                yield plane, memory, blocks

    def _pages(self, publication: int, parts: list[_Part], last: bool) -> Iterator[pb.PublishChecksums]:
        page = pb.PublishChecksums(publication=publication, rank=self._rank.rank)
        room = PAGE_SUMS
        for checksums in (sums for part in parts for sums in self._checksums(publication, *part)):
            if len(checksums.sums) > room or len(page.checksums) == PAGE_PARTS:
                yield page
                page = pb.PublishChecksums(publication=publication, rank=self._rank.rank)
                room = PAGE_SUMS
            page.checksums.append(checksums)
            room -= len(checksums.sums)
        page.last = last
        yield page

    def _checksums(
        self, publication: int, plane: Plane, memory: MemoryAccess, blocks: Blocks
    ) -> Iterator[pb.Checksums]:
        """Yield sums, divided to fit a page; always in the same way, so that sending them again is idempotent."""
        for alike in source_blocks(plane, self._spec.group(plane.group), blocks, publication, self._share):
            sums = memory.sums(plane, plane.units, alike)
            for units, rows in divided(plane.units, alike.places, PAGE_SUMS):
                starts, counts = id_runs(alike.places[rows])
                begin, end = units.begin - plane.units.begin, units.end - plane.units.begin
                yield pb.Checksums(
                    rank=self._rank.rank,
                    plane=plane.name,
                    unit_begin=units.begin,
                    unit_end=units.end,
                    place_starts=starts.tolist(),
                    place_counts=counts.tolist(),
                    sums=np.ascontiguousarray(sums[rows, begin:end]).ravel().tolist(),
                )
