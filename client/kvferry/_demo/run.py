"""The course of the demonstration: one engine publishes, the other reads, every byte is checked.

`Engine` plays a scheduler, and `run_rank` each of its workers: a process with its own memory, which gets commands from
the scheduler over a pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import lcm
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import kvferry
from kvferry import Blocks, EngineGeometry, EngineSpec, Group, GroupKind, KvferryError, RankGeometry, Release
from kvferry._demo.pattern import POISON, blocks_view, expected, wanted
from kvferry.errors import InvalidField
from kvferry.geometry.file import rank_bytes, rebase
from kvferry.host_memory import HostMemory

ANSWER_TIMEOUT = 300.0
RELEASE_TIMEOUT = 30.0
MEMCPY_BYTES = 256 << 20


class DemoFailed(KvferryError):
    """A process of the demonstration died or stopped answering."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The reads of a destination rank, and how many bytes of its memory are right, wrong, and written unasked."""

    rank: int
    reads: list[Moved]
    right: int
    wrong: int
    strayed: int


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The result of the demonstration, with the fields of `kvferry demo --json`."""

    first_contact_seconds: float
    """Of one small read before all others, with handshakes, agents and connections."""
    seconds: float
    """From the start of the first read to the end of the last, on the slowest rank."""
    bytes: int
    """Moved in `seconds`."""
    memcpy_bytes_per_second: float
    """Of one thread in the same run."""
    released: int
    """Publications that were reported to the source as released."""
    released_as: list[str]
    """Names of their outcomes."""
    ranks: list[RankOutcome]
    failures: list[str]
    """A sentence for each."""


class Engine:
    """An engine of the demonstration: a session, and a process for each rank. `stack` ends both."""

    def __init__(self, stack: ExitStack, address: str, geometry: EngineGeometry, role: str, ucx_tls: str) -> None:
        # Both geometry files may have the same engine_id.
        name = f"{geometry.engine_id}-{role}"
        spec = EngineSpec(name, geometry.groups, len(geometry.ranks), geometry.identity, geometry.partial)
        self.session = stack.enter_context(kvferry.Client(address)).open_engine(spec)
        self._ranks: list[tuple[Any, Any]] = []
        stack.callback(self._end)
        # Node servers run in this process, so it must not fork.
        context = multiprocessing.get_context("spawn")
        for rank in geometry.ranks:
            pipe, theirs = context.Pipe()
            job = address, spec, rank, str(self.session.token), role == "source", ucx_tls, theirs
            process = context.Process(target=run_rank, args=job, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, pipe))

    def answers(self) -> list[Any]:
        """Return the next answer of each rank. Raises what a rank raised, or `DemoFailed`."""
        found = []
        for number, (process, pipe) in enumerate(self._ranks):
            if not pipe.poll(ANSWER_TIMEOUT):
                raise DemoFailed(f"rank {number} did not answer within {ANSWER_TIMEOUT:.0f} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                process.join()
                raise DemoFailed(f"rank {number} ended with exit code {process.exitcode}") from None
            if isinstance(found[-1], KvferryError):
                raise found[-1]
        return found

    def tell(self, command: str, requests: Sequence[Request]) -> list[Any]:
        for _, pipe in self._ranks:
            pipe.send((command, requests))
        return self.answers()

    def _end(self) -> None:
        for _, pipe in self._ranks:
            # This ends the rank.
            pipe.close()
        for process, _ in self._ranks:
            process.join(10.0)
            process.kill()
            process.join()


def run_demo(
    source: EngineGeometry,
    destination: EngineGeometry,
    *,
    requests: int,
    tokens: int,
    ucx_tls: str,
    seed: int,
    phase: Callable[[str], None],
) -> DemoOutcome:
    """Move `requests` requests of about `tokens` tokens each from one engine to the other; `phase` is called with the
    name of each step. Raises `InvalidField` if the caches are too small, `DemoFailed` if a process died."""
    wanted = _requests(source, destination, requests, tokens, seed)
    phase("starting node servers and ranks")
    # Without a drain: a demonstration that ends early does not wait.
    with kvferry.serve(drain=0.0) as there, kvferry.serve(drain=0.0) as here, ExitStack() as engines:
        prefill = Engine(engines, there.address, source, "source", ucx_tls)
        decode = Engine(engines, here.address, destination, "destination", ucx_tls)
        prefill.answers(), decode.answers()
        phase("filling the source with a pattern")
        prefill.tell("fill", wanted)
        memcpy_rate = _memcpy_rate()
        phase("first read: making connections")
        # In production a router carries the references.
        published = [
            replace(request, reference=prefill.session.publish(request.name, request.source).reference)
            for request in wanted
        ]
        first = decode.tell("read", published[:1])
        phase("moving")
        moved = decode.tell("read", published[1:])
        phase("verifying every byte")
        verified = decode.tell("verify", published)
        releases: list[Release] = []
        until = time.monotonic() + RELEASE_TIMEOUT
        while len(releases) < len(published) and time.monotonic() < until:
            releases += prefill.session.released(timeout=1.0)
    ranks, failures = [], []
    for rank, ((_, reads), (right, wrong, strayed)) in enumerate(zip(moved, verified, strict=True)):
        ranks.append(RankOutcome(rank, reads, right, wrong, strayed))
        failures += [f"rank {rank}, {read.request}: {read.error}" for read in reads if read.error]
        if wrong or strayed:
            failures.append(f"rank {rank}: {wrong} bytes are wrong, {strayed} were written unasked")
    return DemoOutcome(
        max(seconds for seconds, _ in first),
        max(seconds for seconds, _ in moved),
        sum(read.bytes for of in ranks for read in of.reads),
        memcpy_rate,
        len(releases),
        sorted({release.outcome.name for release in releases}),
        ranks,
        failures,
    )


def _requests(source: EngineGeometry, destination: EngineGeometry, count: int, tokens: int, seed: int) -> list[Request]:
    """Make a small request for the first contact, and `count` requests of different lengths, with blocks scattered over
    both caches."""
    random = np.random.default_rng(seed)
    free: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
    for engine, pools in zip((source, destination), free, strict=True):
        for group in engine.groups:
            ids = [block for block in range(group.num_blocks) if block != group.null_block]
            pools.setdefault(group.pool or group.name, random.permutation(ids).tolist())
    groups = (*source.groups, *destination.groups)
    step = min(tokens, lcm(*(group.block_tokens for group in groups if group.block_tokens)))
    requests = []
    for index in range(count + 1):
        length = tokens - int(random.integers(0, step)) if index else step
        theirs, mine = (
            {group.name: _blocks(group, pools[group.pool or group.name], length) for group in engine.groups}
            for engine, pools in zip((source, destination), free, strict=True)
        )
        requests.append(Request(f"request-{index}", length, theirs, mine))
    return requests


def _blocks(group: Group, free: list[int], tokens: int) -> Blocks:
    first, count = 0, 1
    if group.kind is not GroupKind.STATE:
        window = group.window_tokens if group.kind is GroupKind.WINDOW else tokens
        first = max(0, tokens - window) // group.block_tokens * group.block_tokens
        count = -(-(tokens - first) // group.block_tokens)
    if count > len(free):
        problem = f"enough blocks in group {group.name!r}; give fewer --requests or --tokens, or a larger cache"
        raise InvalidField("num_blocks", group.num_blocks, problem)
    ids = [free.pop() for _ in range(count)]
    if group.kind is GroupKind.STATE:
        return Blocks(ids, state_token=tokens)
    return Blocks(ids, first_token=first, end_token=tokens)


def _memcpy_rate() -> float:
    """Measure the bytes per second of one thread that copies memory which is already mapped."""
    source, destination = np.ones(MEMCPY_BYTES, np.uint8), np.ones(MEMCPY_BYTES, np.uint8)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(destination, source)
        times.append(time.perf_counter() - began)
    return MEMCPY_BYTES / min(times)


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    tokens: int
    source: dict[str, Blocks]
    destination: dict[str, Blocks]
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """One rank's read of one request, or its error; see `kvferry.ReadResult`."""

    request: str
    source_ranks: tuple[int, ...] = ()
    bytes: int = 0
    descriptors: int = 0
    pieces: int = 0
    error: str = ""


