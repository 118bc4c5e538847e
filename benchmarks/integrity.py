"""What integrity mode costs: reads with and without it, and the sums at the source, against memcpy."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.caches import CacheMemory, Ids, Layout
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved
from benchmarks.node_server import node_server
from kvferry import Blocks, Cache, Client, EngineSpec, IntegrityOptions

REPEATS = 5
LAYOUT = Layout()
BLOCKS = 256
MODES = {
    "off": IntegrityOptions(),
    "sampled, 10 %": IntegrityOptions("sampled", rate=0.1, patience=30),
    "full": IntegrityOptions("full", patience=30),
}
TIMEOUT = 60.0


def _registered(client: Client, memory: CacheMemory, *, serve: bool) -> Cache:
    spec = EngineSpec(f"integrity-{secrets.token_hex(4)}", (memory.layout.group(),))
    return client.register_cache(spec, planes=memory.planes(), regions=[memory.region], keep=memory, serve=serve)


def _run_source(address: str, layout: Layout, options: IntegrityOptions, pipe: Connection) -> None:
    """The source engine: publishes and sums, for one read, whenever it is told to; answers the seconds for the sums."""
    memory = CacheMemory(layout)
    memory.fill()
    with Client(address, integrity=options) as client:
        cache = _registered(client, memory, serve=True)
        pipe.send("ready")
        while True:
            try:
                count = pipe.recv()
            except EOFError:
                return
            blocks = {"full": Blocks(range(count))}
            publication = cache.session.publish("benchmark", blocks, checksums=options.mode != "off")
            began = time.perf_counter()
            cache.checksum(publication.number, blocks).result(TIMEOUT)
            pipe.send((publication.reference, time.perf_counter() - began))


@contextmanager
def _source(address: str, layout: Layout, options: IntegrityOptions) -> Iterator[Callable[[int], tuple[str, float]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_source, args=(address, layout, options, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()

    def publish(count: int) -> tuple[str, float]:
        ours.send(count)
        reference, took = ours.recv()
        return str(reference), float(took)

    yield publish
    ours.close()
    process.join(20)


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    layout = LAYOUT if not effort.smoke else Layout(layers=1, num_blocks=32)
    ids = np.arange(effort.size(BLOCKS, 8), dtype=np.int32)
    measures: list[Measure] = []
    with node_server() as server:
        for mode in MODES if not effort.smoke else ("full",):
            options = MODES[mode]
            with (
                _source(server.address, layout, options) as publish,
                Client(server.address, integrity=options) as client,
            ):
                memory = CacheMemory(layout)
                cache = _registered(client, memory, serve=False)
                measures += _measured(mode, publish, cache, memory, ids, effort.repeats(REPEATS))
    return Topic("integrity", "Integrity mode, 256 MiB", tuple(measures))


def _measured(
    mode: str, publish: Callable[[int], tuple[str, float]], cache: Cache, memory: CacheMemory, ids: Ids, repeats: int
) -> list[Measure]:
    size = len(ids) * memory.layout.block_bytes()
    left, right = np.ones(size, np.uint8), np.ones(size, np.uint8)
    references: list[str] = []
    sums: list[float] = []
    blocks = {"full": Blocks(ids)}

    def prepare() -> None:
        memory.poison(ids)
        reference, took = publish(len(ids))
        references.append(reference)
        sums.append(took)

    def read() -> None:
        result = cache.read(references.pop(), blocks).result(TIMEOUT)
        verified = 0 if result.verification is None else result.verification.verified
        # Of few blocks, a sample may have none.
        if (verified == 0) != (mode == "off") and not mode.startswith("sampled"):
            raise AssertionError(f"{mode}: {verified} sums were compared")

    actions = {
        "memcpy": Action(lambda: np.copyto(right, left)),
        "read": Action(read, prepare=prepare, verify=lambda: memory.check(ids, ids)),
    }
    times = interleaved(actions, repeats)
    memcpy = f"memcpy, {mode}"
    measures = [Measure(memcpy, "s", times["memcpy"]), Measure(f"whole read, {mode}", "s", times["read"], memcpy)]
    if mode != "off":
        measures.append(Measure.of(f"sums at the source, {mode}", "s", sums[-repeats:], memcpy))
    return measures
