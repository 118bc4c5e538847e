"""A reading agent and the one thread on which all its work happens.

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
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import TypeAlias

from kvferry._clock import LONGEST
from kvferry._logs import Log
from kvferry._transport.nixl_agent import AgentInfo, NixlError, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_link import Link, LinkState
from kvferry._transport.peer_links import PeerLinks
from kvferry._transport.peer_work import PeerWork
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
        self.retired = False
        self.moved = 0
        """Bytes that have arrived."""
        self._clock = clock
        self._may_retire = may_retire
        self._moved_on = moved_on
        self._gone = gone
        self._make = make
        self.accepting = True
        """Whether messages are accepted. Changed with the lock held, so that no message is added afterwards."""
        self._lock = threading.Lock()
        self._inbox: Queue[Message | None] = Queue()
        """Messages in the order they came; None only wakes the thread, to look at the transfers at once."""
        self.refusal: KvferryError | None = None
        """The error that prevented making the agent."""
        self._closing = False
        self._parking = False
        self.process = os.getpid()
        self._out_of_nixl = threading.Event()
        self._made = threading.Event()
        """Set when the agent is made, or making it has failed."""
        # Only the thread uses the attributes from here on.
        self._taken: deque[Message] = deque()
        """Messages that were taken from the inbox and not handled yet."""
        self._links = PeerLinks(options, clock)
        self._news = False
        """Whether anything changed since `_settle` ran."""
        self._settle_at = 0.0
        self._retire_at = 0.0
        _living.add(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Send a message. Returns False if the agent is retired or closed, and nothing was done. If no agent could be
        made, work fails."""
        with self._lock:
            if self.accepting:
                self._inbox.put(message)
                return True
        if self.refusal is None:
            return False
        # Another thread would get no agent either, and would hand the work on for ever.
        if isinstance(message, PeerWork):
            message.owner.fail(self.refusal)
        return True

    def wake(self) -> None:
        """Look at the transfers at once, because one was cancelled."""
        self._inbox.put(None)

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

    def copies(self, info: AgentInfo) -> bool:
        """Whether posts to this peer return only when their bytes have arrived, by experience."""
        link = self._links.of(info)
        return link is not None and link.copies

    def ready(self, info: AgentInfo) -> bool:
        link = self._links.of(info)
        return link is not None and link.state is LinkState.READY

    @property
    def peer_count(self) -> int:
        return len(self._links)

    @property
    def chunks_in_flight(self) -> int:
        return sum(chunk.size > 0 for link in self._links for chunk in link.posted)

    def _run(self) -> None:
        agent: ReadingAgent | None = None
        quiet = True
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
                self._work(agent)
                return
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
                time.sleep(LONGEST)
            busy = self._handle_messages(agent)
            now = self._clock()
            for link in self._links:
                before, queued = link.moved, len(link.queued)
                if link.state is LinkState.NEW:
                    link.open()
                    busy = True
                if self._links.room():
                    busy |= link.post_next()
                else:
                    link.step_back()
                busy |= link.poll(now)
                # True also if no work is left to be posted: dropping a leaving peer and ending the agent wait for that,
                # and nothing else may happen here while another agent reads the rest.
                busy |= len(link.queued) < queued
                self.moved += link.moved - before
            self._links.take_turns()
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

    def _refuse_messages(self) -> None:
        with self._lock:
            self.accepting = False

    def _last_works(self) -> list[PeerWork]:
        """Accept no more messages. Returns the work among those that were not handled yet."""
        self._refuse_messages()
        self._take_messages()
        works = [message for message in self._taken if isinstance(message, PeerWork)]
        self._taken.clear()
        return works

    def _take_messages(self, timeout: float | None = 0.0) -> None:
        """Take all messages. If there are none, wait for one, at most `timeout` seconds; None: without a limit."""
        try:
            while not self._inbox.empty() or timeout != 0.0:
                message = self._inbox.get(timeout=timeout)
                timeout = 0.0
                if message is None:
                    self._settle_at = 0.0
                else:
                    self._taken.append(message)
        except Empty:
            return

    def _handle_messages(self, agent: ReadingAgent) -> bool:
        """Handle the messages that have come. Returns whether there were any."""
        self._take_messages()
        busy = bool(self._taken)
        while self._taken:
            # Removed only afterwards: if the step raises, the work fails instead of being forgotten.
            message = self._taken[0]
            if isinstance(message, PeerWork):
                self._links.attach(agent, message)
            elif isinstance(message, AgentInfo):
                self._links.add(agent, message)
            else:
                self._links.leave(message)
            self._taken.popleft()
        return busy

    def _settle(self, agent: ReadingAgent, now: float) -> None:
        """Judge deadlines, drop peers, retire the agent: every `SETTLE_EVERY` seconds."""
        self._news |= self._links.settle(agent, now)
        if not self.retired and now >= self._retire_at:
            given_up = [link for link in self._links if link.lost or link.stuck(now)]
            if given_up:
                self._retire(given_up, now)
        if self.retired:
            # Such work may wait for a slot that only the end of this agent gives back.
            self._move_on(self._links.take_blocked(), now)

    def _retire(self, given_up: Sequence[Link], now: float) -> None:
        """Give the agent no new work: reads from these peers end only when the agent is destroyed."""
        names = ", ".join(link.info.name for link in given_up)
        if not self._may_retire():
            self._retire_at = now + RETIRE_AGAIN
            error = TransferFailed(f"peers {names}: reads from them are uncertain, and too many agents are retired")
            for link in given_up:
                link.fail_waiting(error)
            return
        logger.warning("reading agent %s is retired: reads from %s are uncertain", self.name, names)
        unposted = [*self._last_works(), *self._links.take_unposted(given_up)]
        self.retired = True
        self._move_on(unposted, now)

    def _move_on(self, unposted: Sequence[PeerWork], now: float) -> None:
        for work in unposted:
            work.since = now
            work.step_back()
            self._moved_on(work)

    def _may_end(self, now: float) -> bool:
        """Whether the agent may be destroyed: it has nothing to do, and every fence time is over."""
        if not (self.retired or self._closing) or self._links.waiting or not self._inbox.empty():
            return False
        if any(link.queued for link in self._links):
            return False
        fences = [link.fence_at() for link in self._links]
        return all(fence is None or now > fence for fence in fences)

    def _sleep(self, now: float) -> None:
        """Wait until something is due or a message comes."""
        alarms = list(self._links.alarms())
        if self._news:
            alarms.append(self._settle_at)
        if not self.retired and any(link.lost for link in self._links):
            alarms.append(max(now, self._retire_at))
        until = min(alarms, default=None)
        self._take_messages(None if until is None else min(max(0.0, until - now), threading.TIMEOUT_MAX))

    def _fail(self, error: KvferryError) -> None:
        for work in self._last_works():
            work.owner.fail(error)
        self._links.fail_all(error)

    def _destroy(self, agent: ReadingAgent) -> bool:
        quiet = all(link.quiet for link in self._links)
        fenced = agent.destroy()
        if not fenced and not quiet:
            logger.error("reading agent %s was not destroyed: its posted reads stay uncertain", self.name)
            return False
        self._links.fenced()
        return True


def _park_all() -> None:
    """Wait until no reading thread of this process is inside NIXL: at exit the interpreter kills daemon threads
    anywhere, and killing a thread inside C++ aborts the process."""
    here = os.getpid()
    threads = [thread for thread in tuple(_living) if thread.process == here]
    for event in [thread.park() for thread in threads]:
        event.wait(EXIT_PATIENCE)


atexit.register(_park_all)
