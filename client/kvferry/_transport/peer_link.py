"""One peer on one reading agent: what is to be read from it, what is posted, and what can be said about that.

Everything here happens on the agent's own thread (`kvferry._transport.reading_thread`) and waits for nothing.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry._memory.access import StagingSpace
from kvferry._transport.nixl_agent import AgentInfo, HandleState, NixlError, ReadHandle, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry.errors import KvferryError, TransferFailed
from kvferry.planner.descriptors import Descriptors, chunks
from kvferry.planner.footprint import Footprint

logger = logging.getLogger(__name__)

POLL_FIRST = 50e-6
POLL_LAST = 1e-3
POLL_ABANDONED = 10e-3
"""Between two polls while only reads are under way that nobody waits for any more."""

STALLED = 0.25
"""Seconds without a chunk that arrives after which a peer counts as stalled."""

RATE_FIRST = 1e9
"""Bytes per second that a peer is believed to give before anything was measured."""


class ChunkOwner(Protocol):
    """The transfer that a share belongs to. Thread-safe; its calls return at once, callbacks of its owner included."""

    @property
    def label(self) -> str:
        """For messages."""

    @property
    def deadline(self) -> float | None:
        """When it ends by itself; None if it does not."""

    @property
    def ended_at(self) -> float | None:
        """When it ended, well or not; None while it goes on."""

    def begin(self) -> bool:
        """A chunk is about to be posted, and may write from now on. False: the transfer has ended, post nothing."""

    def landed(self, size: int) -> None:
        """A chunk was seen DONE: it writes no more."""

    def fenced(self) -> None:
        """The agent of a chunk was destroyed: it writes no more, and nothing is known of its bytes."""

    def fail(self, error: KvferryError) -> None:
        """It cannot succeed. Chunks that are neither landed nor fenced may still write."""

    def settle(self, now: float) -> None:
        """Judge the deadline, and run callbacks that are due."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What one NIXL handle reads, and whose it is."""

    descriptors: Descriptors
    account: ChunkOwner


class PeerWork:
    """What one transfer reads from one peer.

    Attributes:
        account: the transfer.
        info: the peer.
        since: when it began to wait for the peer's first answer.
        spaces: memory that it is read into beside the rank's own.
        footprint: what may be touched, checked chunk by chunk; None: that was checked before.
    """

    def __init__(
        self,
        account: ChunkOwner,
        info: AgentInfo,
        descriptors: Sequence[Descriptors],
        since: float,
        spaces: Sequence[StagingSpace] = (),
        footprint: Footprint | None = None,
    ) -> None:
        self.account = account
        self.info = info
        self.since = since
        self.spaces = tuple(spaces)
        self._footprint = footprint
        self._descriptors = descriptors
        self._chunks: Iterator[Descriptors] | None = None

    @property
    def blocked(self) -> bool:
        """`next` had nothing to give, but will have; the thread is woken then."""
        return False

    def step_back(self) -> None:
        """`next` will not be called for now: whoever waits for the same goes before it."""

    def next(self, options: NixlOptions) -> Chunk | None:
        """The next chunk, to be posted now; None if there is none, at least for now."""
        if self._chunks is None:
            self._chunks = self._divided(options)
        chunk = next(self._chunks, None)
        return None if chunk is None else Chunk(chunk, self.account)

    def _divided(self, options: NixlOptions) -> Iterator[Descriptors]:
        for descriptors in self._descriptors:
            for chunk in divide(descriptors, options):
                if self._footprint is not None:
                    self._footprint.check(chunk)
                yield chunk


