"""The course of the demonstration: one engine publishes, the other reads, every byte is checked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import cast

import numpy as np

from kvferry._client import Client
from kvferry._control.publications import Release
from kvferry._demo.rank import Moved, Progress, RankJob, Request, Verified
from kvferry._demo.stage import DemoFailed, DemoProcesses, RankProcess, gather
from kvferry._engine_spec import EngineSpec
from kvferry._session import EngineSession
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import EngineGeometry, Group, GroupKind
from kvferry.planner.plan import ReadPlan, plan_read

RELEASE_TIMEOUT = 30.0
MEMCPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What the demonstration did.

    Attributes:
        plans: by destination rank.
        by_source: bytes that each destination rank read from each source rank.
        moved: what each destination rank read, by rank.
        verified: what each found in its memory, by rank.
        releases: what the source was told.
        first_contact: seconds of one small read before the others: handshakes, agents, connections.
        seconds: from the first read's start to the last one's end, the slowest rank's.
        memcpy_rate: bytes per second of one thread's memcpy in the same run.
    """

    plans: dict[int, ReadPlan]
    by_source: dict[int, Counter[int]]
    moved: dict[int, list[Moved]]
    verified: dict[int, Verified]
    releases: list[Release]
    first_contact: float
    seconds: float
    memcpy_rate: float

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return sum(moved.bytes for of_rank in self.moved.values() for moved in of_rank)

    @property
    def failures(self) -> list[str]:
        """What went wrong, a sentence each; empty if nothing did."""
        found = [f"rank {r}, {m.request}: {m.error}" for r, of_rank in self.moved.items() for m in of_rank if m.error]
        for rank, verified in self.verified.items():
            if verified.wrong or verified.strayed:
                found.append(f"rank {rank}: {verified.wrong} bytes are wrong, {verified.strayed} were written unasked")
        return found


@dataclass(frozen=True, slots=True)
class DemoReporter:
    """What the run calls to report a new phase, the bytes to move, and the bytes moved so far."""

    phase: Callable[[str], None]
    total: Callable[[int], None]
    done: Callable[[int], None]


def run_demo(
    source: EngineGeometry,
    destination: EngineGeometry,
    *,
    requests: int,
    tokens: int,
    ucx_tls: str,
    seed: int,
    report: DemoReporter,
) -> DemoOutcome:
    """Move `requests` requests of about `tokens` tokens each from one engine to the other.

    Raises:
        Incompatible: the geometries cannot be read from each other.
        InvalidField: the caches are too small for so many tokens.
        DemoFailed: a process died.
    """
    plans = {rank.rank: plan_read(source, destination, rank.rank) for rank in destination.ranks}
    wanted = _requests(source, destination, requests, tokens, seed)
    with DemoProcesses() as stage:
        report.phase("starting node servers and ranks")
        homes = stage.start_server("prefill"), stage.start_server("decode")
        for home in homes:
            stage.wait_for(home)
        with Client(homes[0]) as prefill, Client(homes[1]) as decode:
            specs = _spec(source, "source"), _spec(destination, "destination")
            sessions = prefill.open_engine(specs[0]), decode.open_engine(specs[1])
            sources = _start(stage, homes[0], specs[0], source, sessions[0], serve=True, ucx_tls=ucx_tls)
            destinations = _start(stage, homes[1], specs[1], destination, sessions[1], serve=False, ucx_tls=ucx_tls)
            _all_answer([*sources, *destinations], "ready")
            report.phase("filling the source with a pattern")
            _ask(sources, "fill", wanted)
            _all_answer(sources, "filled")
            memcpy_rate = _memcpy_rate()
            report.phase("first read: making connections")
            by_source = {rank: _by_source(plan, wanted[1:]) for rank, plan in plans.items()}
            published = [
                replace(request, reference=sessions[0].publish(request.name, request.source).reference)
                for request in wanted
            ]
            first = _move(destinations, published[:1], report)
            report.phase("moving")
            report.total(sum(counter.total() for counter in by_source.values()))
            moved = _move(destinations, published[1:], report)
            report.phase("verifying every byte")
            _ask(destinations, "verify", published)
            verified = {rank.rank: cast("Verified", rank.answer()) for rank in destinations}
            releases = _releases(sessions[0], len(published))
    return DemoOutcome(plans, by_source, moved, verified, releases, _slowest(first), _slowest(moved), memcpy_rate)


def _slowest(moved: dict[int, list[Moved]]) -> float:
    return max((item.seconds for items in moved.values() for item in items), default=0.0)


