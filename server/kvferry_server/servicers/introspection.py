"""The service `kvferry.v1.Introspection`, for operators and tools, which reads the home and changes nothing; and its
lists, which the admin listener shows, too, with their pages (AIP-158).

A page token names the last entry of the page before, so a listing may change between pages."""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from kvferry._clock import to_duration
from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry._wire.geometry_codec import engine_from_proto, engine_to_proto
from kvferry._wire.reference import MAX_LENGTH, from_base64, to_base64
from kvferry._wire.version import OURS
from kvferry.errors import InvalidField, LimitReached
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.plan import plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionServicer
from kvferry_server.domain.limits import MAX_HEADER_BYTES, MAX_PAYLOAD, MAX_RANK_BYTES
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.router_keys import WaitingRead
from kvferry_server.domain.values import EngineRef
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import Worker
from kvferry_server.servicers import checks, encode, limits
from kvferry_server.servicers.callers import Context, remote_host

PLAN_SECONDS = 5  # Longest planning of one PlanRead. Some engines take minutes; ranks that are left out are named.

CAPABILITIES = (
    "admin",
    "checksums",
    "decline_forwarding",
    "list_filters",
    "prompt_marks",
    "router_references",
    "unfinished_blocks",
)
"""Optional features, for callers to check: servers in other languages may lack them."""

OF_FIELDS = {
    "message_bytes": MAX_MESSAGE_BYTES,
    "notify_bytes": MAX_NOTIFY_BYTES,
    "engine_id": limits.MAX_TEXT,
    "request_id": limits.MAX_TEXT,
    "reference": MAX_LENGTH,
    "payload": MAX_PAYLOAD,
    "notifications": limits.MAX_NOTIFICATIONS,
    "identity": limits.MAX_IDENTITY,
    "groups": limits.MAX_GROUPS,
    "runs": limits.MAX_RUNS,
    "layers": limits.MAX_LAYERS,
    "unfinished": limits.MAX_UNFINISHED,
    "marks": limits.MAX_MARKS,
    "header_bytes": MAX_HEADER_BYTES,
    "rank_bytes": MAX_RANK_BYTES,
    "metadata": limits.MAX_METADATA,
    "page_size": limits.MAX_PAGE_SIZE,
}
"""Limits on fields of requests, the same for every node server of this version."""


