"""A reading agent, its connections to all its peers, and the one thread on which all their work happens.

The thread posts chunks in turn, peer by peer and transfer by transfer, polls posted chunks, judges deadlines, and
sleeps when there is nothing to do. It does nothing else, because a copy may happen inside a post (CMA).

An agent ends in one of two ways. A closed agent is destroyed when all is quiet. A retired agent, one with a peer's read
that gave an error or is stuck, gets no new work; its reads from other peers go on to their end, but for those that wait
for staging slots, and then it is destroyed. After that nothing it posted writes any more (PROTOCOL, Quiet).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvferry._arguments import MOST_SECONDS
from kvferry._logs import Log
from kvferry._transport.nixl_agent import AgentInfo, NixlError, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_link import Link, LinkState, fail
from kvferry._transport.transfer import PeerWork, as_kvferry_error
from kvferry.errors import KvferryError, TransferFailed

logger = Log(__name__)

SETTLE_EVERY = 1e-3
"""Seconds between two checks of deadlines while bytes move."""

RETIRE_AGAIN = 0.5
"""Seconds between two attempts to retire while too many agents are retired already."""

EXIT_PATIENCE = 2.0
"""Seconds that the interpreter's exit waits for a thread to come out of NIXL: the time of one chunk, with margin."""

FAILURES = 3
"""Unexpected errors of a thread after which it no longer waits for posted chunks."""

Message: TypeAlias = PeerWork | AgentInfo | str
"""Work to be posted, a peer to be added before it is needed, or the name of a peer to be dropped as soon as all reads
from it have ended and are quiet."""

_living: weakref.WeakSet[ReadingThread] = weakref.WeakSet()


