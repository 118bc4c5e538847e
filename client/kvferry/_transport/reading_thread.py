"""A reading agent and the one thread on which everything about it happens.

The thread posts chunks in turn, peer by peer and transfer by transfer, polls what is under way, judges deadlines, and
sleeps on a condition when there is nothing to do. A copy may happen inside a post (CMA): that is why it is nobody
else's thread.

An agent's life ends in one of two ways. Closed, it is destroyed when all is quiet. Or it is retired, because a peer's
read gave an error or is stuck: from then on it gets no new work, what it reads from other peers goes on to its end, and
then it is destroyed, which is the fence for what was uncertain (PROTOCOL, Quiet).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvferry._transport.agents import NIXL, Agents
from kvferry._transport.nixl_agent import AgentInfo, NixlError, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_link import Link, LinkState, PeerWork
from kvferry.errors import KvferryError, TransferFailed
from kvferry.geometry.model import MemoryRegion

logger = logging.getLogger(__name__)

SETTLE_EVERY = 1e-3
"""Seconds between two looks at deadlines while bytes move."""

RETIRE_AGAIN = 0.5
"""Seconds between two attempts to retire while too many agents are retired already."""

EXIT_PATIENCE = 2.0
"""Seconds that the interpreter's exit waits for a thread to come out of NIXL: the time of one chunk, with margin."""

FAILURES = 3
"""Unforeseen errors of a thread, after which it no longer waits for what is posted."""

_living: weakref.WeakSet[ReadingThread] = weakref.WeakSet()


