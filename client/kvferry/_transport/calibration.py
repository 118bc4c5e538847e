"""Measures the constants of the cost model (`kvferry.planner.path_choice`).

It takes some milliseconds, once for each host that small pieces are read from: a few short and long reads of the peer's
memory into staging memory, and a few copies within staging memory.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from kvferry._clock import now
from kvferry._memory.access import StillCopying
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.staging_pool import StagingPool
from kvferry._transport.transport import TransferPart, Transport
from kvferry.geometry.model import MemoryRegion
from kvferry.planner.descriptors import MemoryPair, RawDescriptors
from kvferry.planner.path_choice import Costs
from kvferry.planner.staged_read import Copy

logger = logging.getLogger(__name__)

TIMES = 5
"""Measurements of each kind; the fastest counts, since any disturbance makes one slower."""

SHORT_BYTES = 256
SHORT_COUNT = 512
CLUSTER = 16
LONG_BYTES = 64 << 10
CELLS = (64, 1024)
COLUMNS = 32


def measure(transport: Transport, peer: AgentInfo, pool: StagingPool, deadline: float) -> Costs | None:
    """Measure the constants for reads from one peer; None if that is not possible now. Waits; called on the thread of a
    read."""
    slot = pool.borrow()
    if slot is None:
        return None
    region = max(peer.regions, key=lambda region: region.length)
    # Bytes that were read before are in a processor's cache, and would seem faster: no byte is read twice.
    count = min(pool.slot_bytes, region.length // (2 * TIMES)) // LONG_BYTES
    if count == 0:
        pool.release(slot)
        return None
    try:
        copied = _copies(pool, slot)
    except Exception as error:
        logger.exception("copies in staging memory were not measured")
        if not isinstance(error, StillCopying):
            pool.release(slot)
        return None
    kinds = [(1, 64), (min(SHORT_COUNT, count * LONG_BYTES // (2 * SHORT_BYTES)), SHORT_BYTES), (count, LONG_BYTES)]
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    for turn in range(TIMES):
        for kind in kinds:
            part = TransferPart(peer, (_reads(region, pool, slot, *kind, turn),), spaces=(pool.space,))
            try:
                transfer = transport.start([part], deadline=deadline, label="measuring")
            except Exception:
                # Nothing was posted.
                pool.release(slot)
                raise
            began = now()
            if not transfer.wait(max(0.0, deadline - began)) or transfer.error is not None:
                transfer.cancel()
                # The read that follows will meet the same error, and report it.
                transfer.add_quiet_callback(lambda _: pool.release(slot))
                return None
            times[kind].append((transfer.ended_at or now()) - began)
    pool.release(slot)
    empty, short, long = (min(times[kind]) for kind in kinds)
    # Both kinds of read cost by number and by bytes: two equations.
    (_, _), (many, few_bytes), (few, many_bytes) = kinds
    short, long = max(0.0, short - empty), max(0.0, long - empty)
    byte = max(1e-12, (long / few - short / many) / (many_bytes - few_bytes))
    descriptor = max(1e-8, short / many - few_bytes * byte)
    return replace(copied, descriptor=descriptor, byte=byte)


def _reads(region: MemoryRegion, pool: StagingPool, slot: int, count: int, size: int, turn: int) -> RawDescriptors:
    """`count` reads of `size` bytes each, spread over a region; of other bytes each turn."""
    here = pool.space.region
    # Short pieces come in clusters, as those of one block do.
    cluster = CLUSTER if size == SHORT_BYTES else 1
    group, within = np.divmod(np.arange(count, dtype=np.int64), cluster)
    step = region.length // (TIMES * (int(group[-1]) + 1))
    source = (region.base + (group * TIMES + turn) * step + within * 2 * size).astype(np.uint64)
    destination = slot + np.arange(count, dtype=np.uint64) * np.uint64(size)
    memory = MemoryPair(region.memory_kind, region.device, here.memory_kind, here.device)
    return RawDescriptors(memory, source, destination, np.full(count, size, np.uint64))


def _copies(pool: StagingPool, slot: int) -> Costs:
    """The cost of a permutation, measured with runs of two lengths."""
    half = pool.slot_bytes // 2
    others = []
    while (other := pool.borrow()) is not None:
        others.append(other)
    try:
        # Into as many other slots as are free, in turn, because an engine's blocks are in no processor's cache either.
        found = [
            (cell, min(_copied(pool, slot, others or [slot + half], cell) for _ in range(TIMES))) for cell in CELLS
        ]
    finally:
        for other in others:
            pool.release(other)
    (short, per_run), (long, per_long_run) = found
    copied_byte = max(0.0, (per_long_run - per_run) / (long - short))
    return Costs(cell=max(1e-10, per_run - short * copied_byte), copied_byte=copied_byte)


def _copied(pool: StagingPool, slot: int, targets: list[int], cell: int) -> float:
    """Seconds per run of `cell` bytes, copied from a slot to the beginning of each target."""
    rows = max(1, pool.slot_bytes // 2 // (cell * COLUMNS))
    copies = [
        # Columns of `rows` runs each become rows of `COLUMNS`: no two runs stay together.
        Copy(
            source=slot,
            source_stride=cell,
            places=np.arange(rows, dtype=np.int64),
            destination=target,
            destination_stride=COLUMNS * cell,
            ids=np.arange(rows, dtype=np.int64),
            axes=((COLUMNS, rows * cell, cell),),
            cell=cell,
        )
        for target in targets
    ]
    began = now()
    pool.space.copy(copies)
    return (now() - began) / (len(copies) * rows * COLUMNS)
