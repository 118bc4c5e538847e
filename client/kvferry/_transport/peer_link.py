"""The connection of one reading agent to one peer: the work queued for the peer, the posted chunks, and whether posted
chunks can still write.

Everything here runs on the agent's own thread (`kvferry._transport.reading_thread`) and never waits.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from kvferry._logs import Log
from kvferry._transport.nixl_agent import AgentInfo, HandleState, NixlError, ReadHandle, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.transfer import Chunk, FirstRead, PeerWork, PostedChunk
from kvferry.errors import KvferryError, TransferFailed

logger = Log(__name__)

POLL_FIRST = 50e-6
POLL_LAST = 1e-3
POLL_ABANDONED = 10e-3
"""Seconds between two polls: right after a post; at most; and at most while all posted chunks belong to transfers that
have ended."""

WORKED = 4
"""A check has moved bytes, as over TCP, if it took at least this many times the CPU time of the cheapest check (3 and
15 to 300 microseconds). The next check follows at once; a network card, which moves bytes without checks, is not
checked more often."""

CHECKS_AT_ONCE = 8
"""The most checks of a peer without a pause, before other peers have their turn."""

COPIED = 64 << 10
"""Bytes of a chunk from which its post shows whether posts copy."""

COPIES = 4
"""Posts in a row, at least, that were done when they returned, where posts copy. Over TCP some posts are, by chance;
over CMA the first post may not be."""

STALLED = 0.25
"""Seconds without an arriving chunk after which a peer counts as stalled."""

CARD_FENCE = 1.0
"""Seconds after the end of a transfer until a chunk counts as stuck, at most, where a network card moves the bytes: no
thread of the source takes part, so the end of the agent harms no process, and a chunk takes milliseconds."""

LATE = 20e-3
"""Seconds without an arriving chunk after which polling backs off. Not before, since polling also moves a TCP read
on."""


class LinkState(enum.Enum):
    """How far the connection to a peer is."""

    NEW = "new"
    WARMING = "warming"
    """The peer has not answered the first read yet."""
    READY = "ready"
    BROKEN = "broken"
    """There was an error. Nothing more is posted; posted chunks are still polled."""


class Link:
    """One reading agent's connection to one peer. `clock` is monotonic; `cpu_time` is that of the calling thread."""

    def __init__(
        self,
        info: AgentInfo,
        agent: ReadingAgent,
        options: NixlOptions,
        clock: Callable[[], float],
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self.info = info
        self.state = LinkState.NEW
        self.leaving = False
        """The link takes no new work, and is dropped when its work is done."""
        self.queued: deque[PeerWork] = deque()
        self.waiting: deque[PeerWork] = deque()
        """Work for the peer that has come since the link is broken or leaving: for the next link."""
        self.posted: list[PostedChunk] = []
        """Chunks, and the first read, which counts no bytes."""
        self.moved = 0
        """Bytes that have arrived."""
        self._in_flight = 0
        """Bytes that are posted and have not arrived."""
        self._copied = 0
        """Posts in a row that were done when they returned."""
        self._agent = agent
        self._options = options
        self._fence = options.fence_time
        self._clock = clock
        self._cpu_time = cpu_time
        self._added = False
        self._opened_at = clock()
        self._busy_since = 0.0
        """When a chunk last arrived, or was posted while no other was under way."""
        self._cheapest = math.inf
        """CPU seconds of the cheapest check so far."""
        self._pause = POLL_FIRST
        self._poll_at = 0.0
        """When the next poll is due."""

    def flowing(self, now: float) -> int:
        """Bytes posted and not seen DONE; 0 while the peer has stalled, so that it takes no room from others (R10)."""
        return self._in_flight if now < self._busy_since + STALLED else 0

    @property
    def copies(self) -> bool:
        """Whether posts return only when the bytes have arrived (CMA)."""
        return self._copied >= COPIES

    @property
    def lost(self) -> bool:
        """Whether, for some reads, only the end of the agent proves that they write no more."""
        return any(chunk.lost for chunk in self.posted)

    @property
    def quiet(self) -> bool:
        """Whether nothing posted to the peer can write any more."""
        return not self.posted

    @property
    def over(self) -> bool:
        return (self.leaving or self.state is LinkState.BROKEN) and self.quiet and not self.queued

    def stuck(self, now: float) -> bool:
        """Whether a chunk is under way whose transfer ended more than the fence time ago."""
        ended = (chunk.owner.ended_at for chunk in self._answering())
        return any(at is not None and at < now - self._fence for at in ended)

    def fence_at(self) -> float | None:
        """When the agent may be destroyed as far as this peer is concerned; None: at once. Reads that gave an error do
        not count: their connection is gone."""
        ended = [chunk.owner.ended_at for chunk in self._answering()]
        return max(((self._clock() if at is None else at) + self._fence for at in ended), default=None)

    def open(self) -> None:
        self.state = LinkState.WARMING
        try:
            self._agent.add_peer(self.info)
            self._added = True
            handle = self._agent.warm_up(self.info.name)
        except Exception as error:
            # Any error concerns this peer only (R10).
            self._break(self._unreadable(error))
            return
        until = self._opened_at + self._options.warm_up_timeout
        self._post(PostedChunk(handle, FirstRead(until, self._on_answer), 0))

    def post_next(self) -> bool:
        """Post one chunk of the work whose turn it is. False: there was no chunk, or no room."""
        for _ in range(len(self.queued)):
            if self.state is not LinkState.READY:
                return False
            if len(self.posted) >= 2 and self._in_flight + self._options.chunk_bytes > self._options.bytes_in_flight:
                self.step_back()
                return False
            work = self.queued.popleft()
            if work.owner.ended_at is not None:
                work.owner.settle(self._clock())
                continue
            try:
                chunk = work.next(self._options)
            except Exception as error:
                # Work that cannot be divided fails its own transfer; the others go on (R10).
                work.owner.fail(self._unreadable(error))
                continue
            if chunk is not None or work.blocked:
                self.queued.append(work)
            if chunk is not None:
                self._make(chunk)
                return True
        return False

    def step_back(self) -> None:
        """Tell all queued work that no chunk is taken for now."""
        for work in self.queued:
            work.step_back()

    def poll(self, now: float) -> bool:
        """Check the reads under way if a check is due. Returns whether any has ended."""
        if now < self._poll_at or self.quiet:
            return False
        worked = news = False
        for _ in range(CHECKS_AT_ONCE):
            began = self._cpu_time()
            chunks = self._answering()
            news = sum(self._check(chunk) for chunk in chunks) > 0
            took = self._cpu_time() - began
            self._cheapest = min(self._cheapest, max(1e-6, took / max(1, len(chunks))))
            worked = took > (len(chunks) - 1 + WORKED) * self._cheapest
            if news or not worked:
                break
        now = self._clock()
        if news:
            self._pause = POLL_FIRST
        elif now > self._busy_since + LATE:
            waited_for = any(chunk.owner.ended_at is None for chunk in self.posted)
            self._pause = min(2 * self._pause, POLL_LAST if waited_for else POLL_ABANDONED)
        self._poll_at = now if worked else now + self._pause
        return news

    def next_poll(self) -> float | None:
        """When `poll` is due again; None if no read under way can answer."""
        return self._poll_at if self._answering() else None

    def alarms(self) -> Iterator[float]:
        """When something is due even if the peer sends nothing."""
        # Deadlines of posted chunks, and fence times, are checked between polls.
        poll = self.next_poll()
        if poll is not None:
            yield poll
        if self.state is LinkState.WARMING:
            yield from map(self.answer_due, self.queued)
        for work in (*self.queued, *self.waiting):
            if work.owner.deadline is not None:
                yield work.owner.deadline

    def settle(self, now: float) -> None:
        """Judge deadlines, fail work whose wait for the first answer is over, and drop ended work."""
        for work in tuple(self.queued):
            if self.state is LinkState.WARMING and now > self.answer_due(work):
                work.owner.fail(self._error(f"no answer within {self._options.warm_up_timeout:g} s"))
        for works in (self.queued, self.waiting):
            for work in tuple(works):
                if work.owner.settle(now):
                    works.remove(work)
        for chunk in tuple(self.posted):
            chunk.owner.settle(now)

    def answer_due(self, work: PeerWork) -> float:
        """Until when this work waits for the peer's first answer."""
        return max(work.since, self._opened_at) + self._options.warm_up_timeout

    def drop(self) -> None:
        """Remove the peer from the agent. Only when the link is `over`."""
        if self._added:
            self._agent.remove_peer(self.info.name)

    def fenced(self) -> None:
        """End all posted chunks: the agent was destroyed, so nothing that it posted writes any more."""
        posted, self.posted = self.posted, []
        self._in_flight = 0
        for chunk in posted:
            chunk.owner.fenced()

    def fail_all(self, error: KvferryError) -> None:
        fail(self.queued, error)
        fail(self.waiting, error)
        for chunk in tuple(self.posted):
            chunk.owner.fail(error)

    def _answering(self) -> list[PostedChunk]:
        """The posted chunks of which NIXL's answers count."""
        return [chunk for chunk in self.posted if not chunk.lost]

    def _make(self, chunk: Chunk) -> None:
        owner = chunk.owner
        try:
            handle = self._agent.make(self.info.name, chunk.descriptors)
        except Exception as error:
            # Nothing was posted. A refused descriptor says nothing about the peer; NIXL's refusal of the read does.
            owner.fail(self._unreadable(error))
            if isinstance(error, NixlError):
                self._break(error)
            return
        if not owner.begin():
            self._release(handle)
            return
        self._post(PostedChunk(handle, owner, chunk.descriptors.total_bytes))

    def _post(self, posted: PostedChunk) -> None:
        state, failed = _answer(posted.handle.post)
        if posted.size >= COPIED:
            self._copied = self._copied + 1 if state is HandleState.DONE else 0
        if state is HandleState.DONE:
            self._landed(posted)
        elif state is HandleState.MOVING:
            if not self.posted:
                self._busy_since = self._clock()
            self.posted.append(posted)
            self._in_flight += posted.size
            self._pause = POLL_FIRST
            self._poll_at = min(self._poll_at, self._clock() + POLL_FIRST)
        else:
            self._lose(posted, failed or self._error("the read failed when it was posted"))

    def _check(self, chunk: PostedChunk) -> bool:
        state, failed = _answer(chunk.handle.check)
        if state is HandleState.MOVING:
            return False
        self._in_flight -= chunk.size
        self.posted.remove(chunk)
        if state is HandleState.DONE:
            self._busy_since = self._clock()
            self._landed(chunk)
        else:
            self._lose(chunk, failed or self._error("the read failed"))
        return True

    def _landed(self, chunk: PostedChunk) -> None:
        # First, because a thread may be waiting for the chunk.
        chunk.owner.landed(chunk.size)
        self._release(chunk.handle)
        self.moved += chunk.size

    def _lose(self, chunk: PostedChunk, error: KvferryError) -> None:
        chunk.lost = True
        self.posted.append(chunk)
        chunk.owner.fail(self._failed(error))
        self._break(error)

    def _on_answer(self) -> None:
        if self.state is LinkState.WARMING:
            self.state = LinkState.READY
            if not self._agent.over_tcp(self.info.name):
                self._fence = min(CARD_FENCE, self._fence)

    def _break(self, error: KvferryError) -> None:
        if self.state is not LinkState.BROKEN:
            logger.info("peer %s is broken: %s", self.info.name, error)
        self.state = LinkState.BROKEN
        fail(self.queued, self._failed(error))

    def _failed(self, error: KvferryError) -> KvferryError:
        """The error for the transfer: NIXL's as a `TransferFailed`, others unchanged."""
        if not isinstance(error, NixlError):
            return error
        call, problem = error.values.get("call", "NIXL"), error.values.get("problem", error.message)
        return self._error(f"it cannot be read any more ({call}: {problem})")

    def _unreadable(self, error: Exception) -> KvferryError:
        if isinstance(error, KvferryError):
            return error
        logger.exception("peer %s: a read could not be made", self.info.name)
        return self._error(f"the read could not be made: {error!r}")

    def _error(self, problem: str) -> TransferFailed:
        name = self.info.name
        return TransferFailed(f"{_called(name)}: {problem}", quiet=False, peer=name, problem=problem)

    def _release(self, handle: ReadHandle) -> None:
        try:
            handle.release()
        except NixlError as error:
            logger.warning("peer %s: the handle of an ended read was not released: %s", self.info.name, error)


def fail(works: deque[PeerWork], error: KvferryError) -> None:
    while works:
        works.popleft().owner.fail(error)


def _answer(ask: Callable[[], HandleState]) -> tuple[HandleState, NixlError | None]:
    """The state that a handle answers, or `HandleState.ERROR` and the error that NIXL raised."""
    try:
        return ask(), None
    except NixlError as error:
        return HandleState.ERROR, error


def _called(name: str) -> str:
    """A peer as messages name it: rank and engine. Agents are named ``kvferry.agent/digest/engine/rank``."""
    parts = name.split("/")
    if len(parts) < 4 or parts[0] != "kvferry.agent":
        return f"peer {name!r}"
    return f"rank {parts[-1]} of engine {'/'.join(parts[2:-1])!r}"
