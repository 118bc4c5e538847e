"""Checksums of blocks in messages: accepted from ranks (Notify) and sent to readers (ReadChecksums)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from kvferry.errors import HomeRecovering, InvalidField
from kvferry.geometry.blocks import id_runs
from kvferry.geometry.plane import Interval
from kvferry.planner.checksum import places_of
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.steps import ChecksumPage, Indexes
from kvferry_server.domain.values import EngineRef, Names
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import Worker
from kvferry_server.servicers import checks, limits


async def publish_checksums(
    home: Home, sender: EngineRef, message: pb.PublishChecksums, pause: Callable[[], Awaitable[None]]
) -> None:
    """Accept checksums of a source's rank, part by part, with pauses: each part is compared with hundreds of others. If
    a part is refused, the parts before it are kept; sending them again is harmless. Raises `InvalidField` if a rank,
    plane or unit does not exist, `HomeRecovering` if the rank's registration has not arrived yet, and as
    `Sources.add_checksums`."""
    number = checks.positive("checksums.publication", message.publication)
    parts, sums = len(message.checksums), sum(len(part.sums) for part in message.checksums)
    if parts > limits.MAX_PAGE_PARTS or sums > limits.MAX_PAGE_SUMS:
        most = f"at most {limits.MAX_PAGE_SUMS} sums in {limits.MAX_PAGE_PARTS} parts"
        raise InvalidField("checksums", f"{sums} sums in {parts} parts", most)
    with home.turn():
        engine = home.engines.find(sender)
        registration = engine.ranks.get(message.rank)
        home.records.unreleased(sender, number)
    if registration is None:
        if engine.num_ranks and message.rank >= engine.num_ranks:
            raise InvalidField("checksums.rank", message.rank, f"below {engine.num_ranks}")
        # After a restart of the home the scheduler's snapshot may be here before the rank's registration.
        problem = f"rank {message.rank} of {sender} is not registered"
        raise HomeRecovering(problem, engine_id=sender.engine_id)
    planes = {plane.name: plane for plane in registration.geometry.planes}
    groups = {group.name: group for group in registration.groups}
    for part in message.checksums:
        page = _page(part)
        plane = planes.get(page.plane) if page.rank == message.rank else None
        if plane is None:
            raise InvalidField("checksums.plane", page.plane, f"a plane of rank {message.rank}")
        if page.units.intersect(plane.units) != page.units:
            raise InvalidField(f"checksums of {page.plane}", f"units {page.units}", f"units in {plane.units}")
        with home.turn():
            home.sources.add_checksums(sender, number, groups[plane.group], page)
        if home.time_slices.over:
            await pause()
    with home.turn():
        publication = home.records.unreleased(sender, number)
        if message.last:
            publication.checksums.done.add(message.rank)


async def read_checksums(
    home: Home, worker: Worker, request: pb.ReadChecksumsRequest, names: Names, host: str
) -> pb.ReadChecksumsResponse:
    """Answer ReadChecksums. Raises `InvalidField`, also if the answer fits no message, and as `Lessor.leased`."""
    reader = checks.engine_ref("reader", request.reader)
    lease_id = checks.random_bytes("lease_id", request.lease_id)
    with home.turn():
        publication = home.lessor.leased(lease_id, reader, names)
        checksums, awaited = publication.checksums, publication.awaits_checksums

    def answer() -> pb.ReadChecksumsResponse:
        # Before the pages are looked up: a rank may send its last ones meanwhile.
        pending = {message.rank for message in request.queries} - checksums.done if awaited else ()
        response = pb.ReadChecksumsResponse(home_epoch=home.epoch, pending_ranks=sorted(pending))
        left = limits.MAX_ANSWER_BYTES - response.ByteSize()
        for message, units, indexes in _queries(request):
            for page in checksums.pages(message.rank, message.planes):
                if (held := page.part(units, indexes)) is None:
                    continue
                starts, counts = id_runs(held.indexes)
                part = pb.Checksums(
                    rank=held.rank,
                    plane=held.plane,
                    unit_begin=held.units.begin,
                    unit_end=held.units.end,
                    place_starts=starts.tolist(),
                    place_counts=counts.tolist(),
                    sums=held.sums.ravel().tolist(),
                )
                left -= checks.entry_size(part)
                if left < 0:
                    planes = sum(len(message.planes) for message in request.queries)
                    most = f"so few that the answer has at most {limits.MAX_ANSWER_BYTES} bytes: ask in several calls"
                    raise InvalidField("queries", f"{planes} planes", most)
                response.checksums.append(part)
        return response

    # A hundred kilobytes of queries may ask for a million pages, and each waiting call would keep a list of them. A few
    # bytes may ask for half a million places.
    few = request.ByteSize() <= limits.MAX_INLINE_BYTES
    places = sum(sum(message.place_counts) for message in request.queries) if few else 0
    few = few and places + len(request.queries) * checksums.size <= limits.MAX_INLINE_BYTES
    return answer() if few else await worker.run(host, answer)


def _queries(request: pb.ReadChecksumsRequest) -> list[tuple[pb.ChecksumQuery, Interval, Indexes]]:
    """Return the queries, each with its units and block indexes, which rise."""
    found, planes, blocks, sums, most = [], 0, 0, 0, limits.MAX_ASKED_SUMS
    for message in request.queries:
        here = sum(message.place_counts)
        # Each query takes time, also one without planes.
        planes += max(1, len(message.planes))
        blocks += here
        sums += len(message.planes) * here * max(0, message.unit_end - message.unit_begin)
        # Checked before runs are expanded: a few bytes of runs can stand for any number of block indexes, also in
        # queries without planes.
        if sums > most or blocks > most or planes > limits.MAX_ASKED_PLANES:
            given = f"{sums} sums of {planes} planes, {blocks} blocks"
            raise InvalidField("queries", given, f"at most {most} sums of {limits.MAX_ASKED_PLANES} planes")
        units = _units(message.unit_begin, message.unit_end)
        found.append((message, units, places_of(message.place_starts, message.place_counts, most)))
    return found


def _page(message: pb.Checksums) -> ChecksumPage:
    units = _units(message.unit_begin, message.unit_end)
    indexes = places_of(message.place_starts, message.place_counts, limits.MAX_PAGE_SUMS)
    if len(indexes) * len(units) != len(message.sums):
        expected = f"{len(indexes)} blocks of {len(units)} units"
        raise InvalidField(f"checksums of {message.plane}", f"{len(message.sums)} sums", expected)
    sums = np.array(message.sums, np.uint32).reshape(len(indexes), len(units))
    return ChecksumPage(message.rank, checks.text("checksums.plane", message.plane), units, indexes, sums)


def _units(begin: int, end: int) -> Interval:
    if not begin < end:
        raise InvalidField("units", f"[{begin}, {end})", "at least one unit")
    return Interval(begin, end)
