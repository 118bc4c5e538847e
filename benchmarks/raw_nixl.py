"""Raw NIXL: the least program that reads the same descriptors, without leases, checks, deadlines or a second thread.

It uses NIXL's binding as kvferry does, since NIXL's Python API burns a core per idle agent (docs/nixl.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.caches import CacheMemory, Ids, Layout
from kvferry import MemoryKind, MemoryRegion, NixlOptions
from kvferry._transport import nixl_binding

Rows = npt.NDArray[np.uint64]
"""``uint64[n, 3]``: address, length, device."""

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RawPeer:
    """What a reader needs of a server.

    Attributes:
        name: of its agent.
        metadata: of its agent.
        base: address of its memory.
    """

    name: str
    metadata: bytes = field(repr=False)
    base: int


class RawServer:
    """An agent that serves memory. Keep it referenced."""

    def __init__(self, region: MemoryRegion, options: NixlOptions) -> None:
        self._nixl = nixl_binding.load()
        name = f"raw-{secrets.token_hex(8)}"
        self._agent, backend = nixl_binding.new_agent(self._nixl, name, options, progress_thread=True)
        nixl_binding.register(self._nixl, self._agent, backend, (region,))
        self.peer = RawPeer(name, bytes(self._agent.getLocalMD()), region.base)


class RawReader:
    """An agent that reads. Every call on the thread that made it."""

    def __init__(self, region: MemoryRegion, options: NixlOptions) -> None:
        self._nixl = nixl_binding.load()
        name = f"raw-{secrets.token_hex(8)}"
        self._agent: Any
        self._agent, self._backend = nixl_binding.new_agent(self._nixl, name, options, progress_thread=False)
        nixl_binding.register(self._nixl, self._agent, self._backend, (region,))
        self._space = nixl_binding.memory_type(self._nixl, MemoryKind.DRAM)

    def add(self, peer: RawPeer, scratch: int) -> None:
        """Connect to a server; reads one word into `scratch`, an address of the region."""
        self._agent.loadRemoteMD(peer.metadata)
        word = np.array([[0, 8, 0]], np.uint64)
        there, here = word.copy(), word.copy()
        there[0, 0], here[0, 0] = peer.base, scratch
        self.read(peer.name, there, here)

    def read(self, peer: str, source: Rows, destination: Rows) -> None:
        """Read, polling without a pause until all has arrived."""
        remote, local = (self._nixl.nixlXferDList(self._space, rows) for rows in (source, destination))
        self._run(self._agent.createXferReq(self._nixl.NIXL_READ, local, remote, peer, b"", [self._backend]))

    def prepare(self, peer: str, source: Rows, destination: Rows) -> tuple[int, int]:
        """Prepared lists of both sides, for `read_prepared`."""
        remote = self._agent.prepXferDlist(peer, self._space, _strided(source), [self._backend])
        local = self._agent.prepXferDlist(
            self._nixl.NIXL_INIT_AGENT, self._space, _strided(destination), [self._backend]
        )
        return local, remote

    def read_prepared(self, lists: tuple[int, int], indices: npt.NDArray[np.int32]) -> None:
        """Read these descriptors of prepared lists."""
        local, remote = lists
        self._run(
            self._agent.makeXferReq(self._nixl.NIXL_READ, local, indices, remote, indices, b"", [self._backend], False)
        )

    def _run(self, handle: int) -> None:
        status = self._agent.postXferReq(handle, b"")
        while status == self._nixl.NIXL_IN_PROG:
            status = self._agent.getXferStatus(handle)
        if status != self._nixl.NIXL_SUCCESS:
            raise RuntimeError("raw NIXL failed")
        self._agent.releaseXferReq(handle)


def _strided(rows: Rows) -> Rows:
    """Descriptors as rows of a prepared list: address, length, device, stride, count."""
    lengths = rows[:, 1:2]
    return np.ascontiguousarray(np.hstack((rows, lengths, np.ones_like(lengths))))


def descriptors(
    layout: Layout, source_base: int, destination: CacheMemory, source_ids: Ids, ids: Ids
) -> tuple[Rows, Rows]:
    """The descriptors of a request on both sides: blocks that are neighbours on both sides are one, where the
    destination holds all heads."""
    whole = destination.heads == layout.heads
    joined = (np.diff(source_ids) == 1) & (np.diff(ids) == 1) & whole
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    lengths = np.diff(np.append(first, len(ids))).astype(np.uint64) * np.uint64(destination.heads * layout.head_bytes)
    sides = []
    for base, heads, blocks in (
        (source_base, layout.heads, source_ids),
        (destination.region.base, destination.heads, ids),
    ):
        block = heads * layout.head_bytes
        starts = base + np.arange(2 * layout.layers, dtype=np.uint64)[:, None] * np.uint64(layout.num_blocks * block)
        rows = np.zeros((2 * layout.layers, len(first), 3), np.uint64)
        rows[:, :, 0] = starts + blocks[first].astype(np.uint64) * np.uint64(block)
        rows[:, :, 1] = lengths
        sides.append(rows.reshape(-1, 3))
    return sides[0], sides[1]


def chunks(rows: Rows, most: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices of a list, each of at most so many bytes, or of one descriptor."""
    begin = size = 0
    for index, length in enumerate(rows[:, 1].tolist()):
        if size and size + length > most:
            yield slice(begin, index)
            begin, size = index, 0
        size += length
    yield slice(begin, len(rows))


def programs(reader: RawReader, peer: str, source: Rows, destination: Rows) -> dict[str, Callable[[], None]]:
    """The ways to read the same descriptors, by name; whichever is fastest is raw NIXL's best."""
    lists = reader.prepare(peer, source, destination)
    indices = np.arange(len(source), dtype=np.int32)
    parts = [(source[part], destination[part]) for part in chunks(source)]

    def in_chunks() -> None:
        for theirs, mine in parts:
            reader.read(peer, theirs, mine)

    return {
        "one handle": lambda: reader.read(peer, source, destination),
        "prepared": lambda: reader.read_prepared(lists, indices),
        "chunks of 16 MiB": in_chunks,
    }
