"""Random geometry, load, faults, and load under faults until the time is up, while a hostile peer attacks the same node
servers. Every byte that a read calls good is looked at; memory, file descriptors and threads of every process are
watched. Prints a table in Markdown at the end.

python -m tests.soak --minutes 60 --seed 7
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from kvferry import NixlOptions
from kvferry._clock import now
from tests.soak.gauges import Gauges, left, left_here
from tests.soak.hostile_peer import Hostile
from tests.soak.summary import Summary
from tests.support import etcd, pairwise
from tests.support.faults.fault_world import World
from tests.support.faults.interruptions import Storm
from tests.support.faults.load import serve_mixed
from tests.support.faults.playing import nothing_left, play, works
from tests.support.faults.scenarios import MACHINES, PROCESSES, WITHOUT_A_LEASE
from tests.support.geometry_cases import CASES, Case
from tests.support.held_ranks import hold_sources, move
from tests.support.node_servers import NodeServerProcess

OVER = 0.15
"""In so many of its rounds, a world ends that works."""
STORM = 5
"""Faults of a round of load under faults."""
SAMPLE_EVERY = 1.0
"""Seconds between two looks at the processes in such a round."""
FENCE = NixlOptions().fence_time
"""Seconds, as installed: the end of an agent that still reads may end a source that is stopped (docs/nixl.md)."""


class Soak:
    """Rounds of one kind or another, and what came of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._folder = folder
        self._random = random.Random(seed)
        self._worlds = 0
        self._geometry_worlds = 0
        self._world: World | None = None
        self._hostile: Hostile | None = None
        self._seed = seed
        self._directory, self._members = "", list[etcd.Etcd]()
        self.gauges = Gauges()
        self.summary = Summary()

    def run(self, until: float) -> None:
        """One round after the other."""
        if missing := etcd.lacking():
            print(f"soak: without a directory: {', '.join(missing)} is not installed", flush=True)
        else:
            self._directory, self._members = etcd.cluster(self._folder / "etcd")
        try:
            while now() < until:
                try:
                    with self._geometries() as geometry:
                        self._play(geometry, until)
                        self._end_world()
                except RuntimeError:
                    self._failed(f"geometry:\n{traceback.format_exc()}")
        finally:
            for member in self._members:
                member.stop()
        self._hung("soak", left_here())

    def _play(self, geometry: Callable[[], None], until: float) -> None:
        """Rounds until the time is up, or one of geometry has failed: its processes may still have to answer it."""
        rounds: list[tuple[str, Callable[[], None]]] = [
            ("geometry", geometry),
            ("load", self._load),
            ("fault", self._fault),
            ("load under faults", self._storm),
        ]
        sound = True
        while sound and now() < until:
            kind, play_round = self._random.choices(rounds, (5, 2, 3, 3))[0]
            try:
                play_round()
            except Exception:
                played = sum(count for what, count in self.counts.items() if what.endswith(" rounds"))
                self._failed(f"round {played}, {kind}:\n{traceback.format_exc()}")
                self._end_world()
                sound = kind != "geometry"
            self.counts[f"{kind} rounds"] += 1
            if self._world is not None and self._world.sound:
                self._sample()

    def _sample(self) -> None:
        world = self._world
        if world is None:
            return
        processes = {f"node server {index}": node.pid for index, node in enumerate(world.nodes)}
        for index, process in enumerate(world.source.processes):
            processes[f"source, rank {index}"] = process.pid
        processes |= {"destination": world.reader.process.pid}
        self.gauges.sample(processes)

    def _hung(self, name: str, threads: list[str]) -> None:
        self.counts["hung threads"] += len(threads)
        for thread in threads:
            self._failed(f"{name}: thread {thread} should be gone")

    def _failed(self, failure: str) -> None:
        print(failure, flush=True)
        self.failures.append(failure)

    @contextmanager
    def _geometries(self) -> Iterator[Callable[[], None]]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._geometry_worlds += 1
        folder = self._folder / f"geometry-{self._geometry_worlds}"
        with (
            NodeServerProcess(folder / "source", tcp=True) as source,
            NodeServerProcess(folder / "destination") as destination,
        ):
            homes = source.address, destination.address
            process = context.Process(target=hold_sources, args=(homes[0], theirs), daemon=True)
            process.start()
            with Hostile(homes, self._seed) as hostile:

                def move_once() -> None:
                    self._move(ours, homes)
                    self.gauges.sample(
                        {"geometry: source's home": source.pid, "geometry: its reader's": destination.pid}
                    )
                    self.gauges.sample({"geometry: sources": process.pid or 0, "soak": os.getpid()}, bounded=False)

                yield move_once
            self.counts["hostile calls"] += hostile.calls
            ours.close()
            process.join(20)

    def _move(self, sources: Connection, homes: tuple[str, str]) -> None:
        case = self._case()
        self.counts[f"geometry: {case.ucx_tls or 'UCX default'}, {case.path}"] += 1
        try:
            move(sources, homes, case)
        except Exception as error:
            raise RuntimeError(f"{case}") from error

    def _case(self) -> Case:
        choose = self._random
        if choose.random() < 0.3:
            case = choose.choice(list(CASES.values()))
        else:
            row = choose.choice(pairwise.rows(choose.randrange(1 << 16)))
            case = Case(*pairwise.documents(row), *pairwise.tokens(row), path=row["path"])
        return replace(case, ucx_tls=choose.choice(["", "tcp"]))

    def _load(self) -> None:
        world = self._healthy()
        serve_mixed(world, 200)
        nothing_left(world)
        self.counts["requests under load"] += 200

    def _storm(self) -> None:
        world = self._healthy()
        storm = Storm(world, self._random, STORM, members=self._members if world.listed else ())
        looked = now()
        try:
            for _ in storm.play():
                if now() > looked + SAMPLE_EVERY:
                    looked = now()
                    self._sample()
        finally:
            self.summary.add(storm)

    def _fault(self) -> None:
        world = self._healthy()
        scenario = self._random.choice(WITHOUT_A_LEASE if world.optimistic else (*PROCESSES, *MACHINES))
        self.counts[f"fault: {scenario.row.fault}, {scenario.row.moment}"] += 1
        try:
            play(world, scenario)
        except Exception as error:
            raise RuntimeError(f"{scenario.name}") from error

    def _healthy(self) -> World:
        if self._world is not None and (not self._world.sound or self._random.random() < OVER):
            self._end_world()
        if self._world is None:
            self._worlds += 1
            self._world = self._new_world().ready()
            # A scenario stops a source in the middle of a read, and not while a reading agent first meets it.
            works(self._world)
            addresses = [self._world.home.listen, self._world.node.address]
            self._hostile = Hostile(addresses, self._seed + self._worlds)
        return self._world

    def _new_world(self) -> World:
        # In turns, which begin with the seed: worlds whose short reads take no lease, worlds with a relay, two reading
        # agents, or both, and worlds with a directory.
        number = self._worlds + self._seed
        relayed, agents = number // 2 % 2 == 1, 1 + number // 2 % 3 % 2
        listed = bool(self._members) and number % 3 == 0
        for what, is_so in (("a relay", relayed), ("two reading agents", agents == 2), ("a directory", listed)):
            self.counts[f"worlds with {what}"] += is_so
        return World(
            self._folder / f"world-{self._worlds}",
            optimistic=number % 2 == 1,
            relayed=relayed,
            directory=self._directory if listed else "",
            reading_agents=agents,
            fence_time=FENCE,
        )

    def _end_world(self) -> None:
        world, self._world = self._world, None
        hostile, self._hostile = self._hostile, None
        if hostile is not None:
            try:
                hostile.close()
            except RuntimeError as error:
                self._failed(str(error))
            self.counts["hostile calls"] += hostile.calls
        if world is not None:
            if world.sound:
                for process in (*world.source.processes, world.reader.process):
                    self._hung(world.source.engine_id, left(process.call("held").names))
            world.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    arguments = parser.parse_args()
    print(f"soak: {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-soak-") as folder:
        soak = Soak(Path(folder), arguments.seed)
        soak.run(now() + 60 * arguments.minutes)
    for what, count in sorted(soak.counts.items()):
        print(f"{count:8}  {what}")
    for line in soak.gauges.lines:
        print(line)
    grown = [problem for line in soak.gauges.lines for problem in line.problems()]
    print("\n".join(grown))
    soak.failures += grown
    print(
        "\n".join(soak.summary.lines(arguments.seed, arguments.minutes, soak.counts, soak.failures, soak.gauges.lines))
    )
    print(f"soak: {len(soak.failures)} failures; seed {arguments.seed}")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
