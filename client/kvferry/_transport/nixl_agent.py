"""NIXL's agents. A rank has two kinds (DESIGN, 6): a `ServingAgent`, which registers its cache and never initiates, and
`ReadingAgent`s, which read other ranks' memory."""

from __future__ import annotations

import enum
import gc
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvferry._memory.access import StagingSpace
from kvferry._memory.device import device_of, enter_device, on_device
from kvferry._transport import nixl_binding
from kvferry._transport.bounds import RegionMap, check_agent, check_blocks, check_descriptors
from kvferry._transport.host_network import open_sockets, tcp_since
from kvferry._transport.nixl_options import NixlOptions
from kvferry.errors import BadAgentMetadata, Closed, InvalidField, NixlError, NixlMissing, WrongThread
from kvferry.geometry.model import AgentInfo, MemoryRegion
from kvferry.geometry.plane import MemoryKind
from kvferry.planner.descriptors import Addresses, BlockRows, Descriptors, MemoryPair

# Some names are re-exported for callers that need nothing else of this folder.
__all__ = ["AgentInfo", "HandleState", "NixlError", "NixlMissing", "NixlOptions", "ReadHandle", "ReadingAgent"]
__all__ += ["ServingAgent", "WrongThread"]

WARM_UP_BYTES = 64

ROWS_PER_PEER, ROWS_PER_LIST = 1 << 18, 256
"""Rows of prepared lists that are kept per peer, at 140 bytes each; each list counts as some rows more. A source that
never names the same layers twice has other lists for each step."""

INDEX_LIMIT = 1 << 31
"""NIXL takes int32 indices, and truncates larger ones silently."""


class HandleState(enum.Enum):
    """The state of a posted read, as NIXL reports it."""

    DONE = "done"
    """Every byte has arrived; the read writes no more."""
    MOVING = "moving"
    ERROR = "error"
    """The read failed, and may still write (PROTOCOL, Quiet)."""


class ServingAgent:
    """Makes a rank's memory readable. It starts no transfers itself.

    The caller keeps the regions mapped for the life of the process. NIXL revokes nothing: peers that have the metadata
    can read after `close`, and unmapping memory while it is read kills this process on TCP.

    Threading: made and closed on any thread; the device of the memory is set there meanwhile. NIXL's own progress
    thread does the work, and sleeps when there is none.

    `name` is unique per incarnation, at most 512 bytes. No descriptor may span two regions. `binding` is called in
    place of NIXL's own, e.g. memory of this process in `kvferry.testing`; None: NIXL, loaded with the first agent.

    Raises `InvalidField` without regions, for regions on several devices, and for a device that torch cannot set;
    `NixlMissing`; and `NixlError` if NIXL could not register the memory.
    """

    def __init__(
        self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions | None = None, binding: Any = None
    ) -> None:
        if not regions:
            raise InvalidField("regions", (), "at least one")
        options = options or NixlOptions()
        # Other bindings know no devices.
        self._device = device_of(regions) if binding is None else None
        with on_device(self._device):
            binding = nixl_binding.load() if binding is None else binding
            self._agent, backend = nixl_binding.new_agent(binding, name, options, progress_thread=True)
            nixl_binding.register(binding, self._agent, backend, regions)
            metadata = bytes(self._agent.getLocalMD())
        self.info = AgentInfo(name, metadata, hashlib.sha256(metadata).digest(), tuple(regions))

    def close(self) -> None:
        """End the agent; reads under way fail at their readers. Idempotent."""
        if self._agent is not None:
            with on_device(self._device):
                self._agent = None


class ReadHandle:
    """One read: made, posted once, checked until it has ended, and released.

    Releasing stops nothing: bytes of a posted read go on arriving. Only `HandleState.DONE`, or the end of the agent,
    proves that the read writes no more.

    Threading: on its agent's thread only. After the release, or the agent's end, `post` and `check` raise `Closed`,
    where NIXL would crash.
    """

    __slots__ = ("_agent", "_number", "peer")

    def __init__(self, agent: ReadingAgent, number: int, peer: str) -> None:
        self._agent = agent
        self._number: int | None = number
        self.peer = peer

    def post(self) -> HandleState:
        """Start the read. May copy all bytes before returning (CMA). Raises `NixlError`; the read may still write."""
        return self._ask("post", "postXferReq", b"")

    def check(self) -> HandleState:
        """The read's state. Checking also moves the agent's reads on. Raises `NixlError`; the read may still write."""
        return self._ask("check", "getXferStatus")

    def release(self) -> None:
        """Give the handle back to NIXL. Idempotent."""
        if self._number is not None and not self._agent.destroyed:
            self._agent.check_owner("release")
            self._agent.call("releaseXferReq", "", self._number)
        self._number = None

    def _ask(self, name: str, call: str, *given: object) -> HandleState:
        if self._number is None or self._agent.destroyed:
            raise Closed(f"{name} of a read from {self.peer!r} that was released")
        self._agent.check_owner(name)
        return self._agent.state(self._agent.call(call, self.peer, self._number, *given))


