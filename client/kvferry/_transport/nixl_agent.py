"""NIXL, wrapped: the only file that imports it. Its and UCX's options are in `kvferry._transport.nixl_options`.

A rank has two kinds of agent (DESIGN, 6): a `ServingAgent`, which registers its cache and never initiates, and
`ReadingAgent`, which read other ranks' memory. What is below NIXL's Python API is used directly, for two reasons:

- that API fixes the progress thread's delay at 0, which burns a core per idle agent;
- its handle objects release themselves when they are collected, on whatever thread that happens. With NIXL's locks off,
  as they are here, that is a crash; with them on it stops the whole interpreter. Here handles are plain numbers.
"""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from kvferry._memory.permute import Space
from kvferry._transport.bounds import RegionMap, check_agent, check_indices, check_raw, check_table
from kvferry._transport.nixl_options import PROGRESS_DELAY_US, NixlOptions
from kvferry.errors import BadAgentMetadata, Closed, InvalidField, NixlError, NixlMissing, WrongThread
from kvferry.geometry.model import MemoryKind, MemoryRegion
from kvferry.planner.descriptors import Addresses, Descriptors, DescriptorTable, PreparedDescriptors, RawDescriptors

__all__ = [
    "AgentInfo",
    "HandleState",
    "NixlError",
    "NixlMissing",
    "NixlOptions",
    "ReadHandle",
    "ReadingAgent",
    "ServingAgent",
    "WrongThread",
]

WARM_UP_BYTES = 64
TABLES_PER_PEER = 64
"""Prepared tables kept per peer. A plan has a few; more are left over from plans that were replaced."""


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """A serving agent, as its rank announces it.

    Attributes:
        name: unique per incarnation.
        metadata: opaque, from NIXL.
        sha256: digest of metadata; checked before NIXL sees them.
        regions: what it registered; nothing else of it is ever read.
    """

    name: str
    metadata: bytes = field(repr=False)
    sha256: bytes
    regions: tuple[MemoryRegion, ...]

    def check(self) -> None:
        """Raise `BadAgentMetadata` if this is not what was announced."""
        check_agent(self.name, self.metadata, self.sha256, self.regions)


class HandleState(enum.Enum):
    """What NIXL says about a posted read."""

    DONE = "done"
    """Every byte has arrived; nothing of it writes any more."""
    MOVING = "moving"
    ERROR = "error"
    """No proof of anything: the bytes may still be arriving (PROTOCOL, Quiet)."""


class ServingAgent:
    """Makes a rank's memory readable. Never initiates.

    It keeps no memory alive: whoever made it keeps the regions mapped for the life of the process. NIXL does not
    revoke: closing this stops nobody who has its metadata, and memory unmapped under a reader kills this process on
    TCP.

    Threading: made and closed on any thread; NIXL's own progress thread does the work, asleep when there is none. On
    CUDA the calling thread has set its device.

    Args:
        name: unique per incarnation, at most 512 bytes.
        regions: contiguous ranges; no descriptor may span two.
        options: how bytes move.
        binding: called in place of NIXL; see `kvferry._transport.agents`.

    Raises:
        NixlMissing: NIXL is not installed.
        NixlError: NIXL could not register the memory.
    """

    def __init__(
        self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions | None = None, binding: Any = None
    ) -> None:
        if not regions:
            raise InvalidField("regions", (), "at least one")
        binding = _binding() if binding is None else binding
        self._agent: Any = None
        agent, backend = _new_agent(binding, name, options or NixlOptions(), progress_thread=True)
        _register(binding, agent, backend, regions)
        metadata = bytes(agent.getLocalMD())
        self._agent = agent
        self.info = AgentInfo(name, metadata, hashlib.sha256(metadata).digest(), tuple(regions))

    def close(self) -> None:
        """End the agent; reads that are under way fail at their readers. Idempotent."""
        self._agent = None


P = ParamSpec("P")
T = TypeVar("T")


def _owned(
    method: Callable[Concatenate[ReadingAgent, P], T],
) -> Callable[Concatenate[ReadingAgent, P], T]:
    """For the owner's thread only."""

    @functools.wraps(method)
    def checked(self: ReadingAgent, *args: P.args, **kwargs: P.kwargs) -> T:
        self.check_owner(method.__name__)
        return method(self, *args, **kwargs)

    # The type of `wraps` names the first parameter, which `Callable` cannot.
    return cast("Callable[Concatenate[ReadingAgent, P], T]", checked)