class ReadingThread:
    """One reading agent.

    Threading: `submit`, `warm`, `retire_peer`, `wake` and `close` may be called from any thread and never wait.

    Args:
        name: of the agent, and of the thread.
        regions: memory that is read into.
        options: how bytes move.
        clock: seconds, monotonic.
        may_retire: asked before the agent is retired; False leaves it as it is.
        moved_on: gets shares of which nothing is under way here any more, when the agent is retired.
        gone: called when the thread has ended; True: all that it posted is quiet.
        agents: makes the agent, on the thread.
        keep: referenced until the agent is destroyed: the owner of the regions.
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[MemoryRegion],
        options: NixlOptions,
        clock: Callable[[], float],
        *,
        may_retire: Callable[[ReadingThread], bool],
        moved_on: Callable[[PeerWork], None],
        gone: Callable[[ReadingThread, bool], None],
        agents: Agents = NIXL,
        keep: object = None,
    ) -> None:
        self.name = name
        self.retired = False
        self.moved = 0
        """Bytes seen to have arrived."""
        self._regions = tuple(regions)
        self._options = options
        self._clock = clock
        self._may_retire = may_retire
        self._moved_on = moved_on
        self._gone = gone
        self._agents = agents
        self._keep = keep
        self._changed = threading.Condition()
        # These are shared with the callers, under the condition.
        self._inbox: list[PeerWork | AgentInfo | str] = []
        self._woken = False
        self._accepting = True
        self._refusal: KvferryError | None = None
        """Why it has no agent."""
        self._closing = False
        # All that follows belongs to the thread.
        self._taken: deque[PeerWork | AgentInfo | str] = deque()
        self._links: dict[str, Link] = {}
        self._waiting: dict[str, deque[PeerWork]] = {}
        """Shares for a peer that has to be dropped before it can be added again."""
        self._news = False
        """Something changed since `_settle` looked."""
        self._settle_at = 0.0
        self._retire_at = 0.0
        self._parking = False
        self._out_of_nixl = threading.Event()
        _living.add(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, share: PeerWork) -> bool:
        """Read this. False: the agent is retired or closed, nothing was done. Where no agent could be made, this
        fails."""
        return self._send(share)

    def warm(self, info: AgentInfo) -> bool:
        """Add a peer before it is needed. False as `submit`."""
        return self._send(info)

    def retire_peer(self, name: str) -> None:
        """Drop a peer as soon as what is read from it has ended and is quiet."""
        self._send(name)

    def wake(self) -> None:
        """Look at the transfers at once: one was cancelled."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """End when all is quiet; what has not ended is the caller's to cancel."""
        with self._changed:
            self._accepting = False
            self._closing = True
            self._woken = True
            self._changed.notify()

    def park(self) -> threading.Event:
        """Call NIXL no more, and never return: the interpreter exits. The event is set when that is so."""
        with self._changed:
            self._parking = True
            self._woken = True
            self._changed.notify()
        return self._out_of_nixl

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        """Whether it takes new work."""
        return self._accepting

    @property
    def peers(self) -> int:
        """Peers that are added, or being added."""
        return len(self._links)

    @property
    def flights(self) -> int:
        """Chunks that are posted and not seen DONE."""
        return sum(len(link.flights) for link in tuple(self._links.values()))

    def _send(self, item: PeerWork | AgentInfo | str) -> bool:
        with self._changed:
            if self._accepting:
                self._inbox.append(item)
                self._changed.notify()
                return True
        if self._refusal is None:
            return False
        # Another thread would get no agent either, before anything could be given to it, and so on for ever.
        if isinstance(item, PeerWork):
            item.account.fail(self._refusal)
        return True

    def _run(self) -> None:
        agent: ReadingAgent | None = None
        quiet = True
        try:
            agent = self._agents.reading(self.name, self._regions, self._options)
        except Exception as error:
            self._refusal = error if isinstance(error, KvferryError) else self._failed(error)
            self._fail(self._refusal)
        else:
            self._work_on(agent)
        finally:
            quiet = agent is None or self._destroy(agent)
            self._out_of_nixl.set()
            self._gone(self, quiet)

    def _work_on(self, agent: ReadingAgent) -> None:
        for _ in range(FAILURES):
            try:
                self._work(agent)
                return
            except BaseException as error:
                # A callback's `SystemExit` included. Everything fails, but what is posted is waited for: ending an
                # agent under way can kill a source.
                self._fail(self._failed(error))
                self._closing = True

    def _failed(self, error: BaseException) -> KvferryError:
        logger.error("reading agent %s failed", self.name, exc_info=error)
        return TransferFailed(f"reading agent {self.name!r} failed: {error!r}")

    def _work(self, agent: ReadingAgent) -> None:
        while True:
            if self._parking:
                # Not destroyed: under way, that could kill the source. The system closes its connections.
                self._out_of_nixl.set()
                threading.Event().wait()
            busy = self._take_inbox(agent)
            now = self._clock()
            for link in tuple(self._links.values()):
                before = link.moved
                if link.state is LinkState.NEW:
                    link.open()
                    busy = True
                if self._room():
                    busy |= link.post_next()
                else:
                    link.step_back()
                busy |= link.poll(now)
                self.moved += link.moved - before
            if len(self._links) > 1:
                # Another peer is the first to be asked next time, in case there is room for one only.
                first = next(iter(self._links))
                self._links[first] = self._links.pop(first)
            self._news |= busy
            now = self._clock()
            if now >= self._settle_at:
                self._settle_at = now + SETTLE_EVERY
                self._news = False
                self._settle(agent, now)
                if self._may_end(now):
                    return
            elif not busy:
                self._sleep(now)

    def _room(self) -> bool:
        """Whether one more chunk keeps within this agent's part of what may be in flight to this destination."""
        now = self._clock()
        flying = sum(link.flowing(now) for link in self._links.values())
        most = self._options.bytes_in_flight_total // self._options.reading_agents
        return flying == 0 or flying + self._options.chunk_bytes <= most

    def _take_inbox(self, agent: ReadingAgent) -> bool:
        with self._changed:
            self._taken.extend(self._inbox)
            self._inbox.clear()
            if self._woken:
                self._woken = False
                self._settle_at = 0.0
        busy = bool(self._taken)
        while self._taken:
            # Taken off only afterwards: should this fail, so does the share, instead of being forgotten.
            item = self._taken[0]
            if isinstance(item, PeerWork):
                self._attach(agent, item)
            elif isinstance(item, AgentInfo):
                if item.name not in self._links:
                    self._add(agent, item)
            elif item in self._links:
                self._links[item].leaving = True
            self._taken.popleft()
        return busy

    def _attach(self, agent: ReadingAgent, share: PeerWork) -> None:
        try:
            for space in share.spaces:
                agent.add_space(space)
        except Exception as error:
            share.account.fail(
                error if isinstance(error, KvferryError) else TransferFailed(f"staging memory: {error!r}")
            )
            return
        link = self._links.get(share.info.name)
        if link is None:
            link = self._add(agent, share.info)
        if link.info.sha256 != share.info.sha256 or link.info.regions != share.info.regions:
            # Another agent under the same name: NIXL would go on with what it knows of the old one.
            link.leaving = True
        if link.state is LinkState.BROKEN or link.leaving:
            self._waiting.setdefault(share.info.name, deque()).append(share)
        else:
            link.shares.append(share)
        self._news = True

    def _add(self, agent: ReadingAgent, info: AgentInfo) -> Link:
        # Opened later, when all shares that have come for it are attached: if that fails, it fails for all of them.
        link = self._links[info.name] = Link(info, agent, self._options, self._clock)
        return link

    def _settle(self, agent: ReadingAgent, now: float) -> None:
        """What does not have to happen between any two chunks."""
        for link in tuple(self._links.values()):
            link.settle(now)
            if link.over:
                self._drop(agent, link)
        for name, shares in tuple(self._waiting.items()):
            self._settle_waiting(agent, name, shares, now)
        if not self.retired and now >= self._retire_at:
            given_up = [link for link in self._links.values() if link.lost or link.stuck(now)]
            if given_up:
                self._retire(given_up, now)

    def _settle_waiting(self, agent: ReadingAgent, name: str, shares: deque[PeerWork], now: float) -> None:
        """Shares whose peer is being dropped: add it again once that is done."""
        for share in tuple(shares):
            share.account.settle(now)
            if share.account.ended_at is not None:
                shares.remove(share)
        if not shares or name not in self._links:
            del self._waiting[name]
            for share in shares:
                self._attach(agent, share)

    def _drop(self, agent: ReadingAgent, link: Link) -> None:
        del self._links[link.info.name]
        try:
            link.drop()
        except NixlError as error:
            logger.warning("peer %s was not removed: %s", link.info.name, error)

    def _retire(self, given_up: Sequence[Link], now: float) -> None:
        """Reads of these peers end only with the agent: no new work for it."""
        names = ", ".join(link.info.name for link in given_up)
        if not self._may_retire(self):
            self._retire_at = now + RETIRE_AGAIN
            error = TransferFailed(f"peers {names}: reads from them are uncertain, and too many agents are retired")
            for link in given_up:
                for share in self._waiting.pop(link.info.name, ()):
                    share.account.fail(error)
            return
        logger.warning("reading agent %s is retired: reads from %s are uncertain", self.name, names)
        with self._changed:
            self.retired = True
            self._accepting = False
            items, self._inbox = self._inbox, []
        shares = [item for item in items if isinstance(item, PeerWork)]
        for link in given_up:
            shares.extend(link.shares)
            link.shares.clear()
        for waiting in self._waiting.values():
            shares.extend(waiting)
        self._waiting.clear()
        for share in shares:
            share.since = now
            share.step_back()
            self._moved_on(share)

    def _may_end(self, now: float) -> bool:
        """Whether the agent may be destroyed: nothing to do, and every fence time over."""
        if not (self.retired or self._closing) or self._waiting or self._inbox:
            return False
        if any(link.shares for link in self._links.values()):
            return False
        fences = [link.fence_at() for link in self._links.values()]
        return all(fence is None or now > fence for fence in fences)

    def _sleep(self, now: float) -> None:
        """Until something is due, or somebody calls."""
        until = min(self._alarms(now), default=None)
        with self._changed:
            if not self._inbox and not self._woken:
                self._changed.wait(None if until is None else max(0.0, until - now))

    def _alarms(self, now: float) -> Iterator[float]:
        """When something is due though nobody calls."""
        if self._news or self._woken:
            yield self._settle_at
        shares = [share for waiting in self._waiting.values() for share in waiting]
        for link in self._links.values():
            # Deadlines of what is posted, and fence times, are looked at between polls.
            poll = link.next_poll()
            if poll is not None:
                yield poll
            if link.lost and not self.retired:
                yield max(now, self._retire_at)
            if link.state is LinkState.WARMING:
                yield from (link.answer_due(share) for share in link.shares)
            shares.extend(link.shares)
        for share in shares:
            if share.account.deadline is not None:
                yield share.account.deadline

    def _fail(self, error: KvferryError) -> None:
        """The agent cannot go on: everything fails."""
        with self._changed:
            self._accepting = False
            items = [*self._taken, *self._inbox]
            self._taken.clear()
            self._inbox.clear()
        waiting = [share for shares in self._waiting.values() for share in shares]
        self._waiting.clear()
        for share in [*waiting, *(item for item in items if isinstance(item, PeerWork))]:
            share.account.fail(error)
        for link in self._links.values():
            link.fail_all(error)

    def _destroy(self, agent: ReadingAgent) -> bool:
        quiet = all(link.quiet for link in self._links.values())
        links = tuple(self._links.values())
        fenced = agent.destroy()
        if not fenced and not quiet:
            logger.error("reading agent %s did not end: what it posted stays uncertain", self.name)
            return False
        self._links.clear()
        for link in links:
            link.fenced()
        return True


def _park_all(process: int = os.getpid()) -> None:
    """At its exit the interpreter kills daemon threads wherever they are, and inside of C++ that aborts the process."""
    if os.getpid() != process:
        return
    for event in [thread.park() for thread in tuple(_living)]:
        event.wait(EXIT_PATIENCE)


atexit.register(_park_all)