@dataclass(slots=True)
class _Peer:
    """An added peer: its readable regions, and NIXL's numbers of the local and remote lists prepared for it, by the
    identity of their rows. `sockets` are those of this process before the peer was added; None: unknown."""

    regions: RegionMap
    sockets: Mapping[str, int] | None
    lists: OrderedDict[tuple[int, MemoryPair], tuple[BlockRows, int, int]]


class ReadingAgent:
    """Reads other ranks' memory into this rank's.

    Threading: owned by the thread that makes it, which every method checks, because NIXL's locks are off. With the
    locks on, a call would wait for the whole copy of another thread while holding the interpreter's lock. There is no
    progress thread, which would cost twice the CPU: `ReadHandle.check` makes progress.

    `name` is unique in the cluster. The caller keeps `regions` mapped, and unused, until all reads into them are quiet.
    `binding`: see `ServingAgent`.
    """

    def __init__(self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions, binding: Any = None) -> None:
        self._owner = threading.get_ident()
        self.name = name
        if binding is None:
            enter_device(device_of(regions))
        self._nixl = nixl_binding.load() if binding is None else binding
        self._ucx = binding is None and options.backend == "UCX"
        self._prepares = binding is None
        self._added: dict[str, _Peer] = {}
        self._local = RegionMap(f"agent {name!r}", regions)
        # Receives the bytes of first reads. Kept until the agent is gone: a stuck first read may still write.
        self._scratch = np.zeros(WARM_UP_BYTES, np.uint8)
        self._agent, self._backend = nixl_binding.new_agent(self._nixl, name, options, progress_thread=False)
        start = self._scratch.ctypes.data
        self._scratch_region = MemoryRegion(MemoryKind.DRAM, 0, start, WARM_UP_BYTES)
        self._spaces: list[StagingSpace] = []
        """Staging memory. Kept until the agent is gone, since a stuck read may still write to it."""
        nixl_binding.register(self._nixl, self._agent, self._backend, (*regions, self._scratch_region))

    @property
    def destroyed(self) -> bool:
        return self._agent is None

    def check_owner(self, call: str) -> None:
        """Raise `WrongThread` on any thread but the owner, `Closed` after the end. `call` names the call in errors."""
        if threading.get_ident() != self._owner:
            message = f"{call} of agent {self.name!r} on another thread than its own"
            raise WrongThread(message, agent=self.name, call=call)
        if self._agent is None:
            raise Closed(f"agent {self.name!r} was destroyed")

    def add_space(self, space: StagingSpace) -> None:
        """Register more memory to read into. Idempotent; raises `NixlError`."""
        self.check_owner("add_space")
        if space not in self._spaces:
            nixl_binding.register(self._nixl, self._agent, self._backend, (space.region,))
            self._spaces.append(space)
            self._local = RegionMap(self._local.owner, (*self._local.regions, space.region))

    def add_peer(self, info: AgentInfo) -> None:
        """Check a peer's metadata and load them. Raises `BadAgentMetadata` if they are not the announced ones, and
        `NixlError` if the peer cannot be reached."""
        self.check_owner("add_peer")
        check_agent(info)
        sockets = open_sockets()
        answer = self.call("loadRemoteMD", info.name, info.metadata)
        answered = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
        try:
            problem = f"its metadata are those of {answered[:80]!r}" if answered != info.name else self._unknown(info)
        except NixlError as error:
            problem = str(error)
        if problem:
            if answered not in self._added:
                self.call("invalidateRemoteMD", info.name, answered)
            raise BadAgentMetadata(f"agent {info.name!r}: {problem}", agent=info.name, problem=problem)
        self._added[info.name] = _Peer(RegionMap(f"agent {info.name!r}", info.regions), sockets, OrderedDict())

    def over_tcp(self, peer: str) -> bool:
        """Whether the connection to a peer that has answered may use TCP. Also True where this is unknown: another part
        of this process may have opened a TCP connection meanwhile, and only UCX is known to open one for each peer."""
        self.check_owner("over_tcp")
        return not self._ucx or tcp_since(self._added[peer].sockets)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Only when no read from the peer is under way, since this stops none."""
        self.check_owner("remove_peer")
        for _, *numbers in self._added.pop(peer).lists.values():
            self._release_lists(*numbers)
        self.call("invalidateRemoteMD", peer, peer)

    def warm_up(self, peer: str) -> ReadHandle:
        """Make a read of a few bytes into the agent's own memory. The first read from a peer connects, which takes the
        peer's progress thread."""
        self.check_owner("warm_up")
        region = self._added[peer].regions.regions[0]
        length = min(WARM_UP_BYTES, region.length)
        return self._initialize(peer, self._begin_of(self._scratch_region, length), self._begin_of(region, length))

    def make(self, peer: str, descriptors: Descriptors) -> ReadHandle:
        """Make a read, checked and not posted. Raises `InvalidField` if a descriptor lies outside the memory registered
        here, or outside the peer's announced regions, and `NixlError` if NIXL refused the read."""
        self.check_owner("make")
        blocks = descriptors.blocks
        if blocks is not None and self._prepares and blocks.most_entries < INDEX_LIMIT:
            return self._make_prepared(peer, descriptors, blocks)
        check_descriptors(descriptors, self._local, self._added[peer].regions)
        theirs, mine = descriptors.lists()
        (source, _), (destination, _) = descriptors.memory
        return self._initialize(peer, self._list(destination, mine), self._list(source, theirs))

    def state(self, status: Any) -> HandleState:
        if status == self._nixl.NIXL_SUCCESS:
            return HandleState.DONE
        return HandleState.MOVING if status == self._nixl.NIXL_IN_PROG else HandleState.ERROR

    def call(self, name: str, peer: str, *given: object) -> Any:
        """Call a method of NIXL's agent. Raises `NixlError`, which names the peer."""
        # The method is looked up inside: in a frame of the error's traceback it would keep the agent alive.
        return nixl_binding.call(name, peer, lambda: getattr(self._agent, name)(*given))

    def destroy(self) -> bool:
        """End the agent, and release its handles. Returns whether it is gone: then nothing that it posted writes any
        more. False: something still refers to it, and its reads may still write."""
        self.check_owner("destroy")
        gone = weakref.ref(self._agent)
        self._agent = None
        self._added.clear()
        if gone() is not None:
            gc.collect()
        return gone() is None

    def _make_prepared(self, peer: str, descriptors: Descriptors, blocks: BlockRows) -> ReadHandle:
        """Make a read of lists that are prepared once per peer, in half the time. NIXL merges what is contiguous."""
        check_blocks(descriptors, blocks)
        local, remote = self._lists_of(peer, blocks, descriptors.memory)
        rows = np.arange(len(descriptors.length)) + descriptors.first_row
        # No sum wraps: there are fewer than 2**31 entries.
        mine, theirs = (
            np.add.outer((rows * count).astype(np.int32), (offset // np.uint64(stride)).astype(np.int32)).ravel()
            for count, offset, stride in (
                (blocks.destination_blocks, descriptors.destination_offset, blocks.destination_stride),
                (blocks.source_blocks, descriptors.source_offset, blocks.source_stride),
            )
        )
        given = (self._nixl.NIXL_READ, local, mine, remote, theirs, b"", [self._backend], False)
        return ReadHandle(self, int(self.call("makeXferReq", peer, *given)), peer)

    def _lists_of(self, peer: str, blocks: BlockRows, memory: MemoryPair) -> tuple[int, int]:
        """NIXL's numbers of the local and the remote list of all blocks, prepared on first use."""
        lists, key = self._added[peer].lists, (id(blocks), memory)
        known = lists.get(key)
        if known is not None:
            lists.move_to_end(key)
            return known[1], known[2]
        check_descriptors(blocks.whole(memory), self._local, self._added[peer].regions)
        local, remote = (
            int(self.call("prepXferDlist", peer, of, nixl_binding.memory_type(self._nixl, kind), rows, [self._backend]))
            for of, (kind, _), rows in (
                (self._nixl.NIXL_INIT_AGENT, memory.destination, blocks.list_of(memory, "destination")),
                (peer, memory.source, blocks.list_of(memory, "source")),
            )
        )
        # The rows are kept, so that no others get their identity.
        lists[key] = (blocks, local, remote)
        kept = sum(ROWS_PER_LIST + len(rows.length) for rows, _, _ in lists.values())
        while kept > ROWS_PER_PEER and len(lists) > 1:
            # Handles made from a prepared list have their own copy of the list.
            _, (old, *numbers) = lists.popitem(last=False)
            kept -= ROWS_PER_LIST + len(old.length)
            self._release_lists(*numbers)
        return local, remote

    def _release_lists(self, *numbers: int) -> None:
        for number in numbers:
            self.call("releasedDlistH", "", number)

    def _initialize(self, peer: str, local: Any, remote: Any) -> ReadHandle:
        given = (self._nixl.NIXL_READ, local, remote, peer, b"", [self._backend])
        return ReadHandle(self, int(self.call("createXferReq", peer, *given)), peer)

    def _unknown(self, info: AgentInfo) -> str:
        """An announced region that the loaded metadata lack, in words; empty if they lack none."""
        for region in info.regions:
            whole = self._begin_of(region, region.length)
            if self.call("checkRemoteMD", info.name, info.name, whole) != self._nixl.NIXL_SUCCESS:
                return f"it does not serve the announced {region.length} bytes at {region.base:#x}"
        return ""

    def _begin_of(self, region: MemoryRegion, length: int) -> Any:
        return self._list(region.memory_kind, np.array([[region.base, length, region.device]], np.uint64))

    def _list(self, kind: MemoryKind, rows: Addresses) -> Any:
        """A list of NIXL's of ``uint64[n, 3]``: address, length, device."""
        return self._nixl.nixlXferDList(nixl_binding.memory_type(self._nixl, kind), rows)


MakeReadingAgent: TypeAlias = Callable[[str, Sequence[MemoryRegion], NixlOptions], ReadingAgent]
"""Makes an agent of this name that reads into these regions, owned by the calling thread."""
