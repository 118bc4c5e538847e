"""Two engines on this machine, whose ranks are processes: one publishes requests, the other reads them over NIXL, and
every byte is checked. `make demo` runs it, over two geometry files or Llama-3-8B from TP4 to TP2.

`Engine` plays a scheduler, and `run_rank` each of its workers: a process with its own memory, which gets commands from
the scheduler over a pipe. `expected` stands for the KV cache that a model computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

import kvferry
from kvferry import Blocks, EngineGeometry, EngineSpec, Group, GroupKind, KvferryError, Plane, RankGeometry, Release
from kvferry.errors import Incompatible, InvalidField
from kvferry.geometry.file import load, parse, rank_bytes, rebase
from kvferry.host_memory import HostMemory
from kvferry.planner import plan_read, to_text

Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]

POISON = 0xA5
"""Content of destination memory before a read, and afterwards wherever the read must not write."""

ANSWER_TIMEOUT = 300.0
RELEASE_TIMEOUT = 30.0
MEMCPY_BYTES = 256 << 20

LLAMA_3_8B = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "attention": "gqa"}
DEFAULT = {"pp_size": 1, "layout": "HND", "block_size": 16, "num_blocks": 1 << 20, "model": LLAMA_3_8B}


def demo(
    source: Annotated[
        Path | None, typer.Option(help="Geometry file of the engine that is read from. Default: Llama-3-8B, TP4.")
    ] = None,
    destination: Annotated[
        Path | None, typer.Option(help="Geometry file of the engine that reads. Default: Llama-3-8B, TP2.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests moved at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each request, about.")] = 512,
    ucx_tls: Annotated[str, typer.Option(help="UCX transports, e.g. tcp. Default: what UCX chooses.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the block tables.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Move requests between two engines on this machine.

    It starts two node servers, and the ranks of two engines as processes of their own, moves several requests from one
    engine to the other over real NIXL, and verifies every byte. It leaves nothing behind: no process, socket or memory.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    try:
        theirs, mine = (
            _geometry(file, {**DEFAULT, "engine_id": name, "tp_size": size}, requests, tokens)
            for file, name, size in ((source, "prefill", 4), (destination, "decode", 2))
        )
        for role, engine in (("source", theirs), ("destination", mine)):
            layers = len({plane.layer for _, plane in engine.planes()})
            groups = ", ".join(f"{g.name}: {g.num_blocks} blocks of {g.block_tokens or 1}" for g in engine.groups)
            console.print(f"{role:<12} {engine.engine_id}: {len(engine.ranks)} ranks, {layers} layers; {groups}")
        plans = [plan_read(theirs, mine, rank.rank) for rank in mine.ranks]
        # Names in geometry files may be anything, and must not control the terminal.
        console.print("", *map(printable, to_text(plans).splitlines()), "", sep="\n", markup=False)
        outcome = run_demo(
            theirs, mine, requests=requests, tokens=tokens, ucx_tls=ucx_tls, seed=seed, phase=console.print
        )
    except KvferryError as error:
        lines = error.lines if isinstance(error, Incompatible) else (error.message,)
        head = ["the destination cannot read the source's cache:"] if isinstance(error, Incompatible) else []
        typer.echo("kvferry demo: " + "\n  ".join([*head, *map(printable, lines)]), err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("kvferry demo: interrupted; everything it started has ended", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(outcome), indent=2))
    else:
        _conclude(console, outcome)
    for failure in outcome.failures:
        typer.echo(f"kvferry demo: {failure}", err=True)
    if outcome.failures:
        raise typer.Exit(1)


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _geometry(file: Path | None, document: dict[str, Any], requests: int, tokens: int) -> EngineGeometry:
    """Return a geometry with only as many blocks as the requests need: a real engine's cache may not fit this
    machine."""
    if file is not None:
        load(file)  # says what is wrong with the file as it stands
        document = json.loads(file.read_text())
    groups = document.get("groups", [])
    smallest = min((part["block_size"] for part in (document, *groups) if "block_size" in part), default=1)
    # Also for the small first request, with two spare blocks for each request, and a null block. All groups may share
    # one pool.
    most = ((requests + 1) * (-(-tokens // smallest) + 2) + 1) * max(1, len(groups))
    for part in (document, *groups):
        # A null block at the old end moves to the new end.
        for name, limit in (("num_blocks", most), ("null_block", most - 1)):
            if name in part:
                part[name] = min(part[name], limit)
    return parse(document)


def _conclude(console: Console, outcome: DemoOutcome) -> None:
    reads = [read for rank in outcome.ranks for read in rank.reads]
    descriptors, pieces = sum(read.descriptors for read in reads), sum(read.pieces for read in reads)
    right, wrong, strayed = (
        sum(getattr(rank, name) for rank in outcome.ranks) for name in ("right", "wrong", "strayed")
    )
    rate, memcpy = outcome.bytes / outcome.seconds, outcome.memcpy_bytes_per_second
    for line in (
        f"first read   {outcome.first_contact_seconds:.2f} s with handshakes, agents and connections; not "
        "counted below",
        f"moved        {outcome.bytes / 2**20:,.0f} MiB in {len(reads)} reads, {outcome.seconds:.2f} s",
        f"descriptors  {descriptors:,} for {pieces:,} contiguous pieces",
        f"speed        {rate / 1e9:.2f} GB/s, {100 * rate / memcpy:.0f} % of one thread's memcpy ({memcpy / 1e9:.2f} "
        "GB/s in the same run)",
        f"verified     {right:,} bytes right, {wrong:,} wrong, {strayed:,} written where nobody asked",
        f"released     {outcome.released} publications: {', '.join(outcome.released_as) or 'none'}",
    ):
        console.print(line)
    if not outcome.failures:
        console.print("Every byte is right.", style="bold green")


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
    """The result of the demonstration, with the fields of `--json`."""

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
    step = min(tokens, math.lcm(*(group.block_tokens for group in groups if group.block_tokens)))
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
    """A request of `tokens` tokens, with its blocks in each engine, and the reference that a router would carry."""

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


def blocks_view(memory: Bytes, start: int, plane: Plane) -> Bytes:
    """Return a plane as ``uint8[num_blocks, pages, page_tokens, units, state_bytes]`` over the rank's memory, which is
    ``uint8[n]``; `start` is the address of its first byte."""
    shape = (plane.num_blocks, plane.pages, plane.page_tokens, len(plane.units), plane.state_bytes)
    strides = (plane.block_stride, plane.page_stride, plane.token_stride, plane.unit_stride, 1)
    return np.lib.stride_tricks.as_strided(memory[plane.base - start :], shape, strides)


def held_states(plane: Plane, block: int) -> npt.NDArray[np.int64]:
    """Return which states of the request its block `block` holds in this plane, ``int64[block_states]``."""
    shard = plane.token_shard
    turn = int(shard.interleave / plane.tokens_per_state) if shard.count > 1 else 1
    index = np.arange(block * plane.block_states, (block + 1) * plane.block_states)
    if shard.count == 1:
        return index
    return (index // turn * shard.count + shard.index) * turn + index % turn


def expected(request: str, plane: Plane, blocks: range) -> Bytes:
    """Return the content of a request's blocks, ``uint8[blocks, pages, page_tokens, units, state_bytes]``."""
    seed = np.uint64(zlib.crc32(f"{request}/{plane.layer}/{plane.component}".encode()))
    states = np.concatenate([held_states(plane, block) for block in blocks]).astype(np.uint64)
    units = np.arange(plane.units.begin, plane.units.end, dtype=np.uint64)
    words = np.arange(-(-plane.state_bytes // 8), dtype=np.uint64)
    place = (states[:, None] << np.uint64(32)) ^ (units << np.uint64(16)) ^ (seed << np.uint64(8))
    mixed = _mix(_mix(place)[:, :, None] + words)
    shape = (len(blocks), plane.pages, plane.page_tokens, len(units), plane.state_bytes)
    return np.ascontiguousarray(mixed).view(np.uint8)[..., : plane.state_bytes].reshape(shape)


def wanted(plane: Plane, group: Group, tokens: int, blocks: range, held: int = 0) -> tuple[Flags, Flags]:
    """Return which states of the blocks a read of `tokens` tokens must write, and which it may write. The first `held`
    tokens are already there, and are not read.

    Both are ``bool[blocks, pages, page_tokens]``, and differ in granules that `tokens` or a window's start divides.
    """
    shape = (len(blocks), plane.pages, plane.page_tokens)
    if group.kind is GroupKind.STATE:
        everything = np.ones(shape, np.bool_)
        return everything, everything
    states = np.concatenate([held_states(plane, block) for block in blocks]).reshape(shape)
    first_token = max(held, tokens - group.window_tokens) if group.kind is GroupKind.WINDOW else held
    begin, end = int(first_token / plane.tokens_per_state), math.ceil(tokens / plane.tokens_per_state)
    step = plane.token_granule * plane.token_shard.count
    must = (states >= begin) & (states < end)
    may = (states >= begin // step * step) & (states < -(-end // step) * step)
    return must, may


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply one round of splitmix64, after which neighbours differ in every byte."""
    with np.errstate(over="ignore"):
        words = words * np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(32))


if __name__ == "__main__":
    # gRPC's library would log a failed handshake, which errors explain.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(demo)
    app()
