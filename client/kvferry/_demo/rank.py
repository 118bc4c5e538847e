"""A rank of the demonstration: a process with memory of its own, which takes commands over a pipe."""

from __future__ import annotations

import mmap
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvferry._cache import Cache
from kvferry._client import Client
from kvferry._demo.pattern import POISON, Bytes, blocks_view, expected, wanted
from kvferry._engine_spec import EngineSpec
from kvferry._reads.read import Read
from kvferry._transport.nixl_options import NixlOptions
from kvferry.errors import KvferryError
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.file import rank_bytes, rebase
from kvferry.geometry.model import Group, GroupKind, MemoryRegion, RankGeometry
from kvferry.geometry.plane import MemoryKind

REPORT_EVERY = 0.05


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank needs to start.

    Attributes:
        address: its node server.
        spec: its engine.
        geometry: its planes, at the addresses of the geometry file; moved to where its memory is.
        token: of the engine's session.
        serve: a source; else a destination.
        ucx_tls: UCX transports to use; empty: UCX's choice.
    """

    address: str
    spec: EngineSpec
    geometry: RankGeometry
    token: str
    serve: bool
    ucx_tls: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the demonstration.

    Attributes:
        name: request_id.
        tokens: its length.
        source, destination: its blocks, by group.
        reference: once published.
    """

    name: str
    tokens: int
    source: dict[str, Blocks]
    destination: dict[str, Blocks]
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank read for one request.

    Attributes:
        request: its name.
        seconds: from the start of the read to its end.
        bytes, descriptors, pieces: see `ReadResult`.
        error: why it failed; empty if it did not.
    """

    request: str
    seconds: float
    bytes: int = 0
    descriptors: int = 0
    pieces: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes that a rank has read so far."""

    rank: int
    done: int


@dataclass(frozen=True, slots=True)
class Verified:
    """How many bytes of its memory a rank found right, wrong, and written although nobody asked for it."""

    right: int
    wrong: int
    strayed: int


def run_rank(job: RankJob, pipe: Connection) -> None:
    """Run the process of a rank. It answers each message of the pipe with one, and ends when the pipe ends."""
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = mmap.mmap(-1, rank_bytes(job.geometry))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    cells = np.frombuffer(memory, np.uint8)
    cells[:] = POISON
    start = cells.ctypes.data
    geometry = rebase(job.geometry, start)
    region = MemoryRegion(MemoryKind.DRAM, 0, start, len(cells))
    with Client(job.address, options=NixlOptions(ucx_tls=job.ucx_tls)) as client:
        cache = client.register_cache(
            job.spec,
            geometry.rank,
            planes=geometry.planes,
            regions=[region],
            # The geometry says for each rank what it holds.
            replicated=True,
            keep=memory,
            labels=geometry.labels,
            token=job.token,
            serve=job.serve,
        )
        pipe.send("ready")
        while True:
            try:
                command, argument = pipe.recv()
            except EOFError:
                return
            if command == "fill":
                _fill(cells, start, geometry, job.spec.groups, argument)
                pipe.send("filled")
            elif command == "read":
                pipe.send(_read_all(cache, argument, job.spec.num_ranks, pipe))
            elif command == "verify":
                pipe.send(_verify(cells, start, geometry, job.spec.groups, argument))


def _fill(
    cells: Bytes, start: int, geometry: RankGeometry, groups: Sequence[Group], requests: Sequence[Request]
) -> None:
    by_name = {group.name: group for group in groups}
    for plane in geometry.planes:
        view = blocks_view(cells, start, plane)
        for request in requests:
            blocks = request.source[plane.group]
            view[blocks.ids] = expected(request.name, plane, _numbers(by_name[plane.group], blocks))


def _numbers(group: Group, blocks: Blocks) -> range:
    """Return which blocks of the request these are."""
    first = 0 if group.kind is GroupKind.STATE else blocks.first_token // group.block_tokens
    return range(first, first + len(blocks.ids))


def _read_all(cache: Cache, requests: Sequence[Request], parties: int, pipe: Connection) -> list[Moved]:
    """Read all requests at once, and report progress meanwhile."""
    began = time.perf_counter()
    ends: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()

    def note(read: Read) -> None:
        ends.put((read.read_id, time.perf_counter() - began))

    reads = []
    for request in requests:
        read = cache.read(
            request.reference,
            request.destination,
            (0, request.tokens),
            read_id=request.name,
            parties=parties,
        )
        read.add_done_callback(note)
        reads.append(read)
    for read in reads:
        while True:
            try:
                read.exception(REPORT_EVERY)
                break
            except TimeoutError:
                pipe.send(Progress(cache.rank.rank, sum(other.progress().done for other in reads)))
    pipe.send(Progress(cache.rank.rank, sum(read.progress().done for read in reads)))
    ended = dict(ends.get() for _ in reads)
    return [_moved(read, ended[read.read_id]) for read in reads]


def _moved(read: Read, seconds: float) -> Moved:
    try:
        result = read.result()
    except KvferryError as error:
        return Moved(read.read_id, seconds, error=f"{type(error).__name__}: {error}")
    return Moved(read.read_id, seconds, result.bytes, result.descriptors, result.pieces)


def _verify(
    cells: Bytes, start: int, geometry: RankGeometry, groups: Sequence[Group], requests: Sequence[Request]
) -> Verified:
    """Check every byte that was read, and that no other byte was written."""
    by_name = {group.name: group for group in groups}
    right = wrong = 0
    for plane in geometry.planes:
        view = blocks_view(cells, start, plane)
        group = by_name[plane.group]
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
    return Verified(right, wrong, int(len(cells) - np.count_nonzero(cells == POISON)))
