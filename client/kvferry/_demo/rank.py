"""A rank of the demonstration, as a worker of an engine is: a process with memory of its own, which does what its
scheduler tells it over a pipe."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvferry import Blocks, Cache, Client, EngineSpec, Group, GroupKind, KvferryError, NixlOptions, RankGeometry
from kvferry._demo.pattern import POISON, blocks_view, expected, wanted
from kvferry.geometry.file import rank_bytes, rebase
from kvferry.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its name and length, its blocks in both caches by group, and its reference once it is published."""

    name: str
    tokens: int
    source: dict[str, Blocks]
    destination: dict[str, Blocks]
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank read for one request, and why it could not; see `kvferry.ReadResult`."""

    request: str
    source_ranks: tuple[int, ...] = ()
    bytes: int = 0
    descriptors: int = 0
    pieces: int = 0
    error: str = ""


def run_rank(
    address: str, spec: EngineSpec, planned: RankGeometry, token: str, serve: bool, ucx_tls: str, pipe: Connection
) -> None:
    """Run the process of a rank: it answers each message of the pipe with one, and ends when the pipe ends.

    Args:
        address: its node server.
        spec: its engine.
        planned: its planes, at the addresses of the geometry file; moved to where its memory is.
        token: of the engine's session, which the scheduler has.
        serve: it is read from; else it reads.
        ucx_tls: UCX transports to use; empty: UCX's choice.
        pipe: to the scheduler.
    """
    # Ctrl-C reaches the whole foreground group; the scheduler decides what becomes of its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The scheduler may be gone at any moment, as when another rank cannot start.
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _serve(address, spec, planned, token, serve, ucx_tls, pipe)
        except KvferryError as error:
            pipe.send(error)


def _serve(
    address: str, spec: EngineSpec, planned: RankGeometry, token: str, serve: bool, ucx_tls: str, pipe: Connection
) -> None:
    memory = HostMemory(rank_bytes(planned))
    geometry = rebase(planned, memory.region.base)
    with Client(address, options=NixlOptions(ucx_tls=ucx_tls)) as client:
        cache = client.register_cache(
            spec,
            geometry.rank,
            planes=geometry.planes,
            regions=[memory.region],
            # The geometry says for each rank what it holds.
            replicated=True,
            keep=memory,
            labels=geometry.labels,
            token=token,
            serve=serve,
        )
        rank = _Rank(cache, memory, geometry)
        pipe.send(None)
        while True:
            command, requests = pipe.recv()
            pipe.send(getattr(rank, command)(requests))


class _Rank:
    """What a rank does; each method is a command of the scheduler."""

    def __init__(self, cache: Cache, memory: HostMemory, geometry: RankGeometry) -> None:
        self._cache, self._memory = cache, memory.array
        self._groups = {group.name: group for group in cache.spec.groups}
        self._planes = [(plane, blocks_view(self._memory, memory.region.base, plane)) for plane in geometry.planes]
        self._memory[:] = POISON

    def fill(self, requests: Sequence[Request]) -> None:
        """Write the requests' blocks, as prefill does."""
        for plane, view in self._planes:
            for request in requests:
                blocks = request.source[plane.group]
                view[blocks.ids] = expected(request.name, plane, _numbers(self._groups[plane.group], blocks))

    def read(self, requests: Sequence[Request]) -> tuple[float, list[Moved]]:
        """Read all requests at once; the seconds until the last one's end, and what was read for each."""
        began = time.perf_counter()
        parties = self._cache.spec.num_ranks
        reads = [
            self._cache.read(one.reference, one.destination, (0, one.tokens), read_id=one.name, parties=parties)
            for one in requests
        ]
        moved = []
        for read in reads:
            try:
                got = read.result()
                moved.append(Moved(read.read_id, got.source_ranks, got.bytes, got.descriptors, got.pieces))
            except KvferryError as error:
                moved.append(Moved(read.read_id, error=f"{type(error).__name__}: {error}"))
        return time.perf_counter() - began, moved

    def verify(self, requests: Sequence[Request]) -> tuple[int, int, int]:
        """Check every byte that was read, and that no other byte was written: how many bytes are right, wrong, and
        written although nobody asked for it."""
        right = wrong = 0
        for plane, view in self._planes:
            group = self._groups[plane.group]
            for request in requests:
                blocks = request.destination[plane.group]
                numbers = _numbers(group, blocks)
                must, may = wanted(plane, group, request.tokens, numbers)
                found = view[blocks.ids]
                good = (found == expected(request.name, plane, numbers))[must]
                right += int(np.count_nonzero(good))
                wrong += int(good.size - np.count_nonzero(good))
                found[may] = POISON
                view[blocks.ids] = found
        # With what was read put back to poison, everything must be poison.
        return right, wrong, int(len(self._memory) - np.count_nonzero(self._memory == POISON))


def _numbers(group: Group, blocks: Blocks) -> range:
    """Return which blocks of the request these are."""
    first = 0 if group.kind is GroupKind.STATE else blocks.first_token // group.block_tokens
    return range(first, first + len(blocks.ids))