class Introspection(IntrospectionServicer):
    """The service of one home. Runs on the home's event loop; plans are made in a thread of their own. `call_limits`,
    by name, are the node server's own limits for GetServerInfo."""

    def __init__(self, home: Home, worker: Worker, call_limits: Mapping[str, int]) -> None:
        self._home = home
        self._call_limits = call_limits
        self._worker = worker
        # Not the worker of geometries: a tool's large plans must not delay handshakes.
        self._planner = Worker()

    async def GetServerInfo(self, request: ipb.GetServerInfoRequest, context: Context) -> ipb.GetServerInfoResponse:
        home = self._home
        with home.turn() as now:
            return ipb.GetServerInfoResponse(
                home_epoch=home.epoch,
                version=OURS.release,
                contract_revision=OURS.revision,
                oldest_revision=OURS.oldest,
                advertise=home.advertise,
                uptime=to_duration(now - home.records.started),
                draining=home.draining,
                times=encode.times(home.times),
                limits={**OF_FIELDS, **asdict(home.limits), **self._call_limits},
                capabilities=CAPABILITIES,
            )

    async def ListEngines(self, request: ipb.ListEnginesRequest, context: Context) -> ipb.ListEnginesResponse:
        return engines(self._home, request)

    async def GetEngine(self, request: ipb.GetEngineRequest, context: Context) -> ipb.GetEngineResponse:
        home = self._home
        engine_id = checks.text("engine_id", request.engine_id)
        before, after = parse_token(request.page_token)
        most = checks.within("page_size", request.page_size, limits.MAX_PAGE_SIZE) or limits.MAX_PAGE_SIZE
        with home.turn():
            engine = home.engines.find_live(engine_id, before.incarnation)
            summary, description, first = encode.engine_summary(engine), engine.description, engine.first
        if description is None or first is None:
            geometry = geometry_pb2.EngineGeometry(engine_id=engine_id, incarnation=engine.ref.incarnation)
            return ipb.GetEngineResponse(home_epoch=home.epoch, summary=summary, geometry=geometry)

        def answer() -> ipb.GetEngineResponse:
            found = engine_to_proto(first.of_engine())
            response = ipb.GetEngineResponse(home_epoch=home.epoch, summary=summary)
            size, last = 0, after
            for rank, encoded in description.ranks():
                if rank <= after:
                    continue
                if found.ranks and (size + len(encoded) > limits.ENGINE_PAGE_BYTES or len(found.ranks) == most):
                    response.next_page_token = make_token((engine.ref, last))
                    break
                found.ranks.add().MergeFromString(encoded)
                size, last = size + len(encoded), rank
            response.geometry.CopyFrom(found)
            return response

        return await self._worker.run(remote_host(context), answer)

    async def ListRequests(self, request: ipb.ListRequestsRequest, context: Context) -> ipb.ListRequestsResponse:
        return requests(self._home, request)

    async def ListTransfers(self, request: ipb.ListTransfersRequest, context: Context) -> ipb.ListTransfersResponse:
        return transfers(self._home, request)

    async def PlanRead(self, request: ipb.PlanReadRequest, context: Context) -> ipb.PlanReadResponse:
        """Plan a read without making it, for the ranks in the request; ranks that do not fit the answer are named."""
        host = remote_host(context)
        source = await self._geometry("source", request.source_engine_id, request, host)
        destination = await self._geometry("destination", request.destination_engine_id, request, host)
        caller_left = threading.Event()

        def answer() -> ipb.PlanReadResponse:
            until = time.monotonic() + PLAN_SECONDS
            read_from = source or engine_from_proto(request.source_geometry)
            read_into = destination or engine_from_proto(request.destination_geometry)
            ranks = sorted(set(request.ranks)) or [rank.rank for rank in read_into.ranks]
            checks.within("ranks", len(ranks), self._home.limits.ranks, unit="ranks")
            response = ipb.PlanReadResponse(home_epoch=self._home.epoch)
            size = 0
            for rank in ranks:
                if caller_left.is_set() or (response.ranks and time.monotonic() > until):
                    break
                plan = encode.plan(plan_read(read_from, read_into, rank))
                size += plan.ByteSize()
                if size > limits.MAX_PLAN_BYTES and response.ranks:
                    break
                if size > limits.MAX_PLAN_BYTES:
                    problem, most = f"the plan of rank {rank} takes {size} bytes", limits.MAX_PLAN_BYTES
                    raise LimitReached(f"{problem}, more than an answer's {most}", limit="plan_bytes", value=most)
                response.ranks.append(plan)
            response.left_ranks.extend(ranks[len(response.ranks) :])
            return response

        try:
            return await self._planner.run(host, answer)
        finally:
            # A thread cannot be cancelled, so it checks between ranks whether the call still waits.
            caller_left.set()

    async def _geometry(
        self, side: str, engine_id: str, request: ipb.PlanReadRequest, host: str
    ) -> EngineGeometry | None:
        """Return the geometry of an engine at this home; None if the request has a geometry."""
        given = request.WhichOneof("source" if side == "source" else "destination")
        if given is None:
            raise InvalidField(side, None, "an engine_id or a geometry")
        if given == f"{side}_geometry":
            return None
        checks.text(f"{side}_engine_id", engine_id)
        with self._home.turn():
            engine = self._home.engines.find_live(engine_id)
            description = engine.check_readable()
        return await self._worker.run(host, lambda: description.geometry)


Key: TypeAlias = tuple[EngineRef, int]  # of an entry: its number, below 2**64, at its engine
Entry = TypeVar("Entry")
Summary = TypeVar("Summary", bound=Message)


def engines(home: Home, request: ipb.ListEnginesRequest) -> ipb.ListEnginesResponse:
    """List the engines that are not dead."""
    with home.turn():
        listed = {engine.ref: {0: engine} for engine in home.engines.engines()}
        summaries, token = page(listed, encode.engine_summary, request.page_size, request.page_token)
        return ipb.ListEnginesResponse(
            home_epoch=home.epoch, engines=summaries, next_page_token=token, recovering=home.engines.recovering
        )


def requests(home: Home, request: ipb.ListRequestsRequest) -> ipb.ListRequestsResponse:
    """List the publications that have arrived and whose release is not acknowledged."""

    def described(publication: PublicationRecord) -> tuple[str, Sequence[Lease]] | None:
        arrived = publication.stage is not PublicationStage.AWAITED
        return (publication.request_id, publication.reads) if arrived else None

    with home.turn():
        listed = {source: engine.publications for source, engine in home.records.engines.items()}
        summaries, rest = _page(home, request, listed, encode.request_summary, described)
    return ipb.ListRequestsResponse(requests=summaries, **rest)


