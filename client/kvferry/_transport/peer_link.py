"""The connection of one reading agent to one peer: the work that is queued for it, the chunks that are posted, and
whether those can still write.

Everything here runs on the agent's own thread (`kvferry._transport.reading_thread`) and never waits.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Callable

from kvferry._logs import Log
from kvferry._transport.nixl_agent import AgentInfo, HandleState, NixlError, ReadHandle, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_work import Chunk, ChunkOwner, PeerWork
from kvferry.errors import KvferryError, TransferFailed

logger = Log(__name__)

POLL_FIRST = 50e-6
POLL_LAST = 1e-3
POLL_ABANDONED = 10e-3
"""Seconds between two polls: right after a chunk was posted; at most; at most while all posted chunks are of transfers
that have ended."""

WORKED = 4
"""How many times the CPU time of the cheapest check one takes, at least, that has moved bytes, as over TCP (3 and 15 to
300 microseconds). The next check follows at once, while a network card that moves bytes by itself is left alone."""

CHECKS_AT_ONCE = 8
"""How often a peer is checked without a pause, at most, before others have their turn."""

COPIED = 64 << 10
"""Bytes of a chunk from which its post shows whether posts copy."""

COPIES = 4
"""Posts in a row, at least, that were done when they returned, where posts copy. Over TCP some are, too, by chance, and
over CMA the first one may not be."""

STALLED = 0.25
"""Seconds after which a peer from which no chunk has arrived counts as stalled."""

CARD_FENCE = 1.0
"""Seconds after the end of a transfer until a chunk of it counts as stuck, at most, where a network card moves the
bytes: nobody at the source takes part, so the end of the agent harms nobody, and a chunk takes milliseconds."""

RATE_FIRST = 1e9
"""Bytes per second that are assumed of a peer before its first chunk was measured."""


class PostedChunk:
    """A posted chunk that has not been seen DONE."""

    __slots__ = ("handle", "lost", "owner", "size")

    def __init__(self, handle: ReadHandle, owner: ChunkOwner, size: int) -> None:
        self.handle = handle
        self.owner = owner
        self.size = size
        self.lost = False
        """NIXL reported an error for it. It may still write, and no later answer of NIXL's proves that it does not."""


class LinkState(enum.Enum):
    """The state of a link."""

    NEW = "new"
    WARMING = "warming"
    """The peer's answer to the first read is awaited."""
    READY = "ready"
    BROKEN = "broken"
    """There was an error. Nothing more is posted; what is posted is still polled."""


