"""Sums of blocks in messages: taken from ranks (Notify checksums), answered to readers (ReadChecksums)."""

from __future__ import annotations

import numpy as np

from kvferry.errors import InvalidField
from kvferry.geometry.model import Interval
from kvferry.planner.checksum import places_of, runs_of
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.checksum_pages import Page, Query, answers, check_places
from kvferry_server.domain.identity import EngineRef, Names
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks
from kvferry_server.servicers.turns import Turns
from kvferry_server.servicers.worker import Worker

MAX_PAGE_SUMS = 1 << 17
"""Sums of one notification."""

MAX_PAGE_PARTS = 1024
"""Parts of one notification."""

MAX_ASKED_SUMS = 1 << 19
"""Sums of one answer: 2 MiB."""

MAX_ASKED_PLANES = 4096
"""Planes named in one call; each is looked up."""


async def publish_checksums(home: Home, sender: EngineRef, message: pb.PublishChecksums, turns: Turns) -> None:
    """Take a page of a source's rank, part by part: a part is compared with hundreds of others. What came before a part
    that is refused stays; it may come again.

    Raises:
        InvalidField: a rank, plane, unit or block that does not exist, or a page that contradicts another one.
        PublicationStale, PublicationReleased: nobody needs sums of this publication any more.
        LimitReached: the engine has too many.
    """
    number = checks.positive("checksums.publication", message.publication)
    parts, sums = len(message.checksums), sum(len(part.sums) for part in message.checksums)
    if parts > MAX_PAGE_PARTS or sums > MAX_PAGE_SUMS:
        limits = f"at most {MAX_PAGE_SUMS} sums in {MAX_PAGE_PARTS} parts"
        raise InvalidField("checksums", f"{sums} sums in {parts} parts", limits)
    with home.turn():
        registration = home.engines.find(sender).ranks.get(message.rank)
        home.lessor.offered(sender, number)
    if registration is None:
        raise InvalidField("checksums.rank", message.rank, "a rank that has registered")
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
            check_places(groups[plane.group], home.lessor.offered(sender, number).extents, page)
            home.lessor.add_checksums(sender, number, message.rank, [page], last=False)
        await turns.give()
    with home.turn():
        home.lessor.add_checksums(sender, number, message.rank, [], last=message.last)


async def read_checksums(
    home: Home, worker: Worker, request: pb.ReadChecksumsRequest, names: Names, host: str
) -> pb.ReadChecksumsResponse:
    """Answer a reader; `names` are those of its certificate, `host` is where it is.

    Raises:
        InvalidField: a malformed query, or more than one answer holds.
        LeaseEnded: the lease is not live.
        WrongIdentity: it is somebody else's.
    """
    reader = checks.engine_ref("reader", request.reader)
    lease_id = checks.random_bytes("lease_id", request.lease_id)
    queries = _queries(request)
    with home.turn():
        publication = home.lessor.leased(lease_id, reader, names)
        found = [(query, publication.checksums.pages(query)) for query in queries]
        done = publication.checksums.done
        pending = {query.rank for query in queries} - done if publication.awaits_checksums else set()
    size = sum(page.size for _, pages in found for page in pages)

    def answer() -> pb.ReadChecksumsResponse:
        response = pb.ReadChecksumsResponse(home_epoch=home.epoch, pending_ranks=sorted(pending))
        left = checks.MAX_ANSWER_BYTES - response.ByteSize()
        for query, pages in found:
            for page in answers(query, pages):
                part = _to_proto(page)
                left -= checks.entry_size(part)
                if left < 0:
                    problem = f"{sum(len(asked.planes) for asked in queries)} planes with more than an answer holds"
                    raise InvalidField(
                        "queries", problem, f"an answer of {checks.MAX_ANSWER_BYTES} bytes: ask for fewer"
                    )
                response.checksums.append(part)
        return response

    return await worker.run_if_heavy(host, size, answer)


def _queries(request: pb.ReadChecksumsRequest) -> list[Query]:
    planes = sums = 0
    for message in request.queries:
        blocks = sum(message.place_counts)
        planes += len(message.planes)
        sums += len(message.planes) * blocks * max(0, message.unit_end - message.unit_begin)
        # Before any is written out: a few bytes of runs are as many places as their sender likes.
        if sums > MAX_ASKED_SUMS or planes > MAX_ASKED_PLANES or blocks > MAX_ASKED_SUMS:
            limits = f"at most {MAX_ASKED_SUMS} sums of {MAX_ASKED_PLANES} planes"
            raise InvalidField("queries", f"{sums} sums of {planes} planes", limits)
    return [
        Query(
            message.rank,
            tuple(dict.fromkeys(message.planes)),
            _units(message.unit_begin, message.unit_end),
            places_of(message.place_starts, message.place_counts, MAX_ASKED_SUMS),
        )
        for message in request.queries
    ]


def _page(message: pb.Checksums) -> Page:
    units = _units(message.unit_begin, message.unit_end)
    places = places_of(message.place_starts, message.place_counts, MAX_PAGE_SUMS)
    if len(places) * len(units) != len(message.sums):
        expected = f"{len(places)} blocks of {len(units)} units"
        raise InvalidField(f"checksums of {message.plane}", f"{len(message.sums)} sums", expected)
    sums = np.array(message.sums, np.uint32).reshape(len(places), len(units))
    return Page(message.rank, checks.text("checksums.plane", message.plane), units, places, sums)


def _units(begin: int, end: int) -> Interval:
    if not begin < end:
        raise InvalidField("units", f"[{begin}, {end})", "at least one")
    return Interval(begin, end)


def _to_proto(page: Page) -> pb.Checksums:
    starts, counts = runs_of(page.places)
    return pb.Checksums(
        rank=page.rank,
        plane=page.plane,
        unit_begin=page.units.begin,
        unit_end=page.units.end,
        place_starts=starts.tolist(),
        place_counts=counts.tolist(),
        sums=page.sums.ravel().tolist(),
    )