class ReadHandle:
    """One read: made, posted once, checked until it has ended, released.

    Threading: as its agent. Used after its release, or after its agent's end, it raises `Closed` where NIXL would
        crash.

    Releasing stops nothing: bytes of a posted read go on arriving. Only `HandleState.DONE`, or the end of the agent,
    means that nothing writes any more.
    """

    __slots__ = ("_agent", "_number", "peer")

    def __init__(self, agent: ReadingAgent, number: int, peer: str) -> None:
        self._agent = agent
        self._number: int | None = number
        self.peer = peer

    def post(self) -> HandleState:
        """Start it. May copy all of it before it returns (CMA). Raises `NixlError`, which proves nothing."""
        return self._agent.post(self.number("post"), self.peer)

    def check(self) -> HandleState:
        """Where it is; also what makes the agent's reads progress. Raises `NixlError`, which proves nothing."""
        return self._agent.check(self.number("check"), self.peer)

    def release(self) -> None:
        """Give it back. Idempotent."""
        if self._number is not None and not self._agent.destroyed:
            self._agent.release(self._number)
        self._number = None

    def number(self, call: str) -> int:
        """NIXL's own handle."""
        if self._number is None or self._agent.destroyed:
            raise Closed(f"{call} of a read from {self.peer!r} that was released")
        return self._number


@dataclass(slots=True)
class _Peer:
    """An added peer: its regions and the tables prepared for it, by identity, each (local, remote)."""

    regions: RegionMap
    tables: OrderedDict[int, tuple[DescriptorTable, int, int]]