def divide(descriptors: Descriptors, options: NixlOptions) -> Iterator[Descriptors]:
    """Descriptors in chunks that suit the transport."""
    if descriptors.count:
        # Short descriptors cost by number, so that a chunk of a given size would hold up everything else.
        mean = max(1, descriptors.total_bytes // descriptors.count)
        yield from chunks(descriptors, min(options.chunk_bytes, mean * options.chunk_descriptors))


class PostedChunk:
    """A posted chunk that has not been seen DONE."""

    __slots__ = ("account", "handle", "lost", "size")

    def __init__(self, handle: ReadHandle, account: ChunkOwner, size: int) -> None:
        self.handle = handle
        self.account = account
        self.size = size
        self.lost = False
        """NIXL reported an error: what it says from now on proves nothing."""


class LinkState(enum.Enum):
    """Where a peer stands on an agent."""

    NEW = "new"
    WARMING = "warming"
    """Its first answer is awaited."""
    READY = "ready"
    BROKEN = "broken"
    """There was an error: nothing more is posted to it, what is posted is polled on."""


class Link:
    """One peer on one reading agent.

    Args:
        info: the peer.
        agent: the agent.
        options: how bytes move.
        clock: seconds, monotonic.
    """

    def __init__(self, info: AgentInfo, agent: ReadingAgent, options: NixlOptions, clock: Callable[[], float]) -> None:
        self.info = info
        self.state = LinkState.NEW
        self.leaving = False
        """No new shares; dropped when the ones it has are through."""
        self.shares: deque[PeerWork] = deque()
        self.flights: list[PostedChunk] = []
        self.moved = 0
        self._agent = agent
        self._options = options
        self._clock = clock
        self._added = False
        self._opened_at = clock()
        self._warming: ReadHandle | None = None
        self._warming_lost = False
        self._in_flight = 0
        self._rate = RATE_FIRST
        self._busy_since = 0.0
        self._pause = POLL_FIRST
        self._poll_at = 0.0

    def flowing(self, now: float) -> int:
        """Bytes that are posted and arriving. Those of a peer that has stalled take no room from others (R10)."""
        return self._in_flight if now < self._busy_since + STALLED else 0

    @property
    def lost(self) -> bool:
        """Whether it has reads that only the end of the agent can fence."""
        return self._warming_lost or any(flight.lost for flight in self.flights)

    @property
    def quiet(self) -> bool:
        """Whether nothing that was posted to it can write any more."""
        return not self.flights and self._warming is None

    @property
    def over(self) -> bool:
        """Whether it can be dropped."""
        return (self.leaving or self.state is LinkState.BROKEN) and self.quiet and not self.shares

    def stuck(self, now: float) -> bool:
        """Whether a read is under way that nobody has waited for since the fence time."""
        fence = self._options.fence_time
        if self._warming is not None and now > self._opened_at + self._options.warm_up_timeout + fence:
            return True
        return any(_abandoned(flight, now - fence) for flight in self.flights if not flight.lost)

    def fence_at(self) -> float | None:
        """When the agent may be destroyed as far as this peer goes; None: at once. Reads that gave an error do not
        count: their connection is gone."""
        waits = [
            (self._clock() if flight.account.ended_at is None else flight.account.ended_at) + self._options.fence_time
            for flight in self.flights
            if not flight.lost
        ]
        if self._warming is not None and not self._warming_lost:
            waits.append(self._opened_at + self._options.warm_up_timeout + self._options.fence_time)
        return max(waits, default=None)

    def open(self) -> None:
        """Add the peer and post its first read."""
        self.state = LinkState.WARMING
        try:
            self._agent.add_peer(self.info)
            self._added = True
            handle = self._agent.warm_up(self.info.name)
        except Exception as error:
            # Whatever it is, it is this peer's alone (R10).
            self._break(self._unreadable(error))
            return
        self._warming = handle
        try:
            state = handle.post()
        except NixlError as error:
            self._warming_lost = True
            self._break(error)
            return
        self._on_warming(state)

    def post_next(self) -> bool:
        """Post one chunk of the share whose turn it is. False: there was none, or no room."""
        for _ in range(len(self.shares)):
            if self.state is not LinkState.READY:
                return False
            if len(self.flights) >= 2 and self._in_flight + self._options.chunk_bytes > self._options.bytes_in_flight:
                self.step_back()
                return False
            share = self.shares.popleft()
            if share.account.ended_at is not None:
                share.account.settle(self._clock())
                continue
            try:
                chunk = share.next(self._options)
            except Exception as error:
                # Whatever cannot be divided is one transfer's fault; the other peers' go on (R10).
                share.account.fail(self._unreadable(error))
                continue
            if chunk is not None or share.blocked:
                self.shares.append(share)
            if chunk is not None:
                self._post(chunk.account, chunk.descriptors, chunk.descriptors.total_bytes)
                return True
        return False

    def step_back(self) -> None:
        """No share is asked for a chunk for now."""
        for share in self.shares:
            share.step_back()

    def poll(self, now: float) -> bool:
        """Check what is under way, if it is time. Whether anything came of it."""
        if now < self._poll_at or self.quiet:
            return False
        news = False
        if self._warming is not None and not self._warming_lost:
            news = self._poll_warming(self._warming)
        for flight in [flight for flight in self.flights if not flight.lost]:
            news |= self._check(flight)
        now = self._clock()
        if news:
            self._pause = POLL_FIRST
        elif now > self._busy_since + 2 * self._in_flight / self._rate + POLL_LAST:
            # Polling is also what makes a TCP read progress, so it backs off only once the read is later than expected.
            waited_for = any(flight.account.ended_at is None for flight in self.flights)
            self._pause = min(2 * self._pause, POLL_LAST if waited_for else POLL_ABANDONED)
        self._poll_at = now + self._pause
        return news

    def next_poll(self) -> float | None:
        """When `poll` wants to be called again; None if nothing is under way that could answer."""
        waiting = (self._warming is not None and not self._warming_lost) or any(not f.lost for f in self.flights)
        return self._poll_at if waiting else None

    def settle(self, now: float) -> None:
        """Judge deadlines, give up waiting for a first answer, forget shares that have ended."""
        for share in tuple(self.shares):
            if self.state is LinkState.WARMING and now > self.answer_due(share):
                share.account.fail(self._error(f"no answer within {self._options.warm_up_timeout:g} s"))
            share.account.settle(now)
            if share.account.ended_at is not None:
                self.shares.remove(share)
        for flight in tuple(self.flights):
            flight.account.settle(now)

    def answer_due(self, share: PeerWork) -> float:
        """Until when a share waits for the peer's first answer."""
        return max(share.since, self._opened_at) + self._options.warm_up_timeout

    def drop(self) -> None:
        """Remove the peer from the agent. Only when `over`."""
        if self._added:
            self._agent.remove_peer(self.info.name)

    def fenced(self) -> None:
        """The agent was destroyed."""
        flights, self.flights = self.flights, []
        self._in_flight = 0
        self._warming = None
        for flight in flights:
            flight.account.fenced()

    def fail_all(self, error: KvferryError) -> None:
        """Everything that is to be read, or being read, fails."""
        shares = tuple(self.shares)
        self.shares.clear()
        for share in shares:
            share.account.fail(error)
        for flight in tuple(self.flights):
            flight.account.fail(error)

    def _post(self, account: ChunkOwner, chunk: Descriptors, size: int) -> None:
        try:
            handle = self._agent.make(self.info.name, chunk)
        except Exception as error:
            # Nothing was posted. A descriptor that was refused says nothing about the peer; NIXL's refusal does.
            account.fail(self._unreadable(error))
            if isinstance(error, NixlError):
                self._break(error)
            return
        flight = PostedChunk(handle, account, size)
        if not account.begin():
            self._release(handle)
            return
        before = self._clock()
        try:
            state = handle.post()
        except NixlError as error:
            self._lose(flight, error)
            return
        if state is HandleState.DONE:
            self._landed(flight, before)
        elif state is HandleState.MOVING:
            if not self.flights:
                self._busy_since = before
            self.flights.append(flight)
            self._in_flight += size
            self._pause = POLL_FIRST
            self._poll_at = min(self._poll_at, self._clock() + POLL_FIRST)
        else:
            self._lose(flight, self._error("the read failed when it was posted"))

    def _check(self, flight: PostedChunk) -> bool:
        try:
            state = flight.handle.check()
        except NixlError as error:
            self._in_flight -= flight.size
            self.flights.remove(flight)
            self._lose(flight, error)
            return True
        if state is HandleState.MOVING:
            return False
        self._in_flight -= flight.size
        self.flights.remove(flight)
        if state is HandleState.DONE:
            self._landed(flight, self._busy_since)
            self._busy_since = self._clock()
        else:
            self._lose(flight, self._error("the read failed"))
        return True

    def _landed(self, flight: PostedChunk, since: float) -> None:
        self._release(flight.handle)
        self.moved += flight.size
        took = max(1e-6, self._clock() - since)
        self._rate = 0.7 * self._rate + 0.3 * max(1e6, flight.size / took)
        flight.account.landed(flight.size)

    def _lose(self, flight: PostedChunk, error: KvferryError) -> None:
        flight.lost = True
        self.flights.append(flight)
        flight.account.fail(self._failed(error))
        self._break(error)

    def _poll_warming(self, handle: ReadHandle) -> bool:
        try:
            state = handle.check()
        except NixlError as error:
            self._warming_lost = True
            self._break(error)
            return True
        return self._on_warming(state)

    def _on_warming(self, state: HandleState) -> bool:
        if state is HandleState.MOVING or self._warming is None:
            return False
        if state is HandleState.DONE:
            self._release(self._warming)
            self._warming = None
            if self.state is LinkState.WARMING:
                self.state = LinkState.READY
        else:
            self._warming_lost = True
            self._break(self._error("its first read failed"))
        return True

    def _break(self, error: KvferryError) -> None:
        if self.state is not LinkState.BROKEN:
            logger.info("peer %s is broken: %s", self.info.name, error)
        self.state = LinkState.BROKEN
        shares = tuple(self.shares)
        self.shares.clear()
        for share in shares:
            share.account.fail(self._failed(error))

    def _failed(self, error: KvferryError) -> KvferryError:
        """The error as the transfer reports it: what says something about input stays what it is."""
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


def _called(name: str) -> str:
    """What people call a peer: ranks' agents are named ``kvferry/engine/incarnation/rank/serving``."""
    parts = name.split("/")
    if len(parts) < 5 or parts[0] != "kvferry":
        return f"peer {name!r}"
    return f"rank {parts[-2]} of engine {'/'.join(parts[1:-3])!r}"


def _abandoned(flight: PostedChunk, before: float) -> bool:
    ended_at = flight.account.ended_at
    return ended_at is not None and ended_at < before
