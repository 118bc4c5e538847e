"""The reader's side of integrity mode: compares the bytes that have arrived with the source's checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry._control.backoff import CALL_TIMEOUT, Backoff
from kvferry._integrity.summed_blocks import IntegrityOptions, Verification, divided, held_blocks
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._memory.rank_memory import RankMemory
from kvferry._reads.rank_read import RankRead
from kvferry.errors import DataLoss, InvalidField, KvferryError
from kvferry.geometry.blocks import id_runs
from kvferry.geometry.plane import Interval
from kvferry.planner.checksum import Sums, places_of
from kvferry.planner.coverage import PlaneRead
from kvferry.planner.lane import Lane
from kvferry.planner.plan import ReadPlan
from kvferry.planner.request_blocks import GroupRequest
from kvferry.planner.rows import Int64s
from kvferry.planner.token_line import AlikeBlocks
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

ASKED_SUMS = 1 << 18
"""Most sums to ask for in one call; the contract allows twice as many."""

ASKED_PLANES = 1024
"""Most planes to ask for in one call; the contract allows four times as many."""

PAUSE_FIRST, PAUSE_LAST = 0.002, 0.1
"""Shortest and longest seconds between two calls for sums that the home does not have yet."""


_Page: TypeAlias = tuple[Interval, Int64s, Sums]
"""Units, places, and their sums from the home, ``uint32[places, units]``."""


@dataclass(slots=True)
class _Compared:
    """Result of a comparison: the numbers of equal, unknown and wrong sums, and the error for the first wrong one."""

    equal: int = 0
    unknown: int = 0
    wrong: int = 0
    first: DataLoss | None = None


class Verifier:
    """Compares checksums for one destination rank. Belongs to the client's event loop; sums are compared on threads."""

    def __init__(self, loop: Loop, reader: pb.EngineRef, memory: RankMemory, options: IntegrityOptions) -> None:
        self._loop = loop
        self._reader = reader
        self._memory = memory
        self._options = options

    async def verify(self, read: RankRead, plan: ReadPlan) -> Verification:
        """Compare all sums that the source has sent with the bytes of a read, which have all arrived. Does not wait
        beyond the read's deadline. Raises `DataLoss` if one differs from the source's, and `TransferCancelled` if the
        read was cancelled."""
        publication, compared = read.order.publication, _Compared()
        give_up = min(read.order.deadline, self._loop.now() + self._options.patience)
        source_groups, moved = plan.groups_by_name[0], read.moved(plan)
        for lane in plan.lanes:
            name, blocks = lane.group.name, list[AlikeBlocks]()
            if name not in moved:
                continue
            group, granted = source_groups[name], read.granted[name]
            for whole, others in held_blocks(lane, moved[name], group, granted, publication, self._options.share):
                compared.unknown += others * sum(len(of.units) for of in lane.reads)
                blocks += whole
            if blocks:
                pages = await self._sums_of(read, lane, blocks, give_up)
                compare = partial(self._compare, read, lane, moved[name], blocks, pages, compared)
                await self._loop.on_thread(compare, f"kvferry-verify-{plan.source.engine_id}-{publication}")
        if compared.first is not None:
            compared.first.values["mismatches"] = str(compared.wrong)
            raise compared.first
        return Verification(compared.equal, compared.unknown)

    def _compare(
        self,
        read: RankRead,
        lane: Lane,
        moved: GroupRequest,
        blocks: Sequence[AlikeBlocks],
        pages: Mapping[str, list[_Page]],
        found: _Compared,
    ) -> None:
        """Compare the sums of these blocks of a lane."""
        for alike in blocks:
            read.check()
            for plane in lane.reads:
                expected, known = _looked_up(plane.units, alike.places, pages.get(plane.source.name, []))
                rows = np.flatnonzero(known.any(axis=1))
                summer = self._memory.of(plane.destination)
                if summer is None or len(rows) == 0:
                    found.unknown += known.size
                    continue
                some = AlikeBlocks(alike.places[rows], alike.runs, alike.ids[rows])
                computed = summer.sums(plane.destination, plane.units, some)
                unequal = np.argwhere(known[rows] & (computed != expected[rows]))
                if len(unequal) and found.first is None:
                    row, unit = unequal[0].tolist()
                    sums = int(expected[rows[row], unit]), int(computed[row, unit])
                    found.first = _data_loss(moved, plane, some, row, plane.units.begin + unit, sums)
                compared = int(np.count_nonzero(known))
                found.equal += compared - len(unequal)
                found.unknown += known.size - compared
                found.wrong += len(unequal)

    async def _sums_of(
        self, read: RankRead, lane: Lane, blocks: Sequence[AlikeBlocks], give_up: float
    ) -> dict[str, list[_Page]]:
        """Fetch the sums of a lane's blocks, by plane; returns those that the home has until `give_up`."""
        order, found, backoff = read.order, dict[str, list[_Page]](), Backoff(PAUSE_FIRST, PAUSE_LAST)
        lease_id = order.lease.lease_id
        # A read from a hint has none: its publication announced no sums.
        for query in _queries(lane, blocks) if lease_id else ():
            request = pb.ReadChecksumsRequest(reader=self._reader, lease_id=lease_id, queries=[query])
            while True:
                read.check()
                try:
                    left = min(CALL_TIMEOUT, order.deadline - self._loop.now())
                    answer = await order.home.read_checksums(request, max(0.001, left))
                    pages = [(part.plane, _page(part)) for part in answer.checksums]
                except KvferryError as error:
                    # Sums that cannot be fetched count as unverified; they do not fail the read.
                    problem = "could not fetch the sums of rank %d of publication %d: %s"
                    logger.info(problem, lane.source_rank, order.publication, error)
                    return found
                if lane.source_rank not in answer.pending_ranks or self._loop.now() + backoff.pause >= give_up:
                    break
                await asyncio.sleep(backoff.next())
            for plane, page in pages:
                found.setdefault(plane, []).append(page)
        return found


