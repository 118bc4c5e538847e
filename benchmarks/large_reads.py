"""Reads of many bytes on one host (CMA): in long runs and in scattered pieces, with one and two reading agents, against
memcpy and against raw NIXL's best program for the same descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import raw_nixl
from benchmarks.caches import CacheMemory, Ids, Layout, blocks_in_runs
from benchmarks.destinations import PortEngine, port_engine
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved, median
from benchmarks.nixl_time import NixlTime, nixl_time
from benchmarks.node_server import node_server
from benchmarks.sources import Source, source
from kvferry import NixlOptions
from kvferry.host_memory import HostMemory

REPEATS = 5
LONG = Layout()
AGENTS = (1, 2)
ONE_AGENT = "1 reading agent"
SMALL_PAGES = "runs of 1 MiB, source in pages of 4 KiB"


@dataclass(frozen=True, slots=True)
class Case:
    """A request: so many blocks in runs of `run`.

    Attributes:
        label: e.g. "runs of 8 MiB".
        layout: of both sides.
        blocks: how many.
        run: how many are neighbours on both sides.
        huge: whether the source's memory is in huge pages; the destination's is.
    """

    label: str
    layout: Layout
    blocks: int
    run: int
    huge: bool = True

    @property
    def size(self) -> int:
        """Bytes of the request."""
        return self.blocks * self.layout.block_bytes()

    def smaller(self) -> Case:
        """The same in small, for the smoke."""
        layout = replace(self.layout, layers=1, num_blocks=16 * self.run)
        return replace(self, layout=layout, blocks=4 * self.run)

    def ids(self) -> tuple[Ids, Ids]:
        """Blocks at the source and at the destination."""
        seeds = (1, 2)
        theirs, mine = (blocks_in_runs(self.layout, self.blocks, self.run, seed) for seed in seeds)
        return theirs, mine


CASES = (
    Case("runs of 8 MiB", LONG, 256, 256),
    Case("runs of 1 MiB", LONG, 256, 32),
    Case(SMALL_PAGES, LONG, 256, 32, huge=False),
    Case("pieces of 64 KiB", Layout(head_dim=256, layers=8), 128, 1),
    Case("pieces of 32 KiB", Layout(), 128, 1),
    Case("pieces of 16 KiB", Layout(head_dim=64, layers=32), 128, 1),
)


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    measures: list[Measure] = []
    options = [NixlOptions(reading_agents=agents) for agents in AGENTS]
    with node_server() as server:
        for case in CASES[-1:] if effort.smoke else CASES:
            chosen = case.smaller() if effort.smoke else case
            with (
                source(server.address, chosen.layout, huge=chosen.huge, raw=[NixlOptions()]) as made,
                ExitStack() as engines,
            ):
                readers = {
                    f"{agents} reading agent{'s' * (agents > 1)}": engines.enter_context(
                        port_engine(server.address, chosen.layout, options=given)
                    )
                    for agents, given in zip(AGENTS, options, strict=True)
                }
                measures += compare(chosen, made, readers, {"raw NIXL": NixlOptions()}, effort.repeats(REPEATS))
    return Topic("large_reads", "Many bytes on one host, huge pages on both sides", tuple(measures))


def compare(
    case: Case,
    made: Source,
    readers: Mapping[str, PortEngine],
    raw: Mapping[str, NixlOptions],
    repeats: int,
) -> list[Measure]:
    """Time one request by every reader and every raw program, in turns with memcpy; all verified.

    Args:
        case: the request.
        made: its source, whose `raw` are for `raw`'s options, in order.
        readers: engines by label.
        raw: options of raw NIXL by label. Each runs all of `raw_nixl.programs`, of which the fastest counts.
        repeats: rounds.
    """
    theirs, mine = case.ids()
    actions = {"memcpy": memcpy(case.size)}
    into = next(iter(readers.values())).memory
    names: dict[str, list[str]] = {}
    for (label, options), peer in zip(raw.items(), made.raw, strict=True):
        found = raw_actions(options, peer, into, theirs, mine)
        names[label] = [f"{label}, {name}" for name in found]
        actions |= {f"{label}, {name}": action for name, action in found.items()}
    moves: dict[str, list[Move]] = {label: [] for label in readers}
    with nixl_time() as nixl:
        for label, engine in readers.items():
            actions[label] = read(engine, made, theirs, mine, nixl, moves[label])
        times = interleaved(actions, repeats)

    copied = f"memcpy, {case.label}"
    measures = [Measure.of(copied, "s", times["memcpy"])]
    best = ""
    for label, of_label in names.items():
        fastest = min(of_label, key=lambda name: median(times[name]))
        name = f"{label}, {case.label}"
        measures.append(Measure.of(name, "s", times[fastest], copied))
        best = name if not best or median(times[fastest]) < median(_samples(measures, best)) else best
    for label in readers:
        measures.append(Measure.of(f"whole read, {label}, {case.label}", "s", times[label], copied))
        counted = moves[label][-repeats:]
        measures.append(Measure.of(f"moving, {label}, {case.label}", "s", [move.whole for move in counted], best))
        if label == ONE_AGENT:
            within = f"of it within NIXL, {label}, {case.label}"
            measures.append(Measure.of(within, "s", [move.nixl for move in counted], best))
    return measures


def raw_actions(
    options: NixlOptions, peer: raw_nixl.RawPeer, into: CacheMemory, theirs: Ids, mine: Ids
) -> dict[str, Action]:
    """Every way in which raw NIXL reads a request; verified."""
    agent = raw_nixl.RawReader(into.region, options)
    agent.add(peer, into.region.base)
    there, here = raw_nixl.descriptors(into.layout, peer.base, into, theirs, mine)
    return {
        name: Action(program, prepare=lambda: into.poison(mine), verify=lambda: into.check(mine, theirs))
        for name, program in raw_nixl.programs(agent, peer.name, there, here).items()
    }


@dataclass(frozen=True, slots=True)
class Move:
    """What moving the bytes of one read took, in seconds.

    Attributes:
        whole: as the read's end says.
        nixl: in NIXL's posts and checks; of all reading threads, added up.
    """

    whole: float
    nixl: float


def read(engine: PortEngine, made: Source, theirs: Ids, mine: Ids, nixl: NixlTime, moves: list[Move]) -> Action:
    """A read through the ports; what moving its bytes took is added to `moves`."""
    references: list[str] = []

    def prepare() -> None:
        engine.memory.poison(mine)
        references.append(made.publish(theirs.tolist()).reference)

    def run() -> None:
        before = nixl.seconds
        end = engine.read(references.pop(), mine)
        moves.append(Move(end.times.move, nixl.seconds - before))

    return Action(run, prepare=prepare, verify=lambda: engine.memory.check(mine, theirs))


def memcpy(size: int) -> Action:
    """One thread's memcpy of as many bytes, from huge pages to huge pages."""
    left, right = HostMemory(size).array, HostMemory(size).array
    left[:] = 7

    def prepare() -> None:
        right[:] = 0

    def verify() -> None:
        if not (right == 7).all():
            raise AssertionError("memcpy copied something else")

    return Action(lambda: np.copyto(right, left), prepare=prepare, verify=verify)


def _samples(measures: Sequence[Measure], name: str) -> tuple[float, ...]:
    return next(measure.samples for measure in measures if measure.name == name)
