"""The course of the demonstration: one engine publishes, the other reads, every byte is checked."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np

import kvferry
from kvferry import Blocks, EngineGeometry, EngineSession, EngineSpec, Group, GroupKind, KvferryError, Release
from kvferry._demo.rank import Moved, Request, run_rank
from kvferry.errors import InvalidField

ANSWER_TIMEOUT = 300.0
RELEASE_TIMEOUT = 30.0
MEMCPY_BYTES = 256 << 20


class DemoFailed(KvferryError):
    """A process of the demonstration died or stopped answering."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What a destination rank read, and how many bytes of its memory are right, wrong, and written unasked."""

    rank: int
    reads: list[Moved]
    right: int
    wrong: int
    strayed: int


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What the demonstration did; the fields are those of `kvferry demo --json`.

    Attributes:
        first_contact_seconds: of one small read before the others: handshakes, agents, connections.
        seconds: from the first read's start to the last one's end, the slowest rank's.
        bytes: moved in this time.
        memcpy_bytes_per_second: of one thread in the same run.
        released: how many publications the source was told of as released.
        released_as: with which outcomes.
        ranks: by destination rank.
        failures: what went wrong, a sentence each.
    """

    first_contact_seconds: float
    seconds: float
    bytes: int
    memcpy_bytes_per_second: float
    released: int
    released_as: list[str]
    ranks: list[RankOutcome]
    failures: list[str]


class Engine:
    """An engine of the demonstration: a session, and a process for each rank. A context manager, which ends them.

    Args:
        address: its node server.
        geometry: its ranks.
        role: source or destination; part of its engine_id, because both files may give the same one.
        ucx_tls: UCX transports to use; empty: UCX's choice.
    """

    def __init__(self, address: str, geometry: EngineGeometry, role: str, ucx_tls: str) -> None:
        name = f"{geometry.engine_id}-{role}"
        spec = EngineSpec(name, geometry.groups, len(geometry.ranks), geometry.identity, geometry.partial)
        with ExitStack() as stack:
            self.session: EngineSession = stack.enter_context(kvferry.Client(address)).open_engine(spec)
            self._ranks: list[tuple[Any, Any]] = []
            stack.callback(self._end)
            # Node servers run in this process: it must not fork.
            context = multiprocessing.get_context("spawn")
            for rank in geometry.ranks:
                pipe, theirs = context.Pipe()
                job = address, spec, rank, str(self.session.token), role == "source", ucx_tls, theirs
                process = context.Process(target=run_rank, args=job, daemon=True)
                process.start()
                theirs.close()
                self._ranks.append((process, pipe))
            self._stack = stack.pop_all()

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
        """Have all ranks do something at once, and return their answers."""
        for _, pipe in self._ranks:
            pipe.send((command, requests))
        return self.answers()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        for _, pipe in self._ranks:
            # Upon which the rank ends.
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
    """Move `requests` requests of about `tokens` tokens each from one engine to the other; `phase` is told how it goes.

    Raises:
        InvalidField: the caches are too small for so many tokens.
        DemoFailed: a process died.
    """
    wanted = _requests(source, destination, requests, tokens, seed)
    phase("starting node servers and ranks")
    # A demonstration that ends early waits for nothing.
    with kvferry.serve(drain=0.0) as there, kvferry.serve(drain=0.0) as here, ExitStack() as engines:
        prefill = engines.enter_context(Engine(there.address, source, "source", ucx_tls))
        decode = engines.enter_context(Engine(here.address, destination, "destination", ucx_tls))
        prefill.answers(), decode.answers()
        phase("filling the source with a pattern")
        prefill.tell("fill", wanted)
        memcpy_rate = _memcpy_rate()
        phase("first read: making connections")
        # A router would carry the references.
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
    ranks = [
        RankOutcome(rank, reads, *found) for rank, ((_, reads), found) in enumerate(zip(moved, verified, strict=True))
    ]
    failures = [f"rank {of.rank}, {read.request}: {read.error}" for of in ranks for read in of.reads if read.error]
    failures += [
        f"rank {of.rank}: {of.wrong} bytes are wrong, {of.strayed} were written unasked"
        for of in ranks
        if of.wrong or of.strayed
    ]
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
    """Make a small request for the first contact, and `count` requests of different lengths whose blocks lie scattered
    in both caches."""
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
    """Take the blocks of a request from those that are free."""
    first, count = 0, 1
    if group.kind is not GroupKind.STATE:
        first = max(0, tokens - group.window_tokens) if group.kind is GroupKind.WINDOW else 0
        first = first // group.block_tokens * group.block_tokens
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