class ReadingThread:
    """One reading agent, and its thread.

    Threading: `send`, `wake` and `close` may be called from any thread and never wait.

    `make` makes the agent, on the thread. `may_retire` is asked before the agent is retired; if False, the agent
    stays as it is. `moved_on` is called with each piece of unposted work when the agent is retired, and `gone` when the
    thread has ended, with whether all that it posted is quiet.
    """

    def __init__(
        self,
        name: str,
        options: NixlOptions,
        clock: Callable[[], float],
        *,
        may_retire: Callable[[], bool],
        moved_on: Callable[[PeerWork], None],
        gone: Callable[[ReadingThread, bool], None],
        make: Callable[[], ReadingAgent],
    ) -> None:
        self.name = name
        self.process = os.getpid()
        self.moved = 0
        """Bytes that have arrived."""
        self.refusal: KvferryError | None = None
        """The error that prevented making the agent."""
        self.accepting = True
        """Whether messages are accepted. Changed with the lock held, so that no message is added afterwards."""
        self.retired = False
        self._closing = False
        self._parking = False
        self._options = options
        self._clock = clock
        self._may_retire = may_retire
        self._moved_on = moved_on
        self._gone = gone
        self._make = make
        self._lock = threading.Lock()
        self._inbox: deque[Message] = deque()
        """Messages that were not handled yet."""
        self._wake = threading.Event()
        """Set when a message has come, or the transfers are to be looked at."""
        self._out_of_nixl = threading.Event()
        self._made = threading.Event()
        """Set when the agent is made, or making it has failed."""
        self._by_name: dict[str, Link] = {}
        """The links, by the name of the peer. Only the thread changes it."""
        self._news = False
        """Whether anything changed since `_settle` ran."""
        self._settle_at = self._retire_at = 0.0
        _living.add(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Send a message. Returns False if the agent is retired or closed, and nothing was done. If no agent could be
        made, work fails."""
        with self._lock:
            if self.accepting:
                self._inbox.append(message)
                self._wake.set()
                return True
        if self.refusal is None:
            return False
        # Another thread would get no agent either, and would hand the work on for ever.
        if isinstance(message, PeerWork):
            message.owner.fail(self.refusal)
        return True

    def wake(self) -> None:
        """Look at the transfers at once, because one was cancelled."""
        self._settle_at = 0.0
        self._wake.set()

    def close(self) -> None:
        """End when all is quiet. The caller cancels the transfers that have not ended."""
        # In this order, so that the thread still takes every accepted message before it ends.
        self._refuse_messages()
        self._closing = True
        self.wake()

    def park(self) -> threading.Event:
        """Stop calling NIXL, because the interpreter exits. The event is set when the thread is out of NIXL."""
        self._parking = True
        self.wake()
        return self._out_of_nixl

    def wait_made(self, timeout: float) -> None:
        """Wait until the agent is made; raises the error that prevented it, or `NixlError` if the time is over."""
        if not self._made.wait(timeout):
            problem = f"it was not made within {timeout:.0f} s"
            raise NixlError(f"agent {self.name!r}: {problem}", call="nixlAgent", peer="", problem=problem)
        if self.refusal is not None:
            raise self.refusal

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end. Returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def link_to(self, info: AgentInfo) -> Link | None:
        """The link to this peer; None if there is no link, or one to another agent of the same name."""
        link = self._by_name.get(info.name)
        return link if link is not None and link.info.metadata_sha256 == info.metadata_sha256 else None

    @property
    def peer_count(self) -> int:
        return len(self._by_name)

    @property
    def chunks_in_flight(self) -> int:
        return sum(chunk.size > 0 for link in self._links for chunk in link.posted)

    @property
    def _links(self) -> tuple[Link, ...]:
        return tuple(self._by_name.values())

    def _run(self) -> None:
        agent: ReadingAgent | None = None
        try:
            agent = self._make()
        except Exception as error:
            self.refusal = error if isinstance(error, KvferryError) else self._failed(error)
            logger.warning("reading agent %s could not be made: %s", self.name, self.refusal)
            self._made.set()
            self._fail(self.refusal)
        else:
            self._made.set()
            self._work_on(agent)
        finally:
            quiet = agent is None or self._destroy(agent)
            self._out_of_nixl.set()
            self._gone(self, quiet)

    def _work_on(self, agent: ReadingAgent) -> None:
        for _ in range(FAILURES):
            try:
                return self._work(agent)
            except BaseException as error:
                # Includes a callback's `SystemExit`. All work fails, but the thread waits for posted chunks: destroying
                # an agent while it reads can kill a source.
                self._fail(self._failed(error))
                self._closing = True

    def _failed(self, error: BaseException) -> KvferryError:
        logger.error("reading agent %s failed", self.name, exc_info=error)
        return TransferFailed(f"reading agent {self.name!r} failed: {error!r}")

    def _work(self, agent: ReadingAgent) -> None:
        while True:
            if self._parking:
                # The agent is not destroyed: while it reads, that could kill the source. The system closes its
                # connections.
                self._out_of_nixl.set()
                time.sleep(MOST_SECONDS)
            busy = self._handle_messages(agent)
            now = self._clock()
            for link in self._links:
                before, queued = link.moved, len(link.queued)
                if link.state is LinkState.NEW:
                    link.open()
                    busy = True
                if self._room():
                    busy |= link.post_next()
                else:
                    link.step_back()
                busy |= link.poll(now)
                # True also if no work is left to be posted: dropping a leaving peer and ending the agent wait for that,
                # and nothing else may happen here while another agent reads the rest.
                busy |= len(link.queued) < queued
                self.moved += link.moved - before
            if len(self._by_name) > 1:
                # Another peer is the first in turn next time, in case there is room for one chunk only.
                first = next(iter(self._by_name))
                self._by_name[first] = self._by_name.pop(first)
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
        """Whether one more chunk keeps within this agent's part of `bytes_in_flight_total`."""
        now = self._clock()
        flying = sum(link.flowing(now) for link in self._links)
        # A second agent beside the default one has nothing in flight: it reads where posts copy.
        most = self._options.bytes_in_flight_total // (self._options.reading_agents or 1)
        return flying == 0 or flying + self._options.chunk_bytes <= most

    def _refuse_messages(self) -> None:
        with self._lock:
            self.accepting = False

    def _last_works(self) -> list[PeerWork]:
        """Accept no more messages. Returns the work among those that were not handled yet."""
        self._refuse_messages()
        works = [message for message in self._inbox if isinstance(message, PeerWork)]
        self._inbox.clear()
        return works

    def _handle_messages(self, agent: ReadingAgent) -> bool:
        """Handle the messages that have come. Returns whether there were any."""
        self._wake.clear()
        busy = bool(self._inbox)
        while self._inbox:
            # Removed only afterwards: if the step raises, the work fails instead of being forgotten.
            message = self._inbox[0]
            if isinstance(message, PeerWork):
                self._attach(agent, message)
            elif isinstance(message, AgentInfo):
                self._add(agent, message)
            elif message in self._by_name:
                self._by_name[message].leaving = True
            self._inbox.popleft()
        return busy

    def _add(self, agent: ReadingAgent, info: AgentInfo) -> Link:
        """The link to the peer of this name, added if there is none. The link is opened later, when all work that has
        come for the peer is attached: if opening fails, all this work fails."""
        link = self._by_name.get(info.name)
        if link is None:
            link = self._by_name[info.name] = Link(info, agent, self._options, self._clock)
        return link

    def _attach(self, agent: ReadingAgent, work: PeerWork) -> None:
        """Queue work for its peer, which is added if needed. If that is impossible, the work fails."""
        try:
            for space in work.spaces:
                agent.add_space(space)
        except Exception as error:
            work.owner.fail(as_kvferry_error(error, f"staging memory of transfer {work.owner.label!r}"))
            return
        link = self._add(agent, work.info)
        if link.info.metadata_sha256 != work.info.metadata_sha256 or link.info.regions != work.info.regions:
            # Another agent has the same name: NIXL would go on with the old agent's metadata.
            link.leaving = True
        queue = link.waiting if link.state is LinkState.BROKEN or link.leaving else link.queued
        queue.append(work)

    def _settle(self, agent: ReadingAgent, now: float) -> None:
        """Judge deadlines, drop peers, retire the agent: every `SETTLE_EVERY` seconds."""
        for link in self._links:
            link.settle(now)
            if link.over:
                del self._by_name[link.info.name]
                try:
                    link.drop()
                except NixlError as error:
                    logger.warning("peer %s was not removed: %s", link.info.name, error)
                for work in link.waiting:
                    self._attach(agent, work)
                    self._news = True
        if not self.retired and now >= self._retire_at:
            given_up = [link for link in self._links if link.lost or link.stuck(now)]
            if given_up:
                self._retire(given_up, now)
        if self.retired:
            # Such work may wait for a slot that only the end of this agent gives back.
            self._move_on((link.queued for link in self._links), now, blocked=True)

    def _retire(self, given_up: Sequence[Link], now: float) -> None:
        """Give the agent no new work: reads from these peers end only when the agent is destroyed."""
        names = ", ".join(link.info.name for link in given_up)
        if not self._may_retire():
            self._retire_at = now + RETIRE_AGAIN
            error = TransferFailed(f"peers {names}: reads from them are uncertain, and too many agents are retired")
            for link in given_up:
                fail(link.waiting, error)
            return
        logger.warning("reading agent %s is retired: reads from %s are uncertain", self.name, names)
        unhandled = deque(self._last_works())
        self.retired = True
        # The work of these peers, and all work that waits for a peer to be dropped.
        self._move_on((unhandled, *(link.queued for link in given_up), *(link.waiting for link in self._links)), now)

    def _move_on(self, queues: Iterable[deque[PeerWork]], now: float, *, blocked: bool = False) -> None:
        """Hand on work; with `blocked`, only that which waits for a staging slot."""
        works = [(queue, work) for queue in queues for work in queue if work.blocked or not blocked]
        for queue, work in works:
            queue.remove(work)
        for _, work in works:
            work.since = now
            work.step_back()
            self._moved_on(work)

    def _may_end(self, now: float) -> bool:
        """Whether the agent may be destroyed: it has nothing to do, and every fence time is over."""
        if not (self.retired or self._closing) or self._inbox:
            return False
        if any(link.queued or link.waiting for link in self._links):
            return False
        fences = [link.fence_at() for link in self._links]
        return all(fence is None or now > fence for fence in fences)

    def _sleep(self, now: float) -> None:
        """Wait until something is due or a message comes."""
        alarms = [alarm for link in self._links for alarm in link.alarms()]
        if self._news:
            alarms.append(self._settle_at)
        if not self.retired and any(link.lost for link in self._links):
            alarms.append(self._retire_at)
        until = min(alarms, default=None)
        self._wake.wait(None if until is None else min(max(0.0, until - now), threading.TIMEOUT_MAX))

    def _fail(self, error: KvferryError) -> None:
        for work in self._last_works():
            work.owner.fail(error)
        for link in self._links:
            link.fail_all(error)

    def _destroy(self, agent: ReadingAgent) -> bool:
        links = self._links
        if not agent.destroy() and not all(link.quiet for link in links):
            logger.error("reading agent %s was not destroyed: its posted reads stay uncertain", self.name)
            return False
        self._by_name.clear()
        for link in links:
            link.fenced()
        return True


def _park_all() -> None:
    """Wait until no reading thread of this process is inside NIXL: at exit the interpreter kills daemon threads
    anywhere, and killing a thread inside C++ aborts the process."""
    here = os.getpid()
    threads = [thread for thread in tuple(_living) if thread.process == here]
    for event in [thread.park() for thread in threads]:
        event.wait(EXIT_PATIENCE)


atexit.register(_park_all)
