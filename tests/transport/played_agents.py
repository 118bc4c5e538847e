"""Agents that a test controls, and that copy the bytes themselves, and a rank that reads with them.

NIXL does not fail, stall or answer at a moment that a test names; what NIXL really does is in other tests of this
folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvferry._clock import now
from kvferry._memory.access import StagingSpace
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.nixl_agent import AgentInfo, HandleState, MakeReadingAgent, NixlError
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._transport.transport import Transfer, TransferPart, TransferState, Transport
from kvferry.errors import (
    KvferryError,
)
from kvferry.geometry import MemoryKind, MemoryRegion
from kvferry.planner.descriptors import Descriptors
from tests.support.simulated_memories import copies
from tests.transport.sources import SOON, Memory, content, raw, raw_part
from tests.transport.transfers import until

CHUNK = 4096
SIZE = 4 * CHUNK
DONE, MOVING, FAILED = HandleState.DONE, HandleState.MOVING, "an error"


class Handle:
    """A read whose state the test sets."""

    def __init__(self, agent: Agent, peer: str, chunk: Descriptors | None) -> None:
        self.agent, self.peer, self.chunk = agent, peer, chunk
        self.state: HandleState | str | BaseException | None = None
        self.posted = self.released = False

    def post(self) -> HandleState:
        self.agent.own()
        self.posted = True
        return self.said()

    def check(self) -> HandleState:
        self.agent.own()
        return self.said()

    def release(self) -> None:
        self.agent.own()
        self.released = True

    def said(self) -> HandleState:
        default = self.agent.agents.warm if self.chunk is None else self.agent.agents.state
        state = self.state or default.get(self.peer, DONE)
        if isinstance(state, BaseException):
            # Once.
            self.state = MOVING
            raise state
        if isinstance(state, str):
            raise NixlError(state)
        if state is DONE and self.chunk is not None:
            for of, to, length in copies(self.chunk):
                ctypes.memmove(to, of, length)
        return state


class Agent:
    """In place of `ReadingAgent`."""

    def __init__(self, agents: Agents, name: str, options: NixlOptions) -> None:
        self.agents, self.name, self.options = agents, name, options
        self.owner = threading.get_ident()
        self.peers: dict[str, AgentInfo] = {}
        self.added: list[AgentInfo] = []
        self.handles: list[Handle] = []
        self.spaces: list[StagingSpace] = []
        self.destroyed = False

    def own(self) -> None:
        assert threading.get_ident() == self.owner
        assert not self.destroyed

    def add_space(self, space: StagingSpace) -> None:
        self.own()
        if self.agents.no_space is not None:
            raise self.agents.no_space
        self.spaces.append(space)

    def add_peer(self, info: AgentInfo) -> None:
        self.own()
        assert info.name not in self.peers, "added twice"
        self.peers[info.name] = info
        self.added.append(info)

    def warm_up(self, peer: str) -> Handle:
        self.own()
        return Handle(self, peer, None)

    def make(self, peer: str, chunk: Descriptors) -> Handle:
        self.own()
        assert peer in self.peers
        self.handles.append(Handle(self, peer, chunk))
        return self.handles[-1]

    def over_tcp(self, peer: str) -> bool:
        self.own()
        return self.agents.over_tcp

    def remove_peer(self, name: str) -> None:
        self.own()
        del self.peers[name]

    def destroy(self) -> bool:
        self.own()
        self.destroyed = True
        return self.agents.may_end

    def flying(self, peer: str) -> list[Handle]:
        """Reads under way."""
        mine = [handle for handle in self.handles if handle.peer == peer]
        return [handle for handle in mine if handle.posted and not handle.released]


@dataclass
class Agents:
    """All agents that were made, and the states of each peer's first read and of its chunks: DONE by default."""

    warm: dict[str, HandleState | str] = field(default_factory=dict)
    state: dict[str, HandleState | str] = field(default_factory=dict)
    made: list[Agent] = field(default_factory=list)
    refusal: Exception | None = None
    refused: int = 0
    no_space: Exception | None = None
    may_end: bool = True
    over_tcp: bool = True

    def reading(self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions) -> Agent:
        if self.refusal is not None:
            self.refused += 1
            raise self.refusal
        self.made.append(Agent(self, name, options))
        return self.made[-1]


class World:
    """A rank, its sources, and a clock that a test moves on."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.later = 0.0
        self.memory = Memory(16 * SIZE)
        self.bytes = content(1, SIZE)
        self.transports: list[Transport] = []
        self.looks = 0

    def clock(self) -> float:
        self.looks += 1
        return now() + self.later

    def transport(self, staging: StagingOptions | None = None, **options: Any) -> Transport:
        some = {"chunk_bytes": CHUNK, "chunk_descriptors": 100, **options}
        reading = cast(MakeReadingAgent, self.agents.reading)
        made = Transport(
            RankMemory([self.memory.region]), NixlOptions(**some), reading=reading, staging=staging, clock=self.clock
        )
        self.transports.append(made)
        return made

    def info(self, name: str = "peer", metadata: bytes = b"metadata") -> AgentInfo:
        region = MemoryRegion(MemoryKind.DRAM, 0, self.bytes.ctypes.data, SIZE)
        return AgentInfo(name, metadata, hashlib.sha256(metadata).digest(), (region,))

    def part(self, info: AgentInfo, at: int = 0, length: int = SIZE) -> TransferPart:
        """The first bytes of the peer."""
        into = at * SIZE
        self.memory.expected[into : into + length] = self.bytes[:length]
        return raw_part(info, [raw([self.bytes.ctypes.data], [self.memory.base + into], [length])])

    def read(
        self, transport: Transport, name: str = "peer", at: int = 0, chunks: int = 4, *, deadline: float | None = None
    ) -> Transfer:
        return transport.start([self.part(self.info(name), at, chunks * CHUNK)], deadline=deadline, label=name)

    def moving(self, transport: Transport, name: str = "peer", at: int = 0, chunks: int = 1) -> Transfer:
        """A transfer that is under way until the test ends it."""
        self.agents.state[name] = MOVING
        transfer = self.read(transport, name, at, chunks)

        def posted() -> int:
            links = [link for thread in tuple(transport.living) for link in thread._links]
            return sum(chunk.owner is transfer for link in links for chunk in link.posted)

        # A transfer counts a chunk just before it is posted, and the gauges just after.
        assert until(lambda: posted() == chunks)
        return transfer

    def lost(self, transport: Transport, name: str = "peer", at: int = 0) -> Transfer:
        """A transfer whose connection broke under way."""
        transfer = self.moving(transport, name, at)
        self.agents.state[name] = FAILED
        assert transfer.wait(SOON)
        return transfer


def done(transfer: Transfer) -> None:
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.DONE, transfer.error
    assert transfer.quiet


def failed(transfer: Transfer) -> KvferryError:
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.FAILED
    assert transfer.error is not None
    return transfer.error
