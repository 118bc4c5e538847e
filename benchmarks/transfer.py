"""How fast blocks move: a whole read, its data plane alone, and raw NIXL with the same descriptors, against memcpy of
the same bytes."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

import kvferry
from benchmarks.tables import Table, seconds
from kvferry import (
    Blocks,
    Cache,
    Client,
    EngineSpec,
    Group,
    Interval,
    MemoryKind,
    MemoryRegion,
    NixlOptions,
    PathRule,
    Plane,
)
from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._transport.nixl_agent import HandleState, ReadHandle, ReadingAgent
from kvferry._transport.transport import TransferPart, Transport
from kvferry.geometry import EngineGeometry
from kvferry.v1 import kv_transfer_pb2 as pb

LAYERS, HEADS, HEAD_DIM, BLOCK, ELEMENT = 16, 8, 128, 16, 2
NUM_BLOCKS = 512
REPEATS = 5


@dataclass(frozen=True)
class Case:
    """One line of the table: blocks in runs of `run`, `heads` of 8 read."""

    label: str
    blocks: int
    run: int
    heads: int = HEADS


CASES = (
    Case("1 run of 256 blocks", 256, 256),
    Case("runs of 16", 256, 16),
    Case("runs of 4", 256, 4),
    Case("scattered, 32 KiB pieces", 256, 1),
    Case("half the heads (TP1 to TP2), 16 KiB pieces", 256, 1, 4),
    Case("one head (TP1 to TP8), 4 KiB pieces", 256, 1, 1),
    Case("small request, 4 blocks scattered", 4, 1),
)


def planes(units: Interval, base: int) -> tuple[Plane, ...]:
    """Llama-3-8B's layout, HND, key and value apart."""
    state = HEAD_DIM * ELEMENT
    size = NUM_BLOCKS * BLOCK * len(units) * state
    return tuple(
        Plane(
            layer=f"layers.{index // 2}",
            component=("key", "value")[index % 2],
            group="full",
            format="plain",
            dtype="bfloat16",
            memory_kind=MemoryKind.DRAM,
            device=0,
            base=base + index * size,
            num_blocks=NUM_BLOCKS,
            block_stride=BLOCK * len(units) * state,
            page_tokens=BLOCK,
            page_stride=0,
            block_states=BLOCK,
            unit_stride=BLOCK * state,
            token_stride=state,
            state_bytes=state,
            axis_size=HEADS,
            units=units,
        )
        for index in range(2 * LAYERS)
    )


def memory(heads: int) -> tuple[npt.NDArray[np.uint8], MemoryRegion]:
    """Mapped, touched memory for a rank of so many heads; huge pages where the system has them, as engines should."""
    size = 2 * LAYERS * NUM_BLOCKS * BLOCK * heads * HEAD_DIM * ELEMENT
    mapped = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    cells = np.frombuffer(mapped, np.uint8)
    cells[:] = 1
    return cells, MemoryRegion(MemoryKind.DRAM, 0, cells.ctypes.data, size)


def group() -> Group:
    """The one group of the benchmark."""
    return Group("full", block_tokens=BLOCK, num_blocks=NUM_BLOCKS)


def run_source(address: str, ucx_tls: str, pipe: Connection) -> None:
    """The source engine, one rank, in a process of its own. Publishes what it is sent, for as many reads as asked."""
    cells, region = memory(HEADS)
    with Client(address, options=NixlOptions(ucx_tls=ucx_tls)) as client:
        cache = client.register_cache(
            EngineSpec("source", (group(),)),
            planes=planes(Interval(0, HEADS), region.base),
            regions=[region],
            keep=cells,
        )
        session = cache.session
        pipe.send("ready")
        while True:
            try:
                ids, reads = pipe.recv()
            except EOFError:
                return
            pipe.send(session.publish("benchmark", {"full": Blocks(ids)}, expected_reads=reads).reference)


