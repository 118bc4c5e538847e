"""Measures the constants of the cost model (`kvferry.planner.path_choice`).

A measurement takes about a tenth of a second, once for each home from which small pieces are read. It makes small reads
of the kinds that the constants predict, through the whole path of a read: pieces of two lengths read directly, and rows
read through staging memory, of which all or a part is copied on. Their destination is staging memory. No byte is read
or written twice in a row: bytes in a processor's cache would seem faster than those of an engine. Costs of only the
first read of a process are paid before and not measured: counted, they made staging seem 8 times as dear.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from math import prod

import numpy as np

from kvferry._clock import now
from kvferry._logs import Log
from kvferry._memory.access import StillCopying
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.staging_pool import StagingPool
from kvferry._transport.transport import Transfer, Transport
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import EngineGeometry, Group, MemoryRegion, RankGeometry
from kvferry.geometry.plane import Interval
from kvferry.geometry.tensors import Holding, TensorView, planes_of_tensor
from kvferry.planner.expansion import Expansion, SourceDescriptors
from kvferry.planner.path_choice import Costs, Path, PathRule
from kvferry.planner.plan import plan_read
from kvferry.planner.rows import Cells, Int64s
from kvferry.planner.staged_read import Copy

logger = Log(__name__)

TIMES = 8
"""Measurements of each kind, in turns. The fastest counts, since a disturbance only slows a measurement."""

ENOUGH = 0.15
"""Seconds after which no other turn begins: over a slow network a turn takes longer, and the first read waits. Making
the agent and connecting do not count, or they would leave time for one turn only."""

REPEATS = 2
"""Measurements of the smallest kinds in each turn."""

SHORT_BYTES = 4 << 10
LONG_BYTES = 16 << 10
"""Lengths of the pieces that are read: mostly one path becomes cheaper than the other around these lengths."""

TOKENS, UNITS = 2, 4
"""Pieces of a block: by token at the source, by unit at the destination, so that no two touch on both sides."""

HALF = UNITS // 2
"""Units that are read directly. Pieces with gaps between them take up to a quarter longer than pieces without, since
the processor no longer fetches ahead. Half of a block lies between the two."""

SHARE = 2 * LONG_BYTES * TOKENS * UNITS
"""Bytes. The memory that is read is a multiple of this."""

SHORT, LONG, STAGED = 1, 4, 4
"""The proportions of the blocks that are read in short pieces, in long pieces, and twice through staging memory: of all
their units, and of one unit. The last two are equal: the shorter a measurement, the less disturbed is its fastest, and
the more of its written bytes reach the memory only during the next measurement."""

PARTS = SHORT + LONG + 2 * STAGED

MOST = 8
"""Shares of short pieces. More would take longer and show no more. Through staging memory, 8 shares are two slots of
the default size: the cost of a slot after the first counts."""

SLOTS = 4
"""Slots that are borrowed, to be read into and copied into. At least two more are left for the measurement's own reads
through staging memory, and for other reads."""

CELLS = (64, SHORT_BYTES)
COLUMNS = 32
"""Runs that are copied within staging memory: bytes of a run, and the number of runs that become neighbours. This
number of the longest runs takes half of the smallest slot that is measured, `SHARE`: one slot is copied from one half
to the other."""


def measure(transport: Transport, peer: AgentInfo, pool: StagingPool, deadline: float) -> Costs | None:
    """Measure the constants for reads from one peer; None if no measurement is possible now. Waits, so only the thread
    of a read calls it. Raises `BadAgentMetadata` and `Closed` as `Transport.start`."""
    region = max(peer.regions, key=lambda region: region.length)
    # Each turn reads no byte twice.
    shares = min(MOST, (region.length // SHARE - 2 * REPEATS) // PARTS)
    if shares < 1 or pool.slot_bytes < SHARE:
        return None
    measurement = _Measurement(transport, peer, region, pool, shares)
    try:
        return measurement.run(deadline)
    except _Failed:
        return None
    finally:
        measurement.give_back()


class _Failed(Exception):
    """A read or a copy failed. The read that follows will meet the same error, and report it."""


class _Reads:
    """Small reads of one kind.

    They read `units` of the units of each block from `region` into `space`, in pieces of `run` bytes: from `size` bytes
    of blocks, `shares` times `SHARE`, or one block if `shares` is 0. `block` and `place` are the bytes of a block at
    the source and at the destination. `last` is the last read, of which `staged_bytes` went into staging memory;
    `seconds` is the time of the fastest.
    """

    def __init__(
        self, path: Path, run: int, units: int, shares: int, region: MemoryRegion, space: MemoryRegion, slot_bytes: int
    ) -> None:
        self.block = run * TOKENS * UNITS
        self.place = run * TOKENS * units
        self.size = shares * SHARE or self.block
        self.last = Expansion((), 0, 0)
        self.seconds = float("inf")
        rule = PathRule(path, slot_bytes=slot_bytes, device_memory=frozenset((space.device,)))
        source = _engine(region, (TOKENS, UNITS, run), (run * UNITS, run), UNITS)
        destination = _engine(space, (TOKENS, units, run), (run, run * TOKENS), units)
        self._plan = plan_read(source, destination, 0, rule=rule)

    @property
    def staged_bytes(self) -> int:
        staged = (read for part in self.last.sources for read in part.staged)
        return sum(len(read.blocks) * extent.length for read in staged for extent in read.lane.extents)

    def part(self, shares: Int64s, places: Int64s) -> SourceDescriptors:
        """A read of these shares of the source into these blocks of staging memory, at most one per place."""
        within = np.arange(SHARE // self.block, dtype=np.int64)
        blocks = (shares[:, None] * len(within) + within).ravel()
        count = min(self.size // self.block, len(places))
        self.last = self._plan.expand({"full": Blocks(blocks[:count])}, {"full": Blocks(places[:count])})
        return self.last.sources[0]


def _engine(memory: MemoryRegion, block: tuple[int, int, int], strides: tuple[int, int], units: int) -> EngineGeometry:
    """An engine with one plane, which fills a region: blocks of tokens, units and bytes."""
    step = prod(block)
    blocks = memory.length // step
    space = memory.memory_kind, memory.device
    view = TensorView(memory.base, (blocks, *block), (step, *strides, 1), 1, "uint8", *space)
    group, held = Group("full", block_tokens=TOKENS, num_blocks=blocks), Holding(Interval(0, units), UNITS)
    planes = planes_of_tensor(view, ("block", "token", "unit", "content"), group, "0", ("key",), held)
    return EngineGeometry("measured", (group,), (RankGeometry(0, planes),))


class _Measurement:
    """One measurement, and the slots that it borrows."""

    def __init__(
        self, transport: Transport, peer: AgentInfo, region: MemoryRegion, pool: StagingPool, shares: int
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._pool = pool
        space = pool.space.region
        kinds = [
            (Path.DIRECT, SHORT_BYTES, HALF, 0),
            (Path.DIRECT, SHORT_BYTES, HALF, SHORT),
            (Path.DIRECT, LONG_BYTES, HALF, LONG),
        ]
        if pool.slots > 1:
            kinds += [
                (Path.STAGED, LONG_BYTES, UNITS, 0),
                (Path.STAGED, LONG_BYTES, UNITS, STAGED),
                (Path.STAGED, LONG_BYTES, 1, STAGED),
            ]
        self._kinds = [
            _Reads(path, run, units, part * shares, region, space, pool.slot_bytes) for path, run, units, part in kinds
        ]
        there, every = region.length // SHARE, 1 + (PARTS * shares + 2 * REPEATS) * TIMES
        self._shares = np.arange(every, dtype=np.int64) * max(1, there // every) % there
        self._taken = 0
        self._copies = dict.fromkeys(CELLS, float("inf"))
        self._slots: deque[int] = deque()
        while len(self._slots) < min(SLOTS, max(1, pool.slots - 2)) and (slot := pool.borrow()) is not None:
            self._slots.append(slot)

    def give_back(self) -> None:
        """Give back the slots to which nothing writes any more."""
        for slot in self._slots:
            self._pool.release(slot)

    def run(self, deadline: float) -> Costs | None:
        """Measure; None if no slot is free."""
        if not self._slots:
            return None
        self._warm(deadline)
        until = now() + ENOUGH
        for turn in range(TIMES):
            if turn and now() > until:
                break
            for reads in self._kinds:
                # A read of one block is mostly waking threads, which varies, and repeating it costs little.
                for _ in range(REPEATS if reads.size == reads.block else 1):
                    reads.seconds = min(reads.seconds, self._read(reads, deadline))
            for cell, fastest in self._copies.items():
                self._copies[cell] = min(fastest, self._copied(cell))
        return self._costs()

    def _warm(self, deadline: float) -> None:
        """Pay the costs of the first read only: making the reading agent, which takes half a second, connecting to the
        peer, and touching new memory, which is several times as slow."""
        self._read(self._kinds[0], deadline)
        borrowed = len(self._slots)
        while (slot := self._pool.borrow()) is not None:
            self._slots.append(slot)
        try:
            for _ in range(len(self._slots)):
                self._copied(SHORT_BYTES)
        finally:
            while len(self._slots) > borrowed:
                self._pool.release(self._slots.pop())

    def _costs(self) -> Costs:
        """The constants that explain the measured times. The cost of a read that does not depend on its size is nearly
        the same on both paths, and left out."""
        few, short, long, *staged = self._kinds
        # The costs of both kinds of direct read depend on number and bytes: two equations.
        more = max(1, short.last.descriptors - few.last.descriptors)
        per_short = max(0.0, short.seconds - few.seconds) / more
        per_long = max(0.0, long.seconds - few.seconds + few.last.descriptors * per_short) / long.last.descriptors
        byte = max(1e-12, (per_long - per_short) / (LONG_BYTES - SHORT_BYTES))
        descriptor = max(1e-8, per_short - SHORT_BYTES * byte)
        per_run, per_long_run = self._copies.values()
        copied_byte = max(0.0, (per_long_run - per_run) / (CELLS[1] - CELLS[0]))
        cell = max(1e-10, per_run - CELLS[0] * copied_byte)
        staged_byte = byte
        if staged:
            few, *others = staged
            # The costs of both kinds of staged read depend on the bytes read and the bytes copied: two more equations.
            (read, copied, took), (read_too, copied_too, took_too) = (
                (
                    reads.staged_bytes - few.staged_bytes,
                    reads.last.total_bytes - few.last.total_bytes,
                    reads.seconds
                    - few.seconds
                    - (reads.last.descriptors - few.last.descriptors) * descriptor
                    - (reads.last.pieces - few.last.pieces) * cell,
                )
                for reads in others
            )
            apart = copied * read_too - copied_too * read
            # The equations are the same where a slot has room for one block only.
            if apart > 0:
                copied_byte = max(0.0, (took * read_too - took_too * read) / apart)
                staged_byte = max(1e-12, (took - copied * copied_byte) / read)
        return Costs(descriptor, byte, staged_byte, cell, copied_byte)

    def _read(self, reads: _Reads, deadline: float) -> float:
        base, size, place = self._pool.space.region.base, self._pool.slot_bytes, reads.place
        slots = min(-(-reads.size // size), len(self._slots))
        self._slots.rotate(slots)
        places = [
            np.arange(-((base - slot) // place), (slot + size - base) // place, dtype=np.int64)
            for slot in list(self._slots)[:slots]
        ]
        shares = self._shares[self._taken : self._taken + max(1, reads.size // SHARE)]
        self._taken += len(shares)
        part = reads.part(shares, np.concatenate(places))
        began = now()
        transfer = self._transport.start(
            [(self._peer, part)], deadline=deadline, label="measuring", spaces=(self._pool.space,)
        )
        if not transfer.wait(max(0.0, deadline - began)) or transfer.error is not None:
            transfer.cancel()
            # Until the transfer is quiet it may write to the first slots.
            for slot in [self._slots.popleft() for _ in range(slots)]:
                transfer.add_quiet_callback(partial(_release, self._pool, slot))
            raise _Failed
        return (transfer.ended_at or now()) - began

    def _copied(self, cell: int) -> float:
        """Seconds per run of `cell` bytes, copied from the slot written last into the slot written longest ago."""
        size = self._pool.slot_bytes
        source, target = self._slots[0], self._slots[-1]
        if len(self._slots) == 1:
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
                self._slots.pop()
            raise _Failed from error
        took = now() - began
        self._slots.rotate(1)
        return took / (rows * COLUMNS)


def _release(pool: StagingPool, slot: int, _: Transfer) -> None:
    pool.release(slot)
