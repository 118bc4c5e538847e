"""Short pieces read directly against whole rows through staging memory, and what the cost model chose of the two."""

from __future__ import annotations

import mmap
import multiprocessing
import secrets
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from benchmarks.tables import Table, once
from kvferry import (
    Blocks,
    Costs,
    EngineGeometry,
    Group,
    Interval,
    MemoryKind,
    MemoryRegion,
    NixlOptions,
    PathRule,
    Plane,
)
from kvferry._clock import now
from kvferry._transport.calibration import measure
from kvferry._transport.nixl_agent import AgentInfo, ServingAgent
from kvferry._transport.transport import TransferPart, Transport
from kvferry.geometry import RankGeometry
from kvferry.planner import Path, ReadPlan, plan_read

TOKENS, HEADS = 8, 8
SERVED = 64 << 20
"""Bytes that the source serves; every case reads rows of half of them."""
RUNS = (256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
REPEATS = 9


@dataclass(frozen=True)
class Case:
    """Pieces of `run` bytes: `heads` of 8, token by token at the source, head by head at the destination."""

    run: int
    heads: int

    @property
    def blocks(self) -> int:
        """Blocks on either side."""
        return SERVED // (TOKENS * HEADS * self.run)

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


def mapped(size: int) -> tuple[npt.NDArray[np.uint8], MemoryRegion]:
    """Touched memory, in huge pages where the system has them."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    cells = np.frombuffer(memory, np.uint8)
    cells[:] = 1
    return cells, MemoryRegion(MemoryKind.DRAM, 0, cells.ctypes.data, size)


def serve(ucx_tls: str, pipe: Connection) -> None:
    """The source, in a process of its own, until the pipe is closed."""
    _cells, region = mapped(SERVED)
    agent = ServingAgent(f"benchmark/{secrets.token_hex(6)}", [region], NixlOptions(ucx_tls=ucx_tls))
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
    """One read."""
    transport.start(parts, deadline=None, label="benchmark").wait(60)


def measure_case(case: Case, info: AgentInfo, region: MemoryRegion, transport: Transport, costs: Costs) -> list[str]:
    """One line of the table."""
    random = np.random.default_rng(1)
    theirs, mine = (random.permutation(case.blocks)[: max(1, case.blocks // 2)] for _ in range(2))
    actions = {}
    plans = {path: case.plan(info.regions[0].base, region.base, PathRule(path, costs)) for path in (*Path, None)}
    for path in Path:
        expansion = plans[path].expand({"full": Blocks(theirs)}, {"full": Blocks(mine)})
        parts = [TransferPart.of(info, of) for of in expansion.sources]
        actions[path] = partial(move, transport, parts)
    # In turn, so that whatever else the machine does hits both.
    rounds = [{path: once(action) for path, action in actions.items()} for _ in range(1 + REPEATS)][1:]
    times = {path: statistics.median(found[path] for found in rounds) for path in Path}
    (chosen,) = plans[None].paths
    best = min(times.values())
    return [
        f"{case.run:,} B",
        f"{case.heads} of {HEADS}",
        f"{times[Path.DIRECT] / best:.2f}",
        f"{times[Path.STAGED] / best:.2f}",
        chosen.path.value,
        f"{times[chosen.path] / best:.2f}",
        f"{chosen.staged / chosen.direct * times[Path.DIRECT] / times[Path.STAGED]:.2f}" if chosen.direct else "",
    ]


def run(ucx_tls: str = "") -> Table:
    """Every run length over one UCX transport; empty: UCX's choice, CMA on one host."""
    cells, region = mapped(SERVED)
    rows = []
    transport = Transport([region], NixlOptions(ucx_tls=ucx_tls), keep=cells)
    with source(ucx_tls) as info:
        pool = transport.pool(MemoryKind.DRAM, 0)
        costs = measure(transport, info, pool, now() + 10) or Costs()
        for heads in (8, 4, 1):
            rows += [measure_case(Case(size, heads), info, region, transport, costs) for size in RUNS]
        transport.close()
    name = f"UCX over {ucx_tls}" if ucx_tls else "UCX's choice (CMA on one host)"
    constants = f"{costs.descriptor * 1e6:.1f} µs a descriptor, {costs.cell * 1e9:.0f} ns a run copied"
    return Table(
        f"Paths, {name}: times as multiples of the faster path's (constants as measured: {constants})",
        ("pieces", "heads", "direct", "staged", "chosen", "chosen / faster", "estimate / measured"),
        rows,
    )