def transfers(home: Home, request: ipb.ListTransfersRequest) -> ipb.ListTransfersResponse:
    """List the reads that are under way, and ended ones whose outcome is kept."""

    def described(read: Lease | WaitingRead) -> tuple[str, Sequence[Lease | WaitingRead]]:
        return "" if isinstance(read, WaitingRead) else read.publication.request_id, (read,)

    with home.turn():
        summaries, rest = _page(home, request, home.records.reads_by_source, encode.transfer_summary, described)
    return ipb.ListTransfersResponse(transfers=summaries, **rest)


def _page(
    home: Home,
    request: ipb.ListRequestsRequest | ipb.ListTransfersRequest,
    listed: Mapping[EngineRef, Mapping[int, Entry]],
    summary: Callable[[Entry, float], Summary],
    described: Callable[[Entry], tuple[str, Sequence[Lease | WaitingRead]] | None],
) -> tuple[list[Summary], dict[str, Any]]:
    """Return a page of a list, and the other fields of the answer: entries may be missing because engines or their
    snapshots are awaited. `described` returns an entry's request_id and reads, for the request's filters; None: it is
    not listed. Each filter may be empty."""
    engine_id = checks.text("engine_id", request.engine_id, least=0)
    request_id = checks.text("request_id", request.request_id, least=0)
    reader, now = checks.text("reader_engine_id", request.reader_engine_id, least=0), home.clock.now()

    def wanted(entry: Entry) -> tuple[bool, int]:
        found = described(entry)
        if found is None or request_id not in ("", found[0]):
            return False, 1
        if not reader:
            return True, 0
        reads = found[1]
        return any(read.request.read.reader.engine_id == reader for read in reads), 1 + len(reads)

    entries = {ref: each for ref, each in listed.items() if engine_id in ("", ref.engine_id)}
    found, token = page(entries, lambda entry: summary(entry, now), request.page_size, request.page_token, wanted)
    asked = (each for each in home.engines.all_engines() if engine_id in ("", each.ref.engine_id) and not each.dead)
    recovering = home.engines.recovering or any(engine.recovering for engine in asked)
    return found, {"home_epoch": home.epoch, "next_page_token": token, "recovering": recovering}


def page(
    listed: Mapping[EngineRef, Mapping[int, Entry]],
    encode: Callable[[Entry], Summary],
    page_size: int,
    page_token: str,
    wanted: Callable[[Entry], tuple[bool, int]] = lambda _: (True, 0),
) -> tuple[list[Summary], str]:
    """Return one page of entries, by engine and number, and the token of the next page, empty after the last. A page
    ends early if it would exceed `LISTING_PAGE_BYTES`, or if `MAX_LOOKS` were used up to find the wanted entries; then
    it may be empty. `page_size` is at most 1000, and 0 stands for 100; `page_token` is empty for the first page.
    `wanted` returns whether an entry belongs to the listing, and how many looks that took. Raises `InvalidField` for a
    malformed page size or token."""
    size = checks.within("page_size", page_size, limits.MAX_PAGE_SIZE) or limits.DEFAULT_PAGE_SIZE
    after = parse_token(page_token)
    room, looks, last = limits.LISTING_PAGE_BYTES, limits.MAX_LOOKS, after
    found: list[Summary] = []
    for ref in sorted(listed):
        if ref < after[0]:
            continue
        # A hundred thousand numbers, which mostly rise, are sorted in milliseconds.
        numbers = sorted(listed[ref])
        begin = bisect_right(numbers, after[1]) if ref == after[0] else 0
        for number in itertools.islice(numbers, begin, None):
            if looks <= 0:
                return found, make_token(last)
            it_is, took = wanted(listed[ref][number])
            looks -= took
            if it_is:
                summary = encode(listed[ref][number])
                room -= checks.entry_size(summary)
                if found and (room < 0 or len(found) == size):
                    return found, make_token(last)
                found.append(summary)
            last = ref, number
    return found, ""


def make_token(last: Key) -> str:
    """Return the token of the page that begins after an entry."""
    ref, number = last
    return to_base64(number.to_bytes(8, "big") + ref.incarnation + ref.engine_id.encode())


def parse_token(token: str) -> Key:
    """Return the last entry of the page before; for the first page, what comes before all. Raises `InvalidField`."""
    if not token:
        return EngineRef("", b""), -1
    try:
        key = from_base64(token) if len(token) <= limits.MAX_PAGE_TOKEN else b""
        ref = EngineRef(key[24:].decode(), key[8:24])
    except ValueError:
        ref, key = EngineRef("", b""), b""
    if not ref.engine_id:
        raise InvalidField("page_token", token[:64], "a token from the page before")
    return ref, int.from_bytes(key[:8], "big")