def _spec(geometry: EngineGeometry, role: str) -> EngineSpec:
    """Make the spec of an engine. The role is part of its id, because both files may give the same engine_id."""
    return EngineSpec(
        f"{geometry.engine_id}-{role}", geometry.groups, len(geometry.ranks), geometry.identity, geometry.partial
    )


def _start(
    stage: DemoProcesses,
    address: str,
    spec: EngineSpec,
    geometry: EngineGeometry,
    session: EngineSession,
    *,
    serve: bool,
    ucx_tls: str,
) -> list[RankProcess]:
    token = str(session.token)
    return [stage.start_rank(RankJob(address, spec, rank, token, serve, ucx_tls)) for rank in geometry.ranks]


def _ask(ranks: list[RankProcess], command: str, argument: object) -> None:
    for rank in ranks:
        rank.pipe.send((command, argument))


def _all_answer(ranks: list[RankProcess], expected: str) -> None:
    for rank in ranks:
        answer = rank.answer()
        if answer != expected:
            raise DemoFailed(f"rank {rank.rank} answered {answer!r}, not {expected!r}")


def _move(ranks: list[RankProcess], requests: list[Request], report: DemoReporter) -> dict[int, list[Moved]]:
    done = {rank.rank: 0 for rank in ranks}

    def on_progress(progress: Progress) -> None:
        done[progress.rank] = progress.done
        report.done(sum(done.values()))

    _ask(ranks, "read", requests)
    return {rank: cast("list[Moved]", answer) for rank, answer in gather(ranks, on_progress).items()}


def _releases(session: EngineSession, count: int) -> list[Release]:
    """Wait for the release of every publication."""
    found: list[Release] = []
    until = time.monotonic() + RELEASE_TIMEOUT
    while len(found) < count and time.monotonic() < until:
        found += session.released(timeout=1.0)
    return found


def _requests(source: EngineGeometry, destination: EngineGeometry, count: int, tokens: int, seed: int) -> list[Request]:
    """Make a small request for the first contact, and `count` requests of different lengths whose blocks lie scattered
    in both caches."""
    random = np.random.default_rng(seed)
    sides = [_Allocator(engine.groups, random) for engine in (source, destination)]
    step = lcm(
        *(group.block_tokens for engine in (source, destination) for group in engine.groups if group.block_tokens)
    )
    requests = []
    for index in range(count + 1):
        length = max(1, tokens - int(random.integers(0, max(1, min(step, tokens))))) if index else min(step, tokens)
        theirs, mine = (side.allocate(length) for side in sides)
        requests.append(Request(f"request-{index}", length, theirs, mine))
    return requests


class _Allocator:
    """Allocates blocks at random, each once per pool."""

    def __init__(self, groups: tuple[Group, ...], random: np.random.Generator) -> None:
        self._groups = groups
        self._free: dict[str, list[int]] = {}
        for group in groups:
            ids = [block for block in range(group.num_blocks) if block != group.null_block]
            self._free.setdefault(group.pool or group.name, list(random.permutation(ids)))

    def allocate(self, tokens: int) -> dict[str, Blocks]:
        blocks = {}
        for group in self._groups:
            free = self._free[group.pool or group.name]
            if group.kind is GroupKind.STATE:
                first, wanted = 0, 1
            else:
                first = max(0, tokens - group.window_tokens) if group.kind is GroupKind.WINDOW else 0
                first = first // group.block_tokens * group.block_tokens
                wanted = -(-tokens // group.block_tokens) - first // group.block_tokens
            if wanted > len(free):
                expected = (
                    f"enough blocks in group {group.name!r}; give fewer --requests or --tokens, or a larger cache"
                )
                raise InvalidField("num_blocks", group.num_blocks, expected)
            ids = [free.pop() for _ in range(wanted)]
            if group.kind is GroupKind.STATE:
                blocks[group.name] = Blocks(ids, state_token=tokens)
            else:
                blocks[group.name] = Blocks(ids, first_token=first, end_token=tokens)
        return blocks


def _by_source(plan: ReadPlan, requests: list[Request]) -> Counter[int]:
    """Return the bytes that a rank will read from each source rank."""
    found: Counter[int] = Counter()
    for request in requests:
        for source in plan.expand(request.source, request.destination, (0, request.tokens)).sources:
            found[source.source_rank] += source.total_bytes
    return found


def _memcpy_rate() -> float:
    """Measure the bytes per second of one thread that copies memory which is already mapped."""
    source, destination = np.ones(MEMCPY_BYTES, np.uint8), np.ones(MEMCPY_BYTES, np.uint8)
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(destination, source)
        best = max(best, MEMCPY_BYTES / (time.perf_counter() - began))
    return best
