"""Short pieces read directly against whole rows through staging memory, and what the cost model chose of the two."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.caches import FACTOR, POISON, Ids, Words, WrongBytes
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved, median
from kvferry import (
    Blocks,
    Costs,
    EngineGeometry,
    Group,
    Interval,
    MemoryKind,
    NixlOptions,
    PathRule,
    Plane,
)
from kvferry._clock import now
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.calibration import measure
from kvferry._transport.nixl_agent import AgentInfo, ServingAgent
from kvferry._transport.transport import TransferPart, Transport
from kvferry.geometry import RankGeometry
from kvferry.host_memory import HostMemory
from kvferry.planner import Path, ReadPlan, plan_read

TOKENS, HEADS = 8, 8
SERVED = 32 << 20
"""Bytes that the source serves; every case reads rows of half of them."""
RUNS = (256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
HEADS_READ = (8, 4, 1)
REPEATS = 5


@dataclass(frozen=True)
class Case:
    """Pieces of `run` bytes: `heads` of 8, token by token at the source, head by head at the destination."""

    run: int
    heads: int

    @property
    def blocks(self) -> int:
        """Blocks on either side."""
        return SERVED // (TOKENS * HEADS * self.run)

    @property
    def label(self) -> str:
        """In a measure's name."""
        return f"pieces of {self.run:,} B, {self.heads} of {HEADS} heads"

    def plane(self, base: int, heads: int, *, heads_first: bool) -> Plane:
        """One plane of `heads` heads."""
        tokens, units = (self.run, self.run * TOKENS) if heads_first else (self.run * heads, self.run)
        return Plane(
            layer="0",
            component="key",
            group="full",
            format="plain",
            dtype="bfloat16",
            memory_kind=MemoryKind.DRAM,
            device=0,
            base=base,
            num_blocks=self.blocks,
            block_stride=self.run * heads * TOKENS,
            page_tokens=TOKENS,
            page_stride=0,
            block_states=TOKENS,
            unit_stride=units,
            token_stride=tokens,
            state_bytes=self.run,
            axis_size=HEADS,
            units=Interval(0, heads),
        )

    def plan(self, source: int, destination: int, rule: PathRule) -> ReadPlan:
        """The plan between two addresses."""
        groups = (Group("full", block_tokens=TOKENS, num_blocks=self.blocks),)
        theirs = RankGeometry(0, (self.plane(source, HEADS, heads_first=False),))
        mine = RankGeometry(0, (self.plane(destination, self.heads, heads_first=True),))
        return plan_read(EngineGeometry("p", groups, (theirs,)), EngineGeometry("d", groups, (mine,)), 0, rule=rule)


class Pieces:
    """The memory of one side, in huge pages.

    Attributes:
        cells: the bytes.
        region: for NIXL.
    """

    def __init__(self) -> None:
        memory = HostMemory(SERVED)
        self.cells, self.region = memory.array, memory.region
        self._keep = memory

    def fill(self) -> None:
        """Write what the source holds: words that say where they lie."""
        self.cells.view(np.uint64)[:] = _content()

    def poison(self) -> None:
        """Write what no source holds."""
        self.cells.view(np.uint64)[:] = POISON

    def check(self, case: Case, theirs: Ids, mine: Ids) -> None:
        """Compare what was read, head by head, with the source, token by token.

        Raises:
            WrongBytes: they differ.
        """
        source = _content().reshape(case.blocks, TOKENS, HEADS, case.run // 8)
        size = case.blocks * case.heads * TOKENS * case.run
        found = self.cells[:size].view(np.uint64).reshape(case.blocks, case.heads, TOKENS, case.run // 8)
        if not np.array_equal(found[mine], source[theirs][:, :, : case.heads].transpose(0, 2, 1, 3)):
            raise WrongBytes(f"{case}: the bytes read are not those of the source")


def _content() -> Words:
    return np.arange(1, 1 + SERVED // 8, dtype=np.uint64) * FACTOR


def serve(ucx_tls: str, pipe: Connection) -> None:
    """The source, in a process of its own, until the pipe is closed."""
    memory = Pieces()
    memory.fill()
    agent = ServingAgent(f"benchmark/{secrets.token_hex(6)}", [memory.region], NixlOptions(ucx_tls=ucx_tls))
    pipe.send(agent.info)
    try:
        pipe.recv()
    except EOFError:
        return


@contextmanager
def source(ucx_tls: str) -> Iterator[AgentInfo]:
    """The source process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(ucx_tls, theirs), daemon=True)
    process.start()
    theirs.close()
    yield ours.recv()
    ours.close()
    process.join(20)


def move(transport: Transport, parts: list[TransferPart]) -> None:
    """One read; raises the error that it ended with."""
    transfer = transport.start(parts, deadline=None, label="benchmark")
    if not transfer.wait(60):
        raise TimeoutError("a read takes more than a minute")
    if transfer.error is not None:
        raise transfer.error


def measure_case(
    case: Case, info: AgentInfo, memory: Pieces, transport: Transport, costs: Costs, repeats: int
) -> list[Measure]:
    """One cell: both paths, and the chosen one in the faster one's time."""
    random = np.random.default_rng(1)
    theirs, mine = (random.permutation(case.blocks)[: max(1, case.blocks // 2)].astype(np.int32) for _ in range(2))
    actions = {}
    plans = {path: case.plan(info.regions[0].base, memory.region.base, PathRule(path, costs)) for path in (*Path, None)}
    for path in Path:
        expansion = plans[path].expand({"full": Blocks(theirs)}, {"full": Blocks(mine)})
        parts = [(info, of) for of in expansion.sources]
        actions[path.value] = Action(
            partial(move, transport, parts), prepare=memory.poison, verify=partial(memory.check, case, theirs, mine)
        )
    times = interleaved(actions, repeats)
    (chosen,) = plans[None].paths
    faster = min(times, key=lambda path: median(times[path]))
    names = {path: f"{path}, {case.label}" for path in times}
    return [
        *(Measure(names[path], "s", times[path]) for path in times),
        Measure(f"chosen, {case.label}", "s", times[chosen.path.value], names[faster]),
    ]


def measured(name: str, title: str, ucx_tls: str, effort: Effort) -> Topic:
    """Every run length over one UCX transport; empty: UCX's choice."""
    memory = Pieces()
    measures: list[Measure] = []
    transport = Transport(RankMemory([memory.region], keep=memory), NixlOptions(ucx_tls=ucx_tls))
    with source(ucx_tls) as info:
        pool = transport.pool(MemoryKind.DRAM, 0)
        costs = measure(transport, info, pool, now() + 10) or Costs()
        measures += [
            Measure.of("measured cost of a descriptor", "s", costs.descriptor),
            Measure.of("measured cost of 1 MiB read directly", "s", costs.byte * (1 << 20)),
            Measure.of("measured cost of 1 MiB read into staging memory", "s", costs.staged_byte * (1 << 20)),
            Measure.of("measured cost of 1 MiB copied", "s", costs.copied_byte * (1 << 20)),
            Measure.of("measured cost of a run copied", "s", costs.cell),
        ]
        for heads in HEADS_READ[: effort.size(len(HEADS_READ), 1)]:
            for size in RUNS if not effort.smoke else RUNS[5:6]:
                measures += measure_case(Case(size, heads), info, memory, transport, costs, effort.repeats(REPEATS))
        transport.close()
    return Topic(name, title, tuple(measures))


def run(effort: Effort = FULL) -> Topic:
    """Measure over CMA."""
    return measured("paths", "Short pieces on one host: read directly, and through staging memory", "", effort)