class ReadingAgent:
    """Reads other ranks' memory into this rank's.

    Threading: owned by the thread that makes it. Every method checks that, because NIXL's locks are off: with them a
    call would wait, with the interpreter's lock held, for the whole copy that another thread runs. It has no progress
    thread: that would cost twice the CPU, and `ReadHandle.check` makes progress.

    Args:
        name: unique in the cluster.
        regions: memory that is read into. The caller keeps it mapped, and unused, while reads into it are not quiet.
        options: how bytes move.
        binding: as of `ServingAgent`.
    """

    def __init__(self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions, binding: Any = None) -> None:
        self._owner = threading.get_ident()
        self.name = name
        self._nixl = _binding() if binding is None else binding
        _use_device(regions, options)
        self._peers: dict[str, _Peer] = {}
        self._local = RegionMap(f"agent {name!r}", regions)
        # The bytes of a peer's first answer. Kept until the agent is gone: a first read that is stuck may still write.
        self._scratch = np.zeros(WARM_UP_BYTES, np.uint8)
        self._agent, self._backend = _new_agent(self._nixl, name, options, progress_thread=False)
        start = self._scratch.ctypes.data
        self._scratch_region = MemoryRegion(MemoryKind.DRAM, 0, start, WARM_UP_BYTES)
        self._spaces: list[Space] = []
        """Staging memory; kept until the agent is gone, since what is stuck may still write."""
        _register(self._nixl, self._agent, self._backend, (*regions, self._scratch_region))

    @property
    def destroyed(self) -> bool:
        """Whether it has ended."""
        return self._agent is None

    def check_owner(self, call: str) -> None:
        """Raise `WrongThread` on any thread but the owner, `Closed` after the end."""
        if threading.get_ident() != self._owner:
            raise WrongThread(
                f"{call} of agent {self.name!r} on another thread than its own", agent=self.name, call=call
            )
        if self._agent is None:
            raise Closed(f"agent {self.name!r} was destroyed")

    @_owned
    def add_space(self, space: Space) -> None:
        """Register more memory that is read into. Idempotent; raises `NixlError`."""
        if space not in self._spaces:
            _register(self._nixl, self._agent, self._backend, (space.region,))
            self._spaces.append(space)
            self._local = RegionMap(self._local.owner, (*self._local.regions, space.region))

    @_owned
    def add_peer(self, info: AgentInfo) -> None:
        """Load a peer's metadata, after checking them.

        Raises:
            BadAgentMetadata: they are not what was announced.
            NixlError: the peer cannot be reached.
        """
        info.check()
        answer = self._call("loadRemoteMD", info.name, lambda: self._agent.loadRemoteMD(info.metadata))
        answered = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
        try:
            problem = f"its metadata are those of {answered[:80]!r}" if answered != info.name else self._unknown(info)
        except NixlError as error:
            problem = str(error)
        if problem:
            if answered not in self._peers:
                self._call("invalidateRemoteMD", info.name, lambda: self._agent.invalidateRemoteMD(answered))
            raise BadAgentMetadata(f"agent {info.name!r}: {problem}", agent=info.name, problem=problem)
        self._peers[info.name] = _Peer(RegionMap(f"agent {info.name!r}", info.regions), OrderedDict())

    @_owned
    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Only once nothing of it is under way: this stops nothing."""
        added = self._peers.pop(peer)
        for _, local, remote in added.tables.values():
            self._release_table(local, remote)
        self._call("invalidateRemoteMD", peer, lambda: self._agent.invalidateRemoteMD(peer))

    @_owned
    def warm_up(self, peer: str) -> ReadHandle:
        """A read of a few bytes into memory of this agent's own: the first read connects, and needs the peer's help."""
        region = self._peers[peer].regions.regions[0]
        length = min(WARM_UP_BYTES, region.length)
        here = self._scratch_region
        local = self._segments(here.memory_kind, np.array([[here.base, length, here.device]], np.uint64))
        remote = self._segments(region.memory_kind, np.array([[region.base, length, region.device]], np.uint64))
        return self._initialize(peer, local, remote)

    @_owned
    def make(self, peer: str, descriptors: Descriptors) -> ReadHandle:
        """A read, checked and not posted.

        Raises:
            InvalidField: a descriptor lies outside of what is registered here, or announced there.
            NixlError: NIXL refused it. Nothing was posted.
        """
        if isinstance(descriptors, PreparedDescriptors):
            return self._make_prepared(peer, descriptors)
        return self._make_raw(peer, descriptors)

    @_owned
    def post(self, number: int, peer: str) -> HandleState:
        """See `ReadHandle.post`."""
        return self._state(self._call("postXferReq", peer, lambda: self._agent.postXferReq(number, b"")))

    @_owned
    def check(self, number: int, peer: str) -> HandleState:
        """See `ReadHandle.check`."""
        return self._state(self._call("getXferStatus", peer, lambda: self._agent.getXferStatus(number)))

    @_owned
    def release(self, number: int) -> None:
        """See `ReadHandle.release`."""
        self._call("releaseXferReq", "", lambda: self._agent.releaseXferReq(number))

    @_owned
    def destroy(self) -> bool:
        """End the agent: the fence after which nothing it posted writes any more. Handles are released by it.

        Returns:
            Whether it is gone. False means that something still refers to it, so that nothing is proven.
        """
        gone = weakref.ref(self._agent)
        self._agent = None
        self._peers.clear()
        if gone() is not None:
            gc.collect()
        return gone() is None

    def _make_raw(self, peer: str, raw: RawDescriptors) -> ReadHandle:
        check_raw(raw, self._local, self._peers[peer].regions)
        memory = raw.memory
        local = self._segments(memory.destination_kind, _rows(raw.destination, raw.length, memory.destination_device))
        remote = self._segments(memory.source_kind, _rows(raw.source, raw.length, memory.source_device))
        return self._initialize(peer, local, remote)

    def _make_prepared(self, peer: str, prepared: PreparedDescriptors) -> ReadHandle:
        check_indices(prepared)
        local, remote = self._table(peer, prepared.table)
        mine, theirs = np.ascontiguousarray(prepared.destination), np.ascontiguousarray(prepared.source)
        number = self._call(
            "makeXferReq",
            peer,
            lambda: self._agent.makeXferReq(
                self._nixl.NIXL_READ, local, mine, remote, theirs, b"", [self._backend], False
            ),
        )
        return ReadHandle(self, int(number), peer)

    def _initialize(self, peer: str, local: Any, remote: Any) -> ReadHandle:
        number = self._call(
            "createXferReq",
            peer,
            lambda: self._agent.createXferReq(self._nixl.NIXL_READ, local, remote, peer, b"", [self._backend]),
        )
        return ReadHandle(self, int(number), peer)

    def _table(self, peer: str, table: DescriptorTable) -> tuple[int, int]:
        """The table as NIXL prepared it for this peer: (local, remote)."""
        tables = self._peers[peer].tables
        known = tables.get(id(table))
        if known is not None:
            tables.move_to_end(id(table))
            return known[1], known[2]
        check_table(table, self._local, self._peers[peer].regions)
        memory = table.memory
        local = self._prepare(self._nixl.NIXL_INIT_AGENT, memory.destination_kind, table.destination, peer)
        remote = self._prepare(peer, memory.source_kind, table.source, peer)
        # The table itself is kept with them, so that its identity is not given to another one.
        tables[id(table)] = (table, local, remote)
        if len(tables) > TABLES_PER_PEER:
            # Handles made from a prepared list have their own copy of it.
            _, (_, old_local, old_remote) = tables.popitem(last=False)
            self._release_table(old_local, old_remote)
        return local, remote

    def _prepare(self, side: str, kind: MemoryKind, rows: Addresses, peer: str) -> int:
        contiguous = np.ascontiguousarray(rows)
        space = self._space(kind)
        number = self._call(
            "prepXferDlist", peer, lambda: self._agent.prepXferDlist(side, space, contiguous, [self._backend])
        )
        return int(number)

    def _release_table(self, local: int, remote: int) -> None:
        self._call("releasedDlistH", "", lambda: self._agent.releasedDlistH(local))
        self._call("releasedDlistH", "", lambda: self._agent.releasedDlistH(remote))

    def _unknown(self, info: AgentInfo) -> str:
        """Regions that were announced, but of which the loaded metadata know nothing; empty if there are none."""
        for region in info.regions:
            rows = np.array([[region.base, region.length, region.device]], np.uint64)
            segments = self._segments(region.memory_kind, rows)
            answer = self._call(
                "checkRemoteMD", info.name, functools.partial(self._check_metadata, info.name, segments)
            )
            if answer != self._nixl.NIXL_SUCCESS:
                return f"it does not serve the announced {region.length} bytes at {region.base:#x}"
        return ""

    def _check_metadata(self, peer: str, segments: Any) -> Any:
        return self._agent.checkRemoteMD(peer, segments)

    def _segments(self, kind: MemoryKind, rows: Addresses) -> Any:
        return self._nixl.nixlXferDList(self._space(kind), rows)

    def _space(self, kind: MemoryKind) -> Any:
        return _space(self._nixl, kind)

    def _state(self, status: Any) -> HandleState:
        if status == self._nixl.NIXL_SUCCESS:
            return HandleState.DONE
        return HandleState.MOVING if status == self._nixl.NIXL_IN_PROG else HandleState.ERROR

    def _call(self, call: str, peer: str, function: Callable[[], T]) -> T:
        return _call(call, peer, function)


def _binding() -> Any:
    """NIXL's binding. Loading it takes a second or two, so it happens on first use."""
    # UCX writes what goes wrong to standard output, which belongs to the program. It reads this when it is loaded.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    # Importing NIXL makes the logging of the whole process swallow its own errors.
    raise_exceptions = logging.raiseExceptions
    try:
        # By this name, because the package chooses the build that suits the machine's CUDA.
        from nixl import _bindings

        return _bindings
    except ImportError as error:
        raise NixlMissing(
            f"NIXL cannot be loaded ({error}); it comes with: pip install 'kvferry[nixl]'", problem=str(error)
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions


def _new_agent(nixl: Any, name: str, options: NixlOptions, *, progress_thread: bool) -> tuple[Any, Any]:
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress_thread
    config.pthrDelay = PROGRESS_DELAY_US
    config.useListenThread = False
    config.lthrDelay = PROGRESS_DELAY_US
    config.captureTelemetry = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = _call("nixlAgent", "", lambda: nixl.nixlAgent(name, config))
    return agent, _call("createBackend", "", lambda: agent.createBackend("UCX", options.backend()))


def _use_device(regions: Sequence[MemoryRegion], options: NixlOptions) -> None:
    """Make this thread's CUDA context that of the memory; UCX takes the calling thread's."""
    on_device = [region.device for region in regions if region.memory_kind is MemoryKind.VRAM]
    torch = sys.modules.get("torch")
    if on_device and torch is not None:
        torch.cuda.set_device(on_device[0] if options.cuda_device is None else options.cuda_device)


def _register(nixl: Any, agent: Any, backend: Any, regions: Sequence[MemoryRegion]) -> None:
    for kind in MemoryKind:
        rows = [[region.base, region.length, region.device] for region in regions if region.memory_kind is kind]
        if rows:
            segments = nixl.nixlRegDList(_space(nixl, kind), np.array(rows, np.uint64))
            _call("registerMem", "", functools.partial(agent.registerMem, segments, [backend]))


def _space(nixl: Any, kind: MemoryKind) -> Any:
    return nixl.VRAM_SEG if kind is MemoryKind.VRAM else nixl.DRAM_SEG


def _rows(address: Addresses, length: Addresses, device: int) -> Addresses:
    rows = np.empty((len(address), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = address, length, device
    return rows


def _call(call: str, peer: str, function: Callable[[], T]) -> T:
    """NIXL's exceptions have no common base of their own; whatever it raises becomes a `NixlError`."""
    problem = ""
    try:
        return function()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    # Raised here, without a cause: a traceback would keep the agent alive that the caller may be about to destroy.
    about = f" (peer {peer!r})" if peer else ""
    raise NixlError(f"NIXL {call}{about}: {problem}", call=call, peer=peer, problem=problem)
