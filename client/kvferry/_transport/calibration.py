"""Measures the constants of the cost model (`kvferry.planner.path_choice`).

A measurement takes about a tenth of a second, once for each home from which small pieces are read: pieces of two
lengths are read into staging memory, through the whole path of a read, and runs of two lengths are copied within it. No
byte is read or written twice in a row: bytes in a processor's cache would seem faster than those of an engine. Costs of
only the first read of a process are paid before and not measured: counted, they made staging seem 8 times as dear.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from kvferry._clock import now
from kvferry._logs import Log
from kvferry._memory.access import StillCopying
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.staging_pool import StagingPool
from kvferry._transport.transport import Transport
from kvferry.planner.descriptors import Descriptors, MemoryPair
from kvferry.planner.expansion import Copy, SourceDescriptors
from kvferry.planner.path_choice import Costs
from kvferry.planner.rows import Cells

logger = Log(__name__)

TIMES = 32
"""Measurements of each kind at most, in turns. The fastest counts, since a disturbance only slows a measurement."""

ENOUGH = 0.15
"""Seconds after which no other turn begins: over a slow network a turn takes longer, and the first read waits. Making
the agent and connecting do not count, or they would leave time for one turn only."""

SHORT_BYTES = 4 << 10
LONG_BYTES = 16 << 10
"""Lengths of the pieces that are read: mostly one path becomes cheaper than the other around these lengths."""

APART = 2
"""From piece to piece, in their length: pieces with gaps between them take up to a quarter longer than pieces without,
since the processor no longer fetches ahead."""

FEW, LEAST, MOST = 4, 16, 256
"""Pieces of a small read, which is mostly waking threads, and the least and the most pieces of the others. More would
take longer and show no more."""

STAGED = 1.5
"""The cost of a byte that is read into staging memory, with its share of the batch's costs, in that of other bytes
(measured over CMA and TCP)."""

SLOTS = 4
"""Slots that are borrowed, to be read into and copied into. At least two more are left for other reads."""

CELLS = (64, SHORT_BYTES)
COLUMNS = 32
"""Runs that are copied within staging memory: bytes of a run, and the number of runs that become neighbours."""

SMALLEST = 2 * CELLS[1] * COLUMNS
"""Bytes of the smallest slot that is measured. If there is one slot only, its halves are copied."""


def measure(transport: Transport, peer: AgentInfo, pool: StagingPool, deadline: float) -> Costs | None:
    """Measure the constants for reads from one peer; None if no measurement is possible now. Waits, so only the thread
    of a read calls it. Raises `BadAgentMetadata` and `Closed` as `Transport.start`."""
    measurement = _Measurement(transport, peer, pool, deadline)
    try:
        return measurement.run() if measurement.slots else None
    except _Failed:
        return None
    finally:
        # Slots that something may still write to were taken out.
        for slot in measurement.slots:
            pool.release(slot)


class _Failed(Exception):
    """A read or a copy failed. The read that follows will meet the same error, and report it."""


class _Measurement:
    """One measurement. `slots` are those that it has borrowed; none if none is free, or the memory is too small."""

    def __init__(self, transport: Transport, peer: AgentInfo, pool: StagingPool, deadline: float) -> None:
        self._transport = transport
        self._peer = peer
        self._pool = pool
        self._deadline = deadline
        self._region = max(peer.regions, key=lambda region: region.length)
        turn = APART * (SHORT_BYTES + LONG_BYTES)
        self._pieces = min(MOST, pool.slot_bytes // LONG_BYTES, self._region.length // turn - FEW)
        self._read_before = 0
        """Bytes of the region that were read, gaps included: each read goes on behind the last."""
        self._draw = np.random.default_rng(0)
        self.slots: deque[int] = deque()
        if self._pieces >= LEAST and pool.slot_bytes >= SMALLEST:
            while len(self.slots) < min(SLOTS, max(1, pool.slots - 2)) and (slot := pool.borrow()) is not None:
                self.slots.append(slot)

    def run(self) -> Costs:
        # Costs of the first read only: making the reading agent, which takes half a second, connecting to the peer, and
        # touching new memory, which is several times as slow.
        self._read(FEW, SHORT_BYTES)
        for _ in range(len(self.slots)):
            self._copied(SHORT_BYTES)
        kinds = (FEW, SHORT_BYTES), (self._pieces, SHORT_BYTES), (self._pieces, LONG_BYTES)
        reads = dict.fromkeys(kinds, math.inf)
        copies = dict.fromkeys(CELLS, math.inf)
        until = now() + ENOUGH
        for turn in range(TIMES):
            if turn and now() > until:
                break
            for (count, run), fastest in reads.items():
                reads[count, run] = min(fastest, self._read(count, run))
            for cell, fastest in copies.items():
                copies[cell] = min(fastest, self._copied(cell))
        few, short, long = reads.values()
        # The cost of a read that does not depend on its size is nearly the same on both paths, and left out. Where it
        # seems to be most of a read, other threads of the machine were in the way.
        few = min(few, short / 2)
        per_short = (short - few) / (self._pieces - FEW)
        per_long = max(0.0, long - few + FEW * per_short) / self._pieces
        byte = (per_long - per_short) / (LONG_BYTES - SHORT_BYTES)
        # On every transport, a descriptor costs at least a quarter of such a piece: a disturbance may look otherwise.
        descriptor = max(1e-8, per_short / 4, min(per_short, per_short - SHORT_BYTES * byte))
        byte = max(1e-12, (per_long - descriptor) / LONG_BYTES)
        per_run, per_long_run = copies.values()
        copied_byte = max(0.0, (per_long_run - per_run) / (CELLS[1] - CELLS[0]))
        return Costs(
            descriptor=descriptor,
            byte=byte,
            staged_byte=STAGED * byte,
            cell=max(1e-10, per_run - CELLS[0] * copied_byte),
            copied_byte=copied_byte,
        )

    def _read(self, count: int, run: int) -> float:
        """Seconds of a read of so many pieces of `run` bytes, into the slot written longest ago."""
        there, here, size = self._region, self._pool.space.region, APART * count * run
        begin = self._read_before if self._read_before + size <= there.length else 0
        self._read_before = begin + size
        self.slots.rotate(1)
        order = self._draw.permutation(count).astype(np.uint64)
        source = order * np.uint64(APART * run) + np.uint64(there.base + begin)
        destination = np.arange(count, dtype=np.uint64) * np.uint64(run) + np.uint64(self.slots[0])
        memory = MemoryPair((there.memory_kind, there.device), (here.memory_kind, here.device))
        pieces = Descriptors(memory, source, destination, np.full(count, run, np.uint64))
        part = self._peer, SourceDescriptors(0, (pieces,))
        began = now()
        transfer = self._transport.start([part], deadline=self._deadline, label="measuring", spaces=(self._pool.space,))
        if not transfer.wait(max(0.0, self._deadline - began)) or transfer.error is not None:
            transfer.cancel()
            # Until the transfer is quiet it may write to the slot.
            slot = self.slots.popleft()
            transfer.add_quiet_callback(lambda _: self._pool.release(slot))
            raise _Failed
        return (transfer.ended_at or now()) - began

    def _copied(self, cell: int) -> float:
        """Seconds per run of `cell` bytes, copied from the slot written last into the slot written longest ago."""
        size = self._pool.slot_bytes
        source, target = self.slots[0], self.slots[-1]
        if len(self.slots) == 1:
            size //= 2
            target += size
        rows = size // (cell * COLUMNS)
        places = np.arange(rows, dtype=np.int64)
        # Columns of `rows` runs each become rows of `COLUMNS`: no two runs stay neighbours.
        columns = Cells(source, (rows, COLUMNS), (cell, rows * cell), cell)
        copy = Copy(columns, places, Cells(target, (rows, COLUMNS), (COLUMNS * cell, cell), cell), places)
        began = now()
        try:
            self._pool.space.memory.copy([copy])
        except Exception as error:
            logger.exception("copies in staging memory were not measured")
            if isinstance(error, StillCopying):
                # The device may write to this slot at any time.
                self.slots.pop()
            raise _Failed from error
        took = now() - began
        self.slots.rotate(1)
        return took / (rows * COLUMNS)
