"""The source side of integrity mode: a rank sums its published blocks and sends the sums to its engine's home."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvferry._clock import now
from kvferry._control.connection import Control, retrying
from kvferry._engine_spec import EngineSpec
from kvferry._memory.rank_memory import RankMemory
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import Closed, InvalidField, PublicationReleased, PublicationStale
from kvferry.geometry.blocks import Blocks, check_ids
from kvferry.geometry.model import Plane, RankGeometry
from kvferry.planner.checksum import Sums, runs_of
from kvferry.planner.summed_blocks import AlikeBlocks, IntegrityOptions, source_blocks
from kvferry.v1 import kv_transfer_pb2 as pb

PAGE_SUMS = 1 << 16
"""Most sums in one notification; the contract allows twice as many."""

PAGE_PARTS = 1024
"""Most planes in one notification: their names take space as well."""


class Checksummer:
    """Sums the published blocks of one rank. Thread-safe; one thread does the work, and starts with the first call.

    Args:
        home: the engine's home.
        spec, token: the engine.
        rank: geometry of the rank.
        memory: sums the rank's memory.
        options: which blocks are summed.
    """

    def __init__(
        self,
        home: Control,
        spec: EngineSpec,
        token: EngineToken,
        rank: RankGeometry,
        memory: RankMemory,
        options: IntegrityOptions,
    ) -> None:
        self._home = home
        self._spec = spec
        self._token = token
        self._rank = rank
        self._memory = memory
        self._share = options.share
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._closing = threading.Event()

    def submit(self, publication: int, blocks: Mapping[str, Blocks], *, last: bool, timeout: float) -> Future[int]:
        """See `Cache.checksum`."""
        if self._share == 0:
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        planes = [self._planes(name, listed) for name, listed in blocks.items()]
        parts = [part for found in planes for part in found]
        with self._lock:
            if self._closing.is_set():
                raise Closed(f"the cache of rank {self._rank.rank} of engine {self._spec.engine_id!r} is closed")
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvferry-checksums")
            return self._thread.submit(self._run, publication, parts, last, now() + timeout)

    def close(self) -> None:
        """Drop the queued work, and wait for the call in progress. Idempotent."""
        with self._lock:
            self._closing.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _planes(self, name: str, blocks: Blocks) -> list[tuple[Plane, Blocks]]:
        group = self._spec.group(name)
        check_ids(name, "source", blocks.ids, group.num_blocks, group.null_block)
        planes = [plane for plane in self._rank.planes if plane.group == name]
        for plane in planes:
            if self._memory.of(plane) is None:
                raise InvalidField("plane", plane.name, "a plane in host memory or in a registered tensor")
        return [(plane, blocks) for plane in planes]

    def _run(self, publication: int, parts: list[tuple[Plane, Blocks]], last: bool, deadline: float) -> int:
        sent = 0
        page = pb.PublishChecksums(publication=publication, rank=self._rank.rank)
        room = PAGE_SUMS
        try:
            for checksums in self._checksums(publication, parts):
                if len(checksums.sums) > room or len(page.checksums) == PAGE_PARTS:
                    self._send(page, deadline)
                    del page.checksums[:]
                    room = PAGE_SUMS
                page.checksums.append(checksums)
                room -= len(checksums.sums)
                sent += len(checksums.sums)
            page.last = last
            self._send(page, deadline)
        except (PublicationReleased, PublicationStale):
            # The publication has been released, so nobody needs the sums.
            return sent
        return sent

    def _checksums(self, publication: int, parts: Iterable[tuple[Plane, Blocks]]) -> Iterator[pb.Checksums]:
        for plane, blocks in parts:
            summer = self._memory.of(plane)
            if summer is None:
                continue
            for alike in source_blocks(plane, self._spec.group(plane.group), blocks, publication, self._share):
                yield from self._divided(plane, alike, summer.sums(plane, plane.units, alike))

    def _divided(self, plane: Plane, alike: AlikeBlocks, sums: Sums) -> Iterator[pb.Checksums]:
        """Divide the sums of alike blocks into parts that fit a page; always in the same way, so that sending them
        again is idempotent."""
        begin, end = plane.units.begin, plane.units.end
        step = min(end - begin, PAGE_SUMS)
        rows = PAGE_SUMS // step
        for unit in range(begin, end, step):
            units = min(unit + step, end)
            for first in range(0, len(alike.places), rows):
                starts, counts = runs_of(alike.places[first : first + rows])
                part = np.ascontiguousarray(sums[first : first + rows, unit - begin : units - begin])
                yield pb.Checksums(
                    rank=self._rank.rank,
                    plane=plane.name,
                    unit_begin=unit,
                    unit_end=units,
                    place_starts=starts.tolist(),
                    place_counts=counts.tolist(),
                    sums=part.ravel().tolist(),
                )

    def _send(self, page: pb.PublishChecksums, deadline: float) -> None:
        request = pb.NotifyRequest(
            sender=engine_ref(self._token),
            session_secret=self._token.session_secret,
            notifications=[pb.Notification(checksums=page)],
        )

        def attempt(left: float) -> pb.NotificationResult:
            if self._closing.is_set():
                raise Closed(f"sums of publication {page.publication} were not sent: the cache is closed")
            return self._home.notify_one(request, left)

        retrying(attempt, deadline, self._closing.wait)
