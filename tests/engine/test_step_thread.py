"""R11: the thread of an engine's step makes no call and touches nothing of NIXL, whatever its peers do."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Interval, MemoryKind, MemoryRegion, MissReason, Prompt
from kvferry.engine import ReadEnd, SchedulerPort, Tails, WorkerPort
from tests.engine.port_engines import PortEngine
from tests.support.caches import Model, shards
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import stop, until

pytestmark = pytest.mark.slow

MODEL = Model(layers=8, heads=8, head_dim=128, block_tokens=64, num_blocks=256)
"""Half a GiB."""

HALF = MODEL.num_blocks // 2
STEPS = 2000
LONG = Prompt([7] * 200_000)


class Watched:
    """Runs something on a thread of its own, and notes what of gRPC and NIXL is entered there."""

    def __init__(self) -> None:
        self.entered: set[str] = set()

    def run(self, step: Callable[[], None]) -> None:
        failures: list[BaseException] = []

        def on_thread() -> None:
            sys.setprofile(self._on_event)
            try:
                step()
            except BaseException as error:
                failures.append(error)
            finally:
                sys.setprofile(None)

        thread = threading.Thread(target=on_thread, name="step")
        # What the collector finds on this thread is garbage of other tests, calls of gRPC among it.
        gc.disable()
        try:
            thread.start()
            thread.join()
        finally:
            gc.enable()
        if failures:
            raise failures[0]

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if "/grpc/" in file or "/nixl" in file or file.endswith("/kvferry/_transport/nixl_agent.py"):
                self.entered.add(f"{file}:{frame.f_code.co_name}")
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            module = getattr(argument, "__module__", None) or type(owner).__module__
            if module.startswith(("grpc", "nixl")):
                self.entered.add(f"{module}.{argument.__qualname__}")


class Here:
    """A destination of one rank, scheduler and worker in the test's process."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)
        self.spec = EngineSpec(unique_id("here"), (MODEL.group(),), 1, {"model": "tiny"})
        self.scheduler = SchedulerPort(self.client, self.spec)
        self.worker = WorkerPort(self.client, self.spec)
        units = Interval(0, MODEL.heads)
        self.memory = np.zeros(MODEL.rank_bytes(units), np.uint8)
        base = self.memory.ctypes.data
        regions = [MemoryRegion(MemoryKind.DRAM, 0, base, self.memory.nbytes)]
        self.worker.register(planes=MODEL.planes(units, base), regions=regions, keep=self.memory)
        self.ended: dict[str, ReadEnd] = {}
        self.steps = self.missed = 0

    def step(self) -> None:
        """All that an engine asks after a step."""
        for read_id in self.scheduler.cancels():
            self.worker.cancel(read_id)
        self.scheduler.collect(self.worker.finished())
        for end in self.scheduler.finished().reads:
            self.ended[end.request_id] = end
        self.scheduler.released()
        for question in self.scheduler.questions():
            self.scheduler.miss(question, MissReason.NOT_CACHED)
            self.missed += 1
        self.scheduler.stats()
        self.steps += 1

    def read(self, request_id: str, ids: range) -> bool:
        """Attach and start it if it is granted."""
        if self.scheduler.granted(request_id) is None:
            return False
        # All into the same blocks: the bytes do not matter here.
        grant = self.scheduler.attach(request_id, {"full": Blocks(ids)}, allow_overlap=True)
        self.worker.start(grant, tails=Tails.ZERO)
        return True


@pytest.fixture
def here(tmp_path: Path) -> Iterator[tuple[Here, PortEngine, NodeServerProcess]]:
    with NodeServerProcess(tmp_path / "p", tcp=True) as source, NodeServerProcess(tmp_path / "d") as destination:
        engine = PortEngine(source.address, MODEL, shards(MODEL.heads, 1), tmp_path).ready()
        made = Here(destination.address)
        yield made, engine, source
        made.worker.close()
        made.scheduler.close()
        made.client.close()
        engine.close()


def test_a_scheduler_step_while_gigabytes_move(here: tuple[Here, PortEngine, NodeServerProcess]) -> None:
    made, source, _ = here
    publications = [
        source.scheduler.publish(f"big-{index}", {"full": Blocks(range(HALF))}).reference for index in range(8)
    ]
    watched = Watched()

    def engine_loop() -> None:
        waiting = {f"mine-{index}": publication for index, publication in enumerate(publications)}
        for request, reference in waiting.items():
            made.scheduler.acquire(request, reference)
        while len(made.ended) < len(publications):
            for request in tuple(waiting):
                if made.read(request, range(HALF, 2 * HALF)):
                    del waiting[request]
            made.step()

    watched.run(engine_loop)
    assert [end.error for end in made.ended.values()] == [None] * 8
    assert sum(end.bytes for end in made.ended.values()) == 2 << 30
    # To answer questions is an engine's step, too.
    source.scheduler.ask("theirs", made.scheduler.engine_reference, LONG)
    watched.run(lambda: until(lambda: made.step() or bool(made.missed)))  # type: ignore[func-returns-value]
    # Publishing, declining and cancelling as well.
    offered = made.scheduler.publish("offered", {"full": Blocks([1])})
    watched.run(lambda: made.scheduler.abort(offered))
    watched.run(lambda: made.scheduler.decline(publications[0]))
    assert watched.entered == set()
    assert made.steps > 8


def test_a_scheduler_step_while_a_peer_is_stopped(here: tuple[Here, PortEngine, NodeServerProcess]) -> None:
    made, source, server = here
    references = [
        # The second is not complete, so that it waits for its home.
        source.scheduler.publish(f"stopped-{index}", {"full": Blocks(range(HALF))}, last=index != 1).reference
        for index in range(3)
    ]
    made.scheduler.acquire("granted", references[0])
    while made.scheduler.granted("granted") is None:
        made.step()
    stopped = [server.pid, source.workers[0].process.pid]
    stop(*stopped)
    watched = Watched()

    def engine_loop() -> None:
        assert made.read("granted", range(HALF))
        made.scheduler.acquire("waits", references[1])
        made.scheduler.ask("asks", source.scheduler.engine_reference, LONG)
        made.worker.warm(source.scheduler.engine_reference)
        made.scheduler.publish("mine", {"full": Blocks([HALF])})
        for _ in range(STEPS):
            made.step()
            assert made.scheduler.granted("waits") is None
        made.scheduler.decline(references[2])
        assert made.scheduler.cancel("waits")
        assert made.scheduler.cancel("asks")
        assert made.scheduler.cancel("granted")
        made.step()

    try:
        watched.run(engine_loop)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert watched.entered == set()
    assert made.steps > STEPS
    while "granted" not in made.ended:
        made.step()
    assert made.ended["granted"].error is not None
