"""The source side of integrity mode: a rank sums its published blocks and sends the sums to its engine's home."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.connection import CALL_TIMEOUT, SILENCE, Control
from kvferry._engine_spec import EngineSpec
from kvferry._memory.rank_memory import RankMemory
from kvferry._threads import guarded, settle, start_loop
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import Closed, InvalidField, KvferryError, PublicationReleased, PublicationStale, Unreachable
from kvferry.geometry.blocks import Blocks, check_ids, without_nulls
from kvferry.geometry.model import RankGeometry
from kvferry.geometry.plane import Plane
from kvferry.planner.checksum import Sums, runs_of
from kvferry.planner.summed_blocks import AlikeBlocks, IntegrityOptions, source_blocks
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

PAGE_SUMS = 1 << 16
"""Most sums in one notification; the contract allows twice as many."""

PAGE_PARTS = 1024
"""Most planes in one notification: their names take space as well."""


@dataclass(slots=True, eq=False)
class _Order:
    """Sums to compute and to send, in pages. Those that the home does not take yet are kept for the next attempt.

    Attributes:
        publication: whose blocks are summed.
        pages: computes the pages.
        page: the page that was not sent yet; None: the next one.
        deadline, silent_until: when it fails, and when a warning says what it waits for, on `kvferry._clock`.
        done: its future; running from its first attempt.
        sent: number of sums in its pages so far.
    """

    publication: int
    pages: Iterator[pb.PublishChecksums]
    deadline: float
    silent_until: float
    done: Future[int] = field(default_factory=Future)
    page: pb.PublishChecksums | None = None
    sent: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(jitter=0.5))


class Checksummer:
    """Sums the published blocks of one rank. Thread-safe; one thread does the work, and starts with the first call.

    Publications do not wait for each other: while the home does not take the sums of one, those of others are sent. The
    sums of one are sent in the order in which they came: the last say that there are no more.

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
        self._changed = threading.Condition()
        self._orders: list[tuple[float, int, _Order]] = []
        """A heap, with one order per publication: when its next attempt is due, on `kvferry._clock`, then by age."""
        self._later: dict[int, deque[_Order]] = {}
        """What follows the orders of the heap, and the one that is worked on, by publication."""
        self._age = itertools.count()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, publication: int, blocks: Mapping[str, Blocks], *, last: bool, timeout: float) -> Future[int]:
        """See `Cache.checksum`."""
        if self._share == 0:
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        planes = [self._planes(name, listed) for name, listed in blocks.items()]
        parts = [part for found in planes for part in found]
        began = now()
        order = _Order(publication, self._pages(publication, parts, last), began + timeout, began + SILENCE)
        with self._changed:
            if self._closing:
                raise Closed(f"the cache of rank {self._rank.rank} of engine {self._spec.engine_id!r} is closed")
            if self._thread is None:
                self._thread = start_loop(self._turn, "kvferry-checksums")
            if publication in self._later:
                self._later[publication].append(order)
            else:
                self._later[publication] = deque()
                heapq.heappush(self._orders, (began, next(self._age), order))
                self._changed.notify()
        return order.done

    def close(self) -> None:
        """Drop the queued work, and wait for the call in progress. Idempotent."""
        with self._changed:
            self._closing = True
            orders = [order for _, _, order in self._orders]
            orders += [order for later in self._later.values() for order in later]
            self._orders, self._later = [], {}
            thread, self._thread = self._thread, None
            self._changed.notify()
        for order in orders:
            self._drop(order)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _turn(self) -> bool:
        order = self._next()
        if order is None:
            return False
        if not order.done.running() and not order.done.set_running_or_notify_cancel():
            self._go_on(order)
            return True
        try:
            pause = self._attempt(order)
        except BaseException as error:
            self._go_on(order)
            settle(order.done, error)
            return True
        if pause is None:
            self._go_on(order)
            settle(order.done, order.sent)
            return True
        with self._changed:
            closing = self._closing
            if not closing:
                heapq.heappush(self._orders, (now() + pause, next(self._age), order))
        if closing:
            self._drop(order)
        return True

    def _go_on(self, ended: _Order) -> None:
        """Let the next order of a publication take the place of one that has ended."""
        with self._changed:
            later = self._later.get(ended.publication)
            if later:
                heapq.heappush(self._orders, (now(), next(self._age), later.popleft()))
            else:
                self._later.pop(ended.publication, None)

    def _next(self) -> _Order | None:
        """Wait until an order is due, and take it; None: the checksummer was closed."""
        with self._changed:
            while not self._closing:
                pause = self._orders[0][0] - now() if self._orders else None
                if pause is not None and pause <= 0:
                    return heapq.heappop(self._orders)[2]
                self._changed.wait(pause)
        return None

    def _attempt(self, order: _Order) -> float | None:
        """Send the pages of an order. Returns the seconds until the next attempt; None: it is done."""
        try:
            while True:
                if order.page is None:
                    order.page = next(order.pages, None)
                    if order.page is None:
                        return None
                    order.sent += sum(len(part.sums) for part in order.page.checksums)
                self._send(order.page, order.deadline)
                order.page = None
        except (PublicationReleased, PublicationStale):
            # The publication has been released, so nobody needs the sums.
            return None
        except KvferryError as error:
            pause = order.backoff.next(error.retry_after)
            if not error.retryable or now() + pause >= order.deadline:
                raise
            if not isinstance(error, Unreachable) and now() >= order.silent_until:
                logger.warning("checksums: still failing after %.0f s: %s", SILENCE, error.message)
                order.silent_until = math.inf
            return pause

    def _drop(self, order: _Order) -> None:
        """End an order that was not done when the checksummer was closed."""
        if order.done.running():
            problem = f"sums of rank {self._rank.rank} of engine {self._spec.engine_id!r} were not sent"
            settle(order.done, Closed(f"{problem}: the cache is closed"))
        else:
            guarded(order.done.cancel, "a callback of a future")

    def _planes(self, name: str, blocks: Blocks) -> list[tuple[Plane, Blocks]]:
        group = self._spec.group(name)
        blocks = without_nulls(group, blocks)
        check_ids(name, "source", blocks.ids, group.num_blocks, group.null_block)
        planes = [plane for plane in self._rank.planes if plane.group == name]
        for plane in planes:
            if self._memory.of(plane) is None:
                raise InvalidField("plane", plane.name, "a plane in host memory or in a registered tensor")
        return [(plane, blocks) for plane in planes]

    def _pages(self, publication: int, parts: list[tuple[Plane, Blocks]], last: bool) -> Iterator[pb.PublishChecksums]:
        page = pb.PublishChecksums(publication=publication, rank=self._rank.rank)
        room = PAGE_SUMS
        for checksums in self._checksums(publication, parts):
            if len(checksums.sums) > room or len(page.checksums) == PAGE_PARTS:
                yield page
                page = pb.PublishChecksums(publication=publication, rank=self._rank.rank)
                room = PAGE_SUMS
            page.checksums.append(checksums)
            room -= len(checksums.sums)
        page.last = last
        yield page

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
        if self._closing:
            raise Closed(f"sums of publication {page.publication} were not sent: the cache is closed")
        self._home.notify_one(request, max(0.001, min(CALL_TIMEOUT, deadline - now())))
