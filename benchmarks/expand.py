"""What turning a request's block ids into descriptors costs: against the number of pieces, against a copy of the same
arrays, and against NIXL's own making of a transfer from them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.caches import ELEMENT, Ids, Layout
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved
from kvferry import Blocks, EngineGeometry, RankGeometry
from kvferry._transport import nixl_binding
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from kvferry.planner.descriptors import Descriptors
from kvferry.planner.expansion import Expansion

PLANES = 64
HEADS = 8
STATE_BYTES = 4
BLOCKS = 8192
"""The blocks of the aims: 131,072 tokens at 16 per block."""
REPEATS = 9


def engine(
    engine_id: str, ranks: int = 1, *, planes: int = PLANES, block_tokens: int = 16, num_blocks: int = 1, base: int = 0
) -> EngineGeometry:
    """Key and value apart, heads first, `HEADS` divided over the ranks; small states, since nothing is moved."""
    layout = Layout(planes // 2, HEADS, STATE_BYTES // ELEMENT, block_tokens, num_blocks)
    held = HEADS // ranks
    made = (RankGeometry(rank, layout.planes(base or (rank + 1) << 36, held, rank * held)) for rank in range(ranks))
    return EngineGeometry(engine_id, (layout.group(),), tuple(made))


@dataclass(frozen=True)
class Case:
    """A request: a plan and both sides' block ids, int32 as they come from an engine."""

    label: str
    plan: ReadPlan
    source: Ids
    destination: Ids

    def expand(self) -> Expansion:
        """The request, checks and all."""
        tokens = min(
            len(self.source) * self.plan.source.groups[0].block_tokens,
            len(self.destination) * self.plan.destination.groups[0].block_tokens,
        )
        return self.plan.expand({"full": Blocks(self.source)}, {"full": Blocks(self.destination)}, (0, tokens))

    def lists(self) -> list[Descriptors]:
        """The descriptors of all sources, those of every batch of staging memory included."""
        found: list[Descriptors] = []
        for source in self.expand().sources:
            found += source.descriptors
            for read in source.staged:
                found += [
                    batch.descriptors(1 << 40, read.lane.memory) for batch in read.batches(self.plan.rule.slot_bytes)
                ]
        return found


def scattered(count: int, num_blocks: int, seed: int) -> Ids:
    """Distinct block ids in no order."""
    return np.random.default_rng(seed).permutation(num_blocks)[:count].astype(np.int32)


def consecutive(count: int) -> Ids:
    """Block ids in one run."""
    return np.arange(count, dtype=np.int32)


def plan_of(source: EngineGeometry, destination: EngineGeometry, path: Path = Path.DIRECT) -> ReadPlan:
    """The plan of the destination's only rank."""
    return plan_read(source, destination, 0, rule=PathRule(path))


def copy_of(lists: Sequence[Descriptors]) -> Callable[[], object]:
    """A plain copy of the arrays that an expansion returns: the least that making them could cost."""
    arrays = [array for part in lists for array in vars(part).values()]
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    return lambda: [array.copy() for array in arrays]


def linear(effort: Effort) -> list[Measure]:
    """Time against the number of pieces, 10² to 10⁶."""
    measures = []
    for blocks in (2, 16, 160, 1600, 16_000)[: effort.size(5, 1)]:
        plan = plan_of(engine("p", num_blocks=2 * blocks), engine("d", num_blocks=2 * blocks))
        run = consecutive(blocks)
        case = Case("", plan, scattered(blocks, 2 * blocks, 1), scattered(blocks, 2 * blocks, 2))
        label = f"{case.expand().pieces:,} pieces"
        actions = {
            f"copying the arrays, {label}": Action(copy_of(case.lists())),
            f"expanding, {label}, one run": Action(Case("", plan, run, run).expand),
            f"expanding, {label}, scattered": Action(case.expand),
        }
        times = interleaved(actions, effort.repeats(REPEATS))
        copied, in_a_run, in_pieces = times
        measures += [
            Measure(copied, "s", times[copied]),
            Measure(in_a_run, "s", times[in_a_run]),
            Measure(in_pieces, "s", times[in_pieces], copied),
        ]
    return measures


def cases() -> list[Case]:
    """The requests of the aims, and harder ones."""
    num_blocks = 2 * BLOCKS
    equal = plan_of(engine("p", num_blocks=num_blocks), engine("d", num_blocks=num_blocks))
    four = plan_of(engine("p", 4, planes=128, num_blocks=num_blocks), engine("d", planes=128, num_blocks=num_blocks))
    recut = plan_of(
        engine("p", planes=128, block_tokens=48, num_blocks=num_blocks),
        engine("d", planes=128, block_tokens=32, num_blocks=num_blocks),
    )
    mixed, staged = (
        plan_of(
            engine("p", 4, planes=128, block_tokens=48, num_blocks=num_blocks),
            engine("d", planes=128, block_tokens=32, num_blocks=num_blocks),
            path,
        )
        for path in Path
    )
    run, theirs, mine = consecutive(BLOCKS), scattered(BLOCKS, num_blocks, 1), scattered(BLOCKS, num_blocks, 2)
    third = BLOCKS // 3
    return [
        Case("64 planes, one run (aim: 0.3 ms)", equal, run, run),
        Case("64 planes, scattered (aim: 6 ms)", equal, theirs, mine),
        Case("128 planes from four sources, scattered", four, theirs, mine),
        Case("128 planes, blocks of 48 to 32, one run", recut, run[: 2 * third], run[: 3 * third]),
        Case("128 planes, blocks of 48 to 32, scattered", recut, theirs[: 2 * third], mine[: 3 * third]),
        Case("the same from four sources", mixed, theirs[: 2 * third], mine[: 3 * third]),
        Case("and through staging memory", staged, theirs[: 2 * third], mine[: 3 * third]),
    ]