class Link:
    """One reading agent's connection to one peer.

    Args:
        info: the peer.
        agent: the agent.
        options: how bytes move.
        clock: seconds, monotonic.
        cpu_time: CPU seconds of the calling thread.
    """

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
        """It takes no new work, and is dropped when the work that it has is done."""
        self.queued: deque[PeerWork] = deque()
        self.posted: list[PostedChunk] = []
        self.moved = 0
        """Bytes seen to have arrived."""
        self._copied = 0
        """Posts in a row that were done when they returned."""
        self._agent = agent
        self._options = options
        self._fence = options.fence_time
        self._clock = clock
        self._cpu_time = cpu_time
        self._added = False
        self._opened_at = clock()
        self._warming: ReadHandle | None = None
        self._warming_lost = False
        self._in_flight = 0
        self._rate = RATE_FIRST
        self._busy_since = 0.0
        """When a chunk last arrived, or was posted where none was under way."""
        self._flowing_since = 0.0
        self._flowed = 0
        """Since when there is always a chunk under way, and the bytes that have arrived since."""
        self._cheapest = math.inf
        """CPU seconds of the cheapest check so far."""
        self._pause = POLL_FIRST
        self._poll_at = 0.0

    def flowing(self, now: float) -> int:
        """Bytes that are posted and not seen DONE; 0 while the peer has stalled, so that it takes no room from others
        (R10)."""
        return self._in_flight if now < self._busy_since + STALLED else 0

    @property
    def copies(self) -> bool:
        """Whether its posts return only when the bytes are here (CMA)."""
        return self._copied >= COPIES

    @property
    def lost(self) -> bool:
        """Whether it has reads for which only the end of the agent proves that they write no more."""
        return self._warming_lost or any(chunk.lost for chunk in self.posted)

    @property
    def quiet(self) -> bool:
        """Whether nothing that was posted to it can write any more."""
        return not self.posted and self._warming is None

    @property
    def over(self) -> bool:
        """Whether it can be dropped."""
        return (self.leaving or self.state is LinkState.BROKEN) and self.quiet and not self.queued

    def stuck(self, now: float) -> bool:
        """Whether a chunk is under way whose transfer ended more than the fence time ago, or the first read has taken
        more than its time-out and the fence time."""
        if self._warming is not None and now > self._opened_at + self._options.warm_up_timeout + self._fence:
            return True
        ended = (chunk.owner.ended_at for chunk in self.posted if not chunk.lost)
        return any(at is not None and at < now - self._fence for at in ended)

    def fence_at(self) -> float | None:
        """When the agent may be destroyed as far as this peer is concerned; None: at once. Reads that gave an error do
        not count: their connection is gone."""
        waits = [
            (self._clock() if chunk.owner.ended_at is None else chunk.owner.ended_at) + self._fence
            for chunk in self.posted
            if not chunk.lost
        ]
        if self._warming is not None and not self._warming_lost:
            waits.append(self._opened_at + self._options.warm_up_timeout + self._fence)
        return max(waits, default=None)

    def open(self) -> None:
        """Add the peer and post its first read."""
        self.state = LinkState.WARMING
        try:
            self._agent.add_peer(self.info)
            self._added = True
            handle = self._agent.warm_up(self.info.name)
        except Exception as error:
            # Whatever it is, it concerns this peer only (R10).
            self._break(self._unreadable(error))
            return
        self._warming = handle
        self._on_warming(handle, *_answer(handle.post))

    def post_next(self) -> bool:
        """Post one chunk of the work whose turn it is. False: there was none, or no room."""
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
                # What cannot be divided fails its own transfer; the others go on (R10).
                work.owner.fail(self._unreadable(error))
                continue
            if chunk is not None or work.blocked:
                self.queued.append(work)
            if chunk is not None:
                self._post(chunk)
                return True
        return False

    def step_back(self) -> None:
        """No work is asked for a chunk for now."""
        for work in self.queued:
            work.step_back()

    def poll(self, now: float) -> bool:
        """Check what is under way, if it is time to. Returns whether anything has ended."""
        if now < self._poll_at or self.quiet:
            return False
        worked = news = False
        for _ in range(CHECKS_AT_ONCE):
            began = self._cpu_time()
            checks, news = self._check_all()
            took = self._cpu_time() - began
            self._cheapest = min(self._cheapest, max(1e-6, took / max(1, checks)))
            worked = took > (checks - 1 + WORKED) * self._cheapest
            if news or not worked:
                break
        now = self._clock()
        if news:
            self._pause = POLL_FIRST
        elif now > self._busy_since + 2 * self._in_flight / self._rate + POLL_LAST:
            # Polling is also what makes a TCP read progress, so it backs off only once the read is later than expected.
            waited_for = any(chunk.owner.ended_at is None for chunk in self.posted)
            self._pause = min(2 * self._pause, POLL_LAST if waited_for else POLL_ABANDONED)
        self._poll_at = now if worked else now + self._pause
        return news

    def _check_all(self) -> tuple[int, bool]:
        """Check everything under way once. Returns how much that was, and whether anything has ended."""
        checks, news = 0, False
        if self._warming is not None and not self._warming_lost:
            checks, news = 1, self._on_warming(self._warming, *_answer(self._warming.check))
        for chunk in [chunk for chunk in self.posted if not chunk.lost]:
            checks += 1
            news |= self._check(chunk)
        return checks, news

    def next_poll(self) -> float | None:
        """When `poll` is due again; None if nothing is under way that could answer."""
        waiting = (self._warming is not None and not self._warming_lost) or any(not chunk.lost for chunk in self.posted)
        return self._poll_at if waiting else None

    def settle(self, now: float) -> None:
        """Judge deadlines, give up waiting for the first answer, and drop work that has ended."""
        for work in tuple(self.queued):
            if self.state is LinkState.WARMING and now > self.answer_due(work):
                work.owner.fail(self._error(f"no answer within {self._options.warm_up_timeout:g} s"))
            work.owner.settle(now)
            if work.owner.ended_at is not None:
                self.queued.remove(work)
        for chunk in tuple(self.posted):
            chunk.owner.settle(now)

    def answer_due(self, work: PeerWork) -> float:
        """Until when some work waits for the peer's first answer."""
        return max(work.since, self._opened_at) + self._options.warm_up_timeout

    def drop(self) -> None:
        """Remove the peer from the agent. Only when `over`."""
        if self._added:
            self._agent.remove_peer(self.info.name)

    def fenced(self) -> None:
        """The agent was destroyed: nothing that was posted writes any more."""
        posted, self.posted = self.posted, []
        self._in_flight = 0
        self._warming = None
        for chunk in posted:
            chunk.owner.fenced()

    def fail_all(self, error: KvferryError) -> None:
        """Fail all work that is queued or posted."""
        self._fail_queued(error)
        for chunk in tuple(self.posted):
            chunk.owner.fail(error)

    def _post(self, chunk: Chunk) -> None:
        owner = chunk.owner
        try:
            handle = self._agent.make(self.info.name, chunk.descriptors)
        except Exception as error:
            # Nothing was posted. A descriptor that was refused says nothing about the peer; NIXL's refusal does.
            owner.fail(self._unreadable(error))
            if isinstance(error, NixlError):
                self._break(error)
            return
        posted = PostedChunk(handle, owner, chunk.descriptors.total_bytes)
        if not owner.begin():
            self._release(handle)
            return
        before = self._clock()
        state, failed = _answer(handle.post)
        if posted.size >= COPIED:
            self._copied = self._copied + 1 if state is HandleState.DONE else 0
        if state is HandleState.DONE:
            self._landed(posted, posted.size, self._clock() - before)
        elif state is HandleState.MOVING:
            if not self.posted:
                self._busy_since = self._flowing_since = before
                self._flowed = 0
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
            # Chunks that are under way together arrive together: one by one they would seem to take no time.
            self._busy_since = self._clock()
            self._flowed += chunk.size
            self._landed(chunk, self._flowed, self._busy_since - self._flowing_since)
        else:
            self._lose(chunk, failed or self._error("the read failed"))
        return True

    def _landed(self, chunk: PostedChunk, size: int, seconds: float) -> None:
        """A chunk has arrived, the last of so many bytes that took so long."""
        # First: somebody may be waiting for it.
        chunk.owner.landed(chunk.size)
        self._release(chunk.handle)
        self.moved += chunk.size
        self._rate = 0.7 * self._rate + 0.3 * max(1e6, size / max(1e-6, seconds))

    def _lose(self, chunk: PostedChunk, error: KvferryError) -> None:
        chunk.lost = True
        self.posted.append(chunk)
        chunk.owner.fail(self._failed(error))
        self._break(error)

    def _on_warming(self, handle: ReadHandle, state: HandleState, failed: NixlError | None) -> bool:
        if state is HandleState.MOVING:
            return False
        if state is HandleState.DONE:
            self._release(handle)
            self._warming = None
            if self.state is LinkState.WARMING:
                self.state = LinkState.READY
                if not self._agent.over_tcp(self.info.name):
                    self._fence = min(CARD_FENCE, self._fence)
        else:
            self._warming_lost = True
            self._break(failed or self._error("its first read failed"))
        return True

    def _break(self, error: KvferryError) -> None:
        if self.state is not LinkState.BROKEN:
            logger.info("peer %s is broken: %s", self.info.name, error)
        self.state = LinkState.BROKEN
        self._fail_queued(self._failed(error))

    def _fail_queued(self, error: KvferryError) -> None:
        queued = tuple(self.queued)
        self.queued.clear()
        for work in queued:
            work.owner.fail(error)

    def _failed(self, error: KvferryError) -> KvferryError:
        """The error as the transfer reports it: NIXL's as a `TransferFailed`, others unchanged."""
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
            logger.warning("a handle of an ended read was not released: %s", error)


def _answer(ask: Callable[[], HandleState]) -> tuple[HandleState, NixlError | None]:
    """Return the state that a handle answers, and why it answers none, if NIXL raised an error."""
    try:
        return ask(), None
    except NixlError as error:
        return HandleState.ERROR, error


def _called(name: str) -> str:
    """A peer's name in messages: rank and engine. Agents are named ``kvferry.agent/digest/engine/rank``."""
    parts = name.split("/")
    if len(parts) < 4 or parts[0] != "kvferry.agent":
        return f"peer {name!r}"
    return f"rank {parts[-1]} of engine {'/'.join(parts[2:-1])!r}"
