"""The connections of one reading agent to all its peers.

Everything here runs on the agent's own thread (`kvferry._transport.reading_thread`) and never waits; only `of`, `len`
and iterating may be used on other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvferry._logs import Log
from kvferry._transport.nixl_agent import AgentInfo, NixlError, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_link import Link, LinkState
from kvferry._transport.peer_work import PeerWork, as_kvferry_error
from kvferry.errors import KvferryError

logger = Log(__name__)


class PeerLinks:
    """All links of one reading agent, by the name of the peer. Iterating takes the links that exist when it begins."""

    def __init__(self, options: NixlOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._links: dict[str, Link] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    @property
    def waiting(self) -> bool:
        """Whether some work waits for a peer to be dropped."""
        return any(link.waiting for link in self._links.values())

    def of(self, info: AgentInfo) -> Link | None:
        """The link to this peer; None if there is no link, or one to another agent of the same name."""
        link = self._links.get(info.name)
        return link if link is not None and link.info.metadata_sha256 == info.metadata_sha256 else None

    def room(self) -> bool:
        """Whether one more chunk keeps within this agent's part of `bytes_in_flight_total`."""
        now = self._clock()
        flying = sum(link.flowing(now) for link in self._links.values())
        # A second agent beside the default one has nothing in flight: it reads where posts copy.
        most = self._options.bytes_in_flight_total // (self._options.reading_agents or 1)
        return flying == 0 or flying + self._options.chunk_bytes <= most

    def take_turns(self) -> None:
        """Make another peer the first in turn next time, in case there is room for one chunk only."""
        if len(self._links) > 1:
            first = next(iter(self._links))
            self._links[first] = self._links.pop(first)

    def add(self, agent: ReadingAgent, info: AgentInfo) -> Link:
        """The link to the peer of this name, added if there is none. The link is opened later, when all work that has
        come for the peer is attached: if opening fails, all this work fails."""
        link = self._links.get(info.name)
        if link is None:
            link = self._links[info.name] = Link(info, agent, self._options, self._clock)
        return link

    def leave(self, name: str) -> None:
        """Drop a peer as soon as all reads from it have ended and are quiet."""
        if name in self._links:
            self._links[name].leaving = True

    def attach(self, agent: ReadingAgent, work: PeerWork) -> None:
        """Queue work for its peer, which is added if needed. If that is impossible, the work fails."""
        try:
            for space in work.spaces:
                agent.add_space(space)
        except Exception as error:
            work.owner.fail(as_kvferry_error(error, f"staging memory of transfer {work.owner.label!r}"))
            return
        link = self.add(agent, work.info)
        if link.info.metadata_sha256 != work.info.metadata_sha256 or link.info.regions != work.info.regions:
            # Another agent has the same name: NIXL would go on with the old agent's metadata.
            link.leaving = True
        queue = link.waiting if link.state is LinkState.BROKEN or link.leaving else link.queued
        queue.append(work)

    def settle(self, agent: ReadingAgent, now: float) -> bool:
        """Judge deadlines, drop peers, and queue the work that waited for that. Returns whether there was any."""
        attached = False
        for link in self:
            link.settle(now)
            if link.over:
                del self._links[link.info.name]
                try:
                    link.drop()
                except NixlError as error:
                    logger.warning("peer %s was not removed: %s", link.info.name, error)
                for work in link.waiting:
                    self.attach(agent, work)
                    attached = True
        return attached

    def take_unposted(self, given_up: Sequence[Link]) -> list[PeerWork]:
        """Take out the work of these peers, and all work that waits for a peer to be dropped."""
        unposted: list[PeerWork] = []
        for link in given_up:
            unposted.extend(link.queued)
            link.queued.clear()
        for link in self:
            unposted.extend(link.waiting)
            link.waiting.clear()
        return unposted

    def take_blocked(self) -> list[PeerWork]:
        blocked: list[PeerWork] = []
        for link in self:
            mine = [work for work in link.queued if work.blocked]
            for work in mine:
                link.queued.remove(work)
            blocked += mine
        return blocked

    def fail_all(self, error: KvferryError) -> None:
        for link in self:
            link.fail_all(error)

    def fenced(self) -> None:
        """End all posted chunks: the agent was destroyed, so nothing that it posted writes any more."""
        links = tuple(self)
        self._links.clear()
        for link in links:
            link.fenced()

    def alarms(self) -> Iterator[float]:
        """When something is due for a peer even if the peer sends nothing."""
        for link in self:
            # Deadlines of posted chunks, and fence times, are checked between polls.
            poll = link.next_poll()
            if poll is not None:
                yield poll
            if link.state is LinkState.WARMING:
                yield from (link.answer_due(work) for work in link.queued)
            deadlines = (work.owner.deadline for work in (*link.queued, *link.waiting))
            yield from (deadline for deadline in deadlines if deadline is not None)