def aims(effort: Effort) -> list[Measure]:
    """8,192 blocks."""
    measures = []
    for case in cases()[: effort.size(7, 2)]:
        copied, expanded = f"copying the arrays, {case.label}", f"expanding, {case.label}"
        actions = {copied: Action(copy_of(case.lists())), expanded: Action(case.lists)}
        times = interleaved(actions, effort.repeats(REPEATS))
        measures += [Measure(copied, "s", times[copied]), Measure(expanded, "s", times[expanded], copied)]
    return measures


class _Nixl:
    """Two NIXL agents in this process, below kvferry: one has memory registered, the other makes transfers."""

    def __init__(self, size: int) -> None:
        # Before NIXL's own API, which loads the RDMA libraries in an order that ends the process with SIGSEGV.
        nixl_binding.load()
        from nixl._api import nixl_agent, nixl_agent_config

        self.memory = mmap.mmap(-1, size), mmap.mmap(-1, size)
        self.bases = tuple(int(np.frombuffer(area, np.uint8).ctypes.data) for area in self.memory)
        config = nixl_agent_config(enable_prog_thread=False)
        self.agents: tuple[Any, Any] = nixl_agent("bench-source", config), nixl_agent("bench-reader", config)
        for agent, base in zip(self.agents, self.bases, strict=True):
            agent.register_memory([(base, size, 0, "")], "DRAM")
        self.peer = self.agents[1].add_remote_agent(self.agents[0].get_agent_metadata())

    def make(self, lists: Sequence[Descriptors]) -> None:
        """Make a transfer of each list and release it: nothing is posted."""
        reader = self.agents[1]
        for part in lists:
            theirs, mine = (reader.get_xfer_descs(side, "DRAM") for side in part.lists())
            reader.initialize_xfer("READ", mine, theirs, self.peer).release()

    def prepared(self, plan: ReadPlan, source: Ids, destination: Ids) -> Callable[[], None]:
        """What makes a transfer without a planner: every plane's row, prepared once, times every block."""
        reader, lists, indices = self.agents[1], [], []
        sides = (("NIXL_INIT_AGENT", "destination", destination), (self.peer, "source", source))
        for side, name, ids in sides:
            planes = [getattr(read, name) for read in plan.reads]
            rows = [[of.base, of.bytes_per_block, 0, of.block_stride, of.num_blocks] for of in planes]
            lists.append(reader.prep_xfer_dlist(side, np.array(rows, np.uint64), "DRAM"))
            firsts = np.arange(len(planes), dtype=np.int32) * planes[0].num_blocks
            indices.append(np.add.outer(firsts, ids).astype(np.int32).ravel())

        def make() -> None:
            reader.make_prepped_xfer("READ", lists[0], indices[0], lists[1], indices[1]).release()

        return make


def against_nixl(effort: Effort) -> list[Measure]:
    """Expanding and making, against making alone."""
    num_blocks = 2 * BLOCKS
    nixl = _Nixl(PLANES * num_blocks * HEADS * 16 * STATE_BYTES)
    plan = plan_of(
        engine("p", num_blocks=num_blocks, base=nixl.bases[0]), engine("d", num_blocks=num_blocks, base=nixl.bases[1])
    )
    runs = [np.repeat(np.arange(0, num_blocks, 2 * run), run)[:BLOCKS] for run in (2, 16)]
    ids = [
        ("one run", consecutive(BLOCKS), consecutive(BLOCKS)),
        *(
            (f"runs of {run}", (starts + np.tile(np.arange(run), BLOCKS // run)).astype(np.int32), consecutive(BLOCKS))
            for run, starts in zip((2, 16), runs, strict=True)
        ),
        ("scattered", scattered(BLOCKS, num_blocks, 1), scattered(BLOCKS, num_blocks, 2)),
    ]
    measures = []
    for label, source, destination in ids:
        case = Case(label, plan, source, destination)
        made, both = f"NIXL's making, 8,192 blocks, {label}", f"expanding and making, 8,192 blocks, {label}"
        actions = {
            made: Action(nixl.prepared(plan, source, destination)),
            both: Action(lambda case=case: nixl.make(case.lists())),  # type: ignore[misc]
        }
        times = interleaved(actions, effort.repeats(REPEATS))
        measures += [Measure(made, "s", times[made]), Measure(both, "s", times[both], made)]
    return measures


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    measures = [*linear(effort), *aims(effort), *against_nixl(effort)]
    return Topic("expand", "Expanding requests into descriptors, 64 planes", tuple(measures))
