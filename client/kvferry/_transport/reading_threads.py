"""The reading threads of one rank: the thread that reads from a peer, the threads that help with a large read, and the
replacement of a retired thread.

Threading: everything may be called from any thread, and only `wait_made` and `join` wait.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import zlib
from collections.abc import Callable, Sequence

from kvferry._logs import Log
from kvferry._transport.nixl_agent import AgentInfo, MakeReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_work import PeerWork, as_kvferry_error
from kvferry._transport.reading_thread import ReadingThread
from kvferry.errors import Closed
from kvferry.geometry.model import MemoryRegion
from kvferry.stats import TransportGauges

logger = Log(__name__)


class ReadingThreads:
    """All reading threads of one rank, each made when it is needed. See `Transport` for the arguments. `lock` is the
    transport's.

    Attributes:
        closed: no other thread is made. Set with the lock held.
        places: the threads that get new work; None where no thread was needed so far.
        living: all threads that have not ended, retired ones included.
    """

    def __init__(
        self,
        regions: Sequence[MemoryRegion],
        options: NixlOptions,
        *,
        lock: threading.Lock,
        reading: MakeReadingAgent,
        keep: object,
        clock: Callable[[], float],
    ) -> None:
        self._regions = tuple(regions)
        self._options = options
        self._reading = reading
        self._keep = keep
        self._clock = clock
        self._lock = lock
        self.closed = False
        self.places: list[ReadingThread | None] = [None] * options.most_reading_agents
        self._spread = options.reading_agents or 1
        """Threads over which peers are spread. The other threads only take part in large reads."""
        self.living: set[ReadingThread] = set()
        self._moved_before = 0
        self._agents_retired = 0

    def submit(self, work: PeerWork) -> None:
        """Hand work to the thread that reads from its peer. If there is no such thread, the work fails and nothing is
        raised: a retired thread hands on its unposted work here, and must go on."""
        try:
            while not self.of(work.info.name).send(work):
                pass
        except Exception as error:
            work.owner.fail(as_kvferry_error(error, f"the start of transfer {work.owner.label!r}"))

    def warm(self, peer: AgentInfo) -> None:
        """Connect to a peer; raises `Closed`."""
        while not self.of(peer.name).send(peer):
            pass

    def prepare(self, timeout: float) -> None:
        threads = [self._at(place) for place in range(self._spread)]
        until = self._clock() + timeout
        for thread in threads if timeout else ():
            thread.wait_made(max(0.0, until - self._clock()))

    def of(self, peer_name: str) -> ReadingThread:
        """The thread that reads from a peer; a new thread if the last was retired."""
        return self._at(self._place_of(peer_name))

    def copies(self, peer: AgentInfo) -> bool:
        home = self.places[self._place_of(peer.name)]
        return home is not None and home.copies(peer)

    def helpers(self, peer: AgentInfo) -> list[ReadingThread]:
        """The other threads that take part in a large read from a peer: those connected to the peer. The rest connect
        meanwhile, for the next read."""
        home = self._place_of(peer.name)
        ready = []
        for place in range(len(self.places)):
            helper = None if place == home else self._helper_at(place)
            if helper is not None and helper.ready(peer):
                ready.append(helper)
            elif helper is not None:
                helper.send(peer)
        return ready

    def retire_peer(self, name: str) -> None:
        for thread in self._all():
            thread.send(name)

    def wake(self) -> None:
        for thread in self._all():
            thread.wake()

    def counts(self) -> TransportGauges:
        """The gauges of the threads; `Transport.gauges` adds the others."""
        with self._lock:
            threads, moved, retired = tuple(self.living), self._moved_before, self._agents_retired
        return TransportGauges(
            bytes_moved=moved + sum(thread.moved for thread in threads),
            chunks_in_flight=sum(thread.chunks_in_flight for thread in threads),
            agents=len(threads),
            retired_agents=sum(thread.retired for thread in threads),
            peers=sum(thread.peer_count for thread in threads),
            agents_retired=retired,
        )

    def close(self, until: float) -> bool:
        """End each thread when all is quiet. The caller has set `closed`, and cancelled the transfers. Returns whether
        all threads have ended by `until`."""
        threads = self._all()
        for thread in threads:
            thread.close()
        ended = [thread.join(max(0.0, until - self._clock())) for thread in threads]
        return all(ended)

    def _all(self) -> tuple[ReadingThread, ...]:
        with self._lock:
            return tuple(self.living)

    def _place_of(self, peer_name: str) -> int:
        return zlib.crc32(peer_name.encode()) % self._spread

    def _helper_at(self, place: int) -> ReadingThread | None:
        """A thread that may take part in reads; None: no thread can be had, and reads go on without it."""
        known = self.places[place]
        if known is not None and known.refusal is not None:
            # Another attempt takes long, and is not worth it for each large read.
            return None
        try:
            return self._at(place)
        except Exception as error:
            logger.info("large reads are not shared with another thread: %r", error)
            return None

    def _at(self, place: int) -> ReadingThread:
        with self._lock:
            thread = self.places[place]
            if thread is None or not thread.accepting:
                if self.closed:
                    raise Closed("the transport was closed")
                name = f"kvferry/{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(6)}/reading"
                thread = ReadingThread(
                    name,
                    self._regions,
                    self._options,
                    self._clock,
                    may_retire=self._may_retire,
                    moved_on=self.submit,
                    gone=self._gone,
                    reading=self._reading,
                    keep=self._keep,
                )
                self.places[place] = thread
                self.living.add(thread)
            return thread

    def _may_retire(self) -> bool:
        with self._lock:
            may = sum(thread.retired for thread in self.living) < self._options.retired_agents
            self._agents_retired += may
            return may

    def _gone(self, thread: ReadingThread, quiet: bool) -> None:
        # First the reason, then the gauge that shows it.
        if not quiet:
            logger.error("reading agent %s could not be destroyed", thread.name)
        with self._lock:
            self.living.discard(thread)
            self._moved_before += thread.moved