def _queries(lane: Lane, blocks: Sequence[AlikeBlocks]) -> Iterator[pb.ChecksumQuery]:
    """Yield the queries for the sums of a lane's blocks; each fits one call."""
    places = np.sort(np.concatenate([alike.places for alike in blocks]))
    by_units: dict[Interval, list[str]] = {}
    for read in lane.reads:
        by_units.setdefault(read.units, []).append(read.source.name)
    for units, names in by_units.items():
        for some, rows in divided(units, places, ASKED_SUMS):
            chosen = places[rows]
            starts, counts = id_runs(chosen)
            together = max(1, min(ASKED_PLANES, ASKED_SUMS // (len(chosen) * len(some))))
            for at in range(0, len(names), together):
                yield pb.ChecksumQuery(
                    rank=lane.source_rank,
                    planes=names[at : at + together],
                    unit_begin=some.begin,
                    unit_end=some.end,
                    place_starts=starts.tolist(),
                    place_counts=counts.tolist(),
                )


def _page(part: pb.Checksums) -> _Page:
    """Decode sums from the home; raises `InvalidField`."""
    places = places_of(part.place_starts, part.place_counts, ASKED_SUMS)
    if len(part.sums) != len(places) * (part.unit_end - part.unit_begin):
        expected = f"those of {len(places)} blocks of {part.unit_end - part.unit_begin} units"
        raise InvalidField(f"number of sums of {part.plane}", len(part.sums), expected)
    sums: Sums = np.array(part.sums, np.uint32).reshape(len(places), -1)
    return Interval(part.unit_begin, part.unit_end), places, sums


def _looked_up(units: Interval, places: Int64s, pages: list[_Page]) -> tuple[Sums, npt.NDArray[np.bool_]]:
    """Look up the sums of these places and units, ``uint32[places, units]``, and which of them are known, ``bool``."""
    sums = np.zeros((len(places), len(units)), np.uint32)
    known = np.zeros(sums.shape, np.bool_)
    for page_units, page_places, page_sums in pages:
        both = units.intersect(page_units)
        if both is None:
            continue
        rows = np.minimum(np.searchsorted(places, page_places), len(places) - 1)
        hit = places[rows] == page_places
        here = slice(both.begin - units.begin, both.end - units.begin)
        there = slice(both.begin - page_units.begin, both.end - page_units.begin)
        sums[rows[hit], here] = page_sums[hit, there]
        known[rows[hit], here] = True
    return sums, known


def _data_loss(
    moved: GroupRequest, plane: PlaneRead, alike: AlikeBlocks, row: int, unit: int, sums: tuple[int, int]
) -> DataLoss:
    place = int(alike.places[row])
    source_block = int(moved.source.ids[place - moved.source.first])
    blocks = ",".join(dict.fromkeys(str(block) for block in alike.ids[row].tolist()))
    expected, computed = (f"{of:#010x}" for of in sums)
    return DataLoss(
        f"{plane.source.name}, unit {unit}, of source rank {plane.source_rank}, block {source_block} (place {place}): "
        f"the source had the sum {expected}, in destination blocks {blocks} it is {computed}",
        plane=plane.source.name,
        source_rank=plane.source_rank,
        place=place,
        unit=unit,
        source_block=source_block,
        destination_blocks=blocks,
        expected=expected,
        computed=computed,
    )