def run_rank(
    address: str, spec: EngineSpec, planned: RankGeometry, token: str, serve: bool, ucx_tls: str, pipe: Connection
) -> None:
    """Run the process of a rank, which answers each command of the scheduler's pipe, and ends when the pipe ends. Its
    planes are those of the geometry file, moved to the addresses of its memory."""
    # Ctrl-C reaches the whole foreground group, but the scheduler ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The scheduler may be gone at any moment, as when another rank cannot start.
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            memory = HostMemory(rank_bytes(planned))
            geometry = rebase(planned, memory.region.base)
            with kvferry.Client(address, options=kvferry.NixlOptions(ucx_tls=ucx_tls)) as client:
                cache = client.register_cache(
                    spec,
                    geometry.rank,
                    planes=geometry.planes,
                    regions=[memory.region],
                    # The geometry has the shard of each rank.
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
        except KvferryError as error:
            pipe.send(error)


class _Rank:
    def __init__(self, cache: kvferry.Cache, memory: HostMemory, geometry: RankGeometry) -> None:
        self._cache, self._memory = cache, memory.array
        self._groups = {group.name: group for group in cache.spec.groups}
        self._planes = [(plane, blocks_view(self._memory, memory.region.base, plane)) for plane in geometry.planes]
        self._memory[:] = POISON

    def fill(self, requests: Sequence[Request]) -> None:
        for plane, view in self._planes:
            for request in requests:
                blocks = request.source[plane.group]
                view[blocks.ids] = expected(request.name, plane, _numbers(self._groups[plane.group], blocks))

    def read(self, requests: Sequence[Request]) -> tuple[float, list[Moved]]:
        """Read all requests at once. Returns the seconds until the last one's end, and the result of each."""
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
        """Check every byte of the memory. Returns how many are right, wrong, and written unasked."""
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
        # With poison over all that was read, every byte must be poison.
        return right, wrong, int(len(self._memory) - np.count_nonzero(self._memory == POISON))


def _numbers(group: Group, blocks: Blocks) -> range:
    """Return the indices of these blocks within the request."""
    first = 0 if group.kind is GroupKind.STATE else blocks.first_token // group.block_tokens
    return range(first, first + len(blocks.ids))
