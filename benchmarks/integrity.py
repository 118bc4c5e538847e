"""What integrity mode costs: reads with and without it, and the sums at the source, against memcpy."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

import kvferry
from benchmarks.tables import Table, seconds
from benchmarks.transfer import BLOCK, HEAD_DIM, HEADS, LAYERS, NUM_BLOCKS, group, memory, planes
from kvferry import Blocks, Cache, Client, EngineSpec, IntegrityOptions, Interval
from kvferry._clock import now

REPEATS = 5
BLOCKS = 256
FULL = IntegrityOptions("full", patience=30)
SAMPLED = IntegrityOptions("sampled", rate=0.1, patience=30)


def run_source(address: str, options: IntegrityOptions, pipe: Connection) -> None:
    """The source engine. Publishes and sums, for one read, whenever it is told to; answers the seconds for the sums."""
    with Client(address, integrity=options) as client:
        cache, _ = _cache(client, "source", serve=True)
        pipe.send("ready")
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            blocks = {"full": Blocks(list(range(BLOCKS)))}
            publication = cache.session.publish("benchmark", blocks, checksums=options.mode != "off")
            began = now()
            cache.checksum(publication.number, blocks).result(60)
            pipe.send((publication.reference, now() - began))


def _cache(client: Client, engine_id: str, *, serve: bool) -> tuple[Cache, np.ndarray]:
    cells, region = memory(HEADS)
    spec = EngineSpec(engine_id, (group(),))
    held = planes(Interval(0, HEADS), region.base)
    return client.register_cache(spec, planes=held, regions=[region], keep=cells, serve=serve), cells


@contextmanager
def _source(address: str, options: IntegrityOptions) -> Iterator[Callable[[], tuple[str, float]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_source, args=(address, options, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()

    def publish() -> tuple[str, float]:
        ours.send("publish")
        reference, took = ours.recv()
        return str(reference), float(took)

    yield publish
    ours.close()
    process.join(20)


def run() -> Table:
    """Measure."""
    rows = []
    size = 2 * LAYERS * BLOCKS * BLOCK * HEADS * HEAD_DIM * 2
    cells = np.ones(2 * LAYERS * NUM_BLOCKS * BLOCK * HEADS * HEAD_DIM * 2, np.uint8)
    into = np.ones(size, np.uint8)
    copy = seconds(lambda: np.copyto(into, cells[:size]), REPEATS)
    for label, options in (("off", IntegrityOptions()), ("sampled, 10 %", SAMPLED), ("full", FULL)):
        reads, sums, verified = [], [], 0
        with (
            kvferry.serve("127.0.0.1:0", unix="") as server,
            _source(server.address, options) as publish,
            Client(server.address, integrity=options) as client,
        ):
            cache, _ = _cache(client, "destination", serve=False)
            for _ in range(REPEATS + 1):
                reference, took = publish()
                began = time.perf_counter()
                result = cache.read(reference, {"full": Blocks(list(range(BLOCKS)))}).result(60)
                reads.append(time.perf_counter() - began)
                sums.append(took)
                verified = result.verification.verified if result.verification else 0
        read, summed = sorted(reads[1:])[REPEATS // 2], sorted(sums[1:])[REPEATS // 2]
        made = f"{summed / copy:.2f}" if options.mode != "off" else "-"
        rows.append((label, f"{read / copy:.2f}", made, f"{verified:,}"))
    title = f"Integrity mode: {size >> 20} MiB, times in memcpy of the same bytes"
    return Table(title, ("mode", "a whole read", "sums at the source", "sums compared"), rows)
