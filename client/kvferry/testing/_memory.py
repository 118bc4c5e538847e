"""A replacement for NIXL's Python binding: has the functions that `kvferry._transport.nixl_agent` calls, under NIXL's
names, and copies between arrays of this process.

The code above these calls is that of production. As NIXL does, this checks that descriptors lie in registered memory
and that the peer exists. The thread that posts or polls a read copies its bytes, so that nothing is written once the
reading agent has ended.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import secrets
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvferry import _arguments as arguments
from kvferry._forks import Closing
from kvferry._transport.bounds import RegionMap
from kvferry.errors import InvalidField, WrongState
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind

if TYPE_CHECKING:
    from kvferry.testing._home import InProcessChannel

Rows: TypeAlias = npt.NDArray[np.uint64]
Segments: TypeAlias = tuple[str, Rows]
"""The kind of memory, and ``uint64[n, 3]``: address, length, device."""


class RemoteDisconnected(Exception):
    """The source agent has ended."""


class HostMemoryOnly(Exception):
    """Device memory was given for registration."""


@dataclass(eq=False)
class PostedRead:
    """A read that was posted, or is about to be, from the agent named `peer`: destinations, sources and lengths in
    bytes. Only its agent keeps a reference to the read, so that the bytes never arrive if the agent has ended.
    `connects`: the first read from a peer, of a few bytes; `let_go`: the bytes may move; `done`: they have moved."""

    peer: str
    copies: list[list[int]]
    connects: bool
    let_go: bool = False
    done: bool = False


class HeldReads(Closing):
    """Reads that were posted, and whose bytes are held back. Made by `Fabric.hold_reads`.

    Counts chunks, as they are posted to NIXL: one for each source rank that a rank reads from, or several if a read is
    larger than `NixlOptions.chunk_bytes`. Leaving the ``with`` block releases all chunks, and later reads are not held
    back.

    Threading: every method may be called from any thread.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: WeakKeyDictionary[PostedRead, None] = WeakKeyDictionary()
        """The reads that were held back, the oldest first."""
        with wire.changed:
            if wire.held is not None:
                raise WrongState("reads are held back already: end that hold_reads() first")
            wire.held = self

    @property
    def count(self) -> int:
        """Number of chunks that are held back now."""
        with self._wire.changed:
            return len(self._living())

    def wait(self, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until at least `count` chunks are held back.

        Args:
            count: number of chunks.
            timeout: seconds to wait.

        Raises:
            TimeoutError: fewer chunks were posted in time.
        """
        count = arguments.integer("count", count, 1)
        timeout = arguments.seconds("timeout", timeout, zero=True)
        with self._wire.changed:
            if not self._wire.changed.wait_for(lambda: self.count >= count, timeout):
                raise TimeoutError(f"{self.count} chunks are held back after {timeout:g} s, and {count} were expected")

    def release(self, count: int | None = None) -> None:
        """Release chunks, the oldest first. Reading threads then copy their bytes within milliseconds.

        Args:
            count: number of chunks; None: all that are held back now.

        Raises:
            InvalidField: fewer chunks are held back; `wait` for them first.
        """
        with self._wire.changed:
            held = self._living()
            going = len(held) if count is None else arguments.integer("count", count, 1)
            if going > len(held):
                raise InvalidField("count", going, f"at most the {len(held)} chunks that are held back")
            for read in held[:going]:
                read.let_go = True

    def close(self) -> None:
        """Release all chunks, and hold back no more. Idempotent."""
        with self._wire.changed:
            if self._wire.held is self:
                self._wire.held = None
            for read in self._living():
                read.let_go = True

    def _living(self) -> list[PostedRead]:
        """Return the reads that are held back and whose agent has not ended. Called with the lock of the wire held."""
        return [read for read in tuple(self._waiting) if not read.let_go]


class Wire:
    """The state that the agents of a fabric share: living agents, and reads to hold back or fail. Thread-safe."""

    def __init__(self) -> None:
        self.agents: WeakValueDictionary[str, Agent] = WeakValueDictionary()
        """Agents that have not ended, by name."""
        self.changed = threading.Condition()
        """Guards everything below, and the reads that are held back; notified when reads are added to them."""
        self.held: HeldReads | None = None
        self.to_fail = 0
        """Number of reads, the next ones, that fail."""

    def post(self, read: PostedRead) -> None:
        """Let a read go, hold it back, or make it fail with `RemoteDisconnected`."""
        with self.changed:
            if self.to_fail and not read.connects:
                self.to_fail -= 1
                raise RemoteDisconnected("Fabric.fail_reads made this read fail")
            if self.held is None or read.connects:
                read.let_go = True
            else:
                self.held._waiting[read] = None
                self.changed.notify_all()


class Process:
    """One client of a fabric, which stands for a process: its channels, and NIXL's binding. Thread-safe."""

    NIXL_READ = "READ"
    NIXL_SUCCESS = "SUCCESS"
    NIXL_IN_PROG = "IN_PROGRESS"
    NIXL_THREAD_SYNC_NONE = "NONE"
    DRAM_SEG = "DRAM"
    VRAM_SEG = "VRAM"
    nixlAgentConfig = SimpleNamespace

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.channels: list[InProcessChannel] = []
        self.killed = False
        """Whether the process was killed: its agents no longer read and can no longer be read from."""

    def kill(self) -> None:
        self.killed = True
        for channel in tuple(self.channels):
            channel.cut()

    def nixlAgent(self, name: str, config: SimpleNamespace) -> Agent:
        return Agent(self, name)

    def nixlRegDList(self, kind: str, rows: Rows) -> Segments:
        return kind, rows

    nixlXferDList = nixlRegDList


@dataclass(slots=True)
class _LoadedAgent:
    """An agent whose metadata was loaded. `start` differs between agents that have had the same name."""

    start: str
    regions: RegionMap
    connected: bool = False


class Agent:
    """A serving or reading agent, with the methods of a NIXL agent."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.start = secrets.token_hex(8)
        self.regions = RegionMap(name, ())
        self._peers: dict[str, _LoadedAgent] = {}
        self._reads: dict[int, PostedRead] = {}
        self._numbers = itertools.count(1)
        process.wire.agents[name] = self

    def createBackend(self, kind: str, options: dict[str, str]) -> str:
        return kind

    def registerMem(self, segments: Segments, backends: list[str]) -> None:
        self.regions = RegionMap(self.name, (*self.regions.regions, *_regions(segments)))

    def getLocalMD(self) -> bytes:
        regions = [(region.base, region.length) for region in self.regions.regions]
        return json.dumps({"agent": self.name, "start": self.start, "regions": regions}).encode()

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        told = json.loads(metadata)
        regions = [MemoryRegion(MemoryKind.DRAM, 0, base, length) for base, length in told["regions"]]
        self._peers[told["agent"]] = _LoadedAgent(told["start"], RegionMap(told["agent"], regions))
        return str(told["agent"]).encode()

    def checkRemoteMD(self, peer: str, segments: Segments) -> str:
        known = set(self._peers[peer].regions.regions)
        return Process.NIXL_SUCCESS if known.issuperset(_regions(segments)) else "NOT_FOUND"

    def invalidateRemoteMD(self, peer: str) -> None:
        del self._peers[peer]

    def createXferReq(
        self, operation: str, local: Segments, remote: Segments, peer: str, message: bytes, backends: list[str]
    ) -> int:
        (_, mine), (_, theirs) = local, remote
        source, destination, length = theirs[:, 0], mine[:, 0], mine[:, 1]
        known = self._peers[peer]
        known.regions.check_ranges("source", MemoryKind.DRAM, 0, source, length)
        self.regions.check_ranges("destination", MemoryKind.DRAM, 0, destination, length)
        # The first read of a link reads a few bytes, to connect.
        connects, known.connected = not known.connected, True
        number = next(self._numbers)
        copies = np.stack((destination, source, length), 1).tolist()
        self._reads[number] = PostedRead(peer, copies, connects)
        return number

    def postXferReq(self, number: int, message: bytes) -> str:
        read = self._reads[number]
        self._check_source(read)
        self.process.wire.post(read)
        return self.getXferStatus(number)

    def getXferStatus(self, number: int) -> str:
        read = self._reads[number]
        if not read.done:
            self._check_source(read)
            if not read.let_go:
                return Process.NIXL_IN_PROG
            for to, of, length in read.copies:
                ctypes.memmove(to, of, length)
            read.done = True
        return Process.NIXL_SUCCESS

    def releaseXferReq(self, number: int) -> None:
        del self._reads[number]

    def _check_source(self, read: PostedRead) -> None:
        """Raise `RemoteDisconnected` unless the agents on both sides of a read are alive."""
        source, known = self.process.wire.agents.get(read.peer), self._peers.get(read.peer)
        if source is None or known is None or source.start != known.start or source.process.killed:
            raise RemoteDisconnected(f"agent {read.peer!r} is gone")
        if self.process.killed:
            raise RemoteDisconnected(f"the process of agent {self.name!r} was killed")


def _regions(segments: Segments) -> list[MemoryRegion]:
    kind, rows = segments
    if kind != Process.DRAM_SEG:
        raise HostMemoryOnly("a fabric of kvferry.testing reads and serves host memory only")
    return [MemoryRegion(MemoryKind.DRAM, 0, base, length) for base, length, _ in rows.tolist()]