@contextmanager
def source(address: str, ucx_tls: str) -> Iterator[Connection]:
    """The source process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_source, args=(address, ucx_tls, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    yield ours
    ours.close()
    process.join(20)


def ids_in_runs(count: int, run: int, seed: int) -> npt.NDArray[np.int32]:
    """`count` different blocks in runs of `run`, the runs in random order and never touching."""
    starts = np.random.default_rng(seed).permutation(NUM_BLOCKS // (run + (run < NUM_BLOCKS // 2)))[: count // run]
    return np.concatenate([np.arange(run) + start * (run + (run < NUM_BLOCKS // 2)) for start in starts]).astype(
        np.int32
    )


def handshaken(address: str, cache: Cache, reference: str) -> SourceEngine:
    """The source as the data plane needs it, to drive that without the rest."""
    reader = pb.EngineRef(engine_id=cache.spec.engine_id, incarnation=b"b" * 16)
    geometry = EngineGeometry(cache.spec.engine_id, cache.spec.groups, (cache.rank,))
    peers = SourceEngines(cache.spec, reader, 0, lambda _: geometry, PathRule(), lambda *_: None, lambda _: None)
    return peers.get(Control(address, None), "source", b"", reference, now() + 10)


def measure(case: Case, pipe: Connection, cache: Cache, source: SourceEngine, options: NixlOptions) -> list[str]:
    """One line of the table."""
    peer, plan = source.agents[0], source.plan
    theirs, mine = ids_in_runs(case.blocks, case.run, 1), ids_in_runs(case.blocks, case.run, 2)
    expansion = plan.expand({"full": Blocks(theirs)}, {"full": Blocks(mine)})
    (descriptors,) = expansion.sources
    total = expansion.total_bytes
    left, right = np.ones(total, np.uint8), np.ones(total, np.uint8)
    copied = seconds(lambda: np.copyto(left, right), REPEATS)

    agent = ReadingAgent("benchmark/raw", plan_regions(cache), options)
    agent.add_peer(peer)
    settle(agent.warm_up(peer.name))

    def raw() -> None:
        for part in descriptors.descriptors:
            handle = agent.make(peer.name, part)
            settle(handle)

    raw_time = seconds(raw, REPEATS)
    agent.destroy()

    transport = Transport(plan_regions(cache), options)
    parts = [TransferPart(peer, descriptors.descriptors)]
    moved = seconds(lambda: transport.start(parts, deadline=None, label="benchmark").wait(60), REPEATS)
    transport.close(10)

    pipe.send((theirs, REPEATS + 1))
    reference = pipe.recv()
    read = seconds(lambda: cache.read(reference, {"full": Blocks(mine)}).result(60), REPEATS)
    return [
        case.label,
        f"{total / 2**20:.0f} MiB",
        f"{expansion.descriptors:,}",
        f"{copied / raw_time:.2f}",
        f"{copied / moved:.2f}",
        f"{copied / read:.2f}",
        f"{raw_time / moved:.2f}",
        f"{raw_time / read:.2f}",
    ]


def settle(handle: ReadHandle) -> None:
    """Post a handle, wait for it busily, release it."""
    state = handle.post()
    while state is HandleState.MOVING:
        state = handle.check()
    if state is not HandleState.DONE:
        raise RuntimeError("raw NIXL failed")
    handle.release()


def plan_regions(cache: Cache) -> tuple[MemoryRegion, ...]:
    """The one region of the destination."""
    first, last = min(p.extent[0] for p in cache.rank.planes), max(p.extent[1] for p in cache.rank.planes)
    return (MemoryRegion(MemoryKind.DRAM, 0, first, last - first),)


def run(ucx_tls: str = "") -> Table:
    """Measure every case over one UCX transport; empty: UCX's choice, CMA on one host."""
    options = NixlOptions(ucx_tls=ucx_tls)
    rows = []
    with kvferry.serve() as server, source(server.address, ucx_tls) as pipe:
        for heads in sorted({case.heads for case in CASES}, reverse=True):
            cells, region = memory(heads)
            spec = EngineSpec(f"destination-{heads}", (group(),))
            with Client(server.address, options=options) as client:
                cache = client.register_cache(
                    spec, planes=planes(Interval(0, heads), region.base), regions=[region], keep=cells, serve=False
                )
                pipe.send(([0], 1))
                peer = handshaken(server.address, cache, pipe.recv())
                rows += [measure(case, pipe, cache, peer, options) for case in CASES if case.heads == heads]
    name = f"UCX over {ucx_tls}" if ucx_tls else "UCX's choice (CMA on one host)"
    return Table(
        f"Moving blocks, {name}: times as shares of memcpy's speed (1.00 = as fast as one thread's memcpy)",
        (
            "request",
            "bytes",
            "descriptors",
            "raw NIXL",
            "kvferry data plane",
            "kvferry whole read",
            "data plane / raw",
            "whole read / raw",
        ),
        rows,
    )
