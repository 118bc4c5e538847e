"""The lists of the service `kvferry.v1.Introspection`, which the admin listener shows, too. Each raises `InvalidField`
for a malformed request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.ordered import Ordered
from kvferry_server.domain.publications import Lease, PublicationRecord
from kvferry_server.domain.router_keys import WaitingRead
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, encode
from kvferry_server.servicers.paging import page

Entry = TypeVar("Entry")
Summary = TypeVar("Summary", bound=Message)


def engine_summary(home: Home, engine: Engine) -> ipb.EngineSummary:
    """Return the summary of an engine; within a turn."""
    return encode.engine_summary(engine, *home.records.counts(engine.ref))


def engines(home: Home, request: ipb.ListEnginesRequest) -> ipb.ListEnginesResponse:
    """List the engines that are not dead."""
    with home.turn():
        listed = {engine.ref: Ordered[Engine]() for engine in home.engines.engines()}
        for engine in home.engines.engines():
            listed[engine.ref].add((), engine)
        summaries, token = page(
            listed, lambda engine: engine_summary(home, engine), request.page_size, request.page_token
        )
        return ipb.ListEnginesResponse(
            home_epoch=home.epoch, engines=summaries, next_page_token=token, recovering=home.engines.recovering
        )


def requests(home: Home, request: ipb.ListRequestsRequest) -> ipb.ListRequestsResponse:
    """List the publications that have arrived and whose release is not acknowledged."""

    def described(publication: PublicationRecord) -> tuple[str, Sequence[Lease]]:
        return publication.request_id, publication.reads

    listed, summary = home.records.listed_publications, encode.request_summary
    summaries, token, recovering = _page(home, request, listed, summary, described)
    return ipb.ListRequestsResponse(
        home_epoch=home.epoch, requests=summaries, next_page_token=token, recovering=recovering
    )


def transfers(home: Home, request: ipb.ListTransfersRequest) -> ipb.ListTransfersResponse:
    """List the reads that are under way, and ended ones whose outcome is kept."""

    def described(read: Lease | WaitingRead) -> tuple[str, Sequence[Lease | WaitingRead]]:
        return "" if isinstance(read, WaitingRead) else read.publication.request_id, (read,)

    listed, summary = home.records.listed_reads, encode.transfer_summary
    summaries, token, recovering = _page(home, request, listed, summary, described)
    return ipb.ListTransfersResponse(
        home_epoch=home.epoch, transfers=summaries, next_page_token=token, recovering=recovering
    )


def _page(
    home: Home,
    request: ipb.ListRequestsRequest | ipb.ListTransfersRequest,
    listed: Callable[[], Mapping[EngineRef, Ordered[Entry]]],
    summary: Callable[[Entry, float], Summary],
    described: Callable[[Entry], tuple[str, Sequence[Lease | WaitingRead]]],
) -> tuple[list[Summary], str, bool]:
    """Return a page of a list, the token of the next page, and whether entries may be missing, because engines or their
    snapshots are awaited. `described` returns an entry's request_id and reads, for the request's filters; each filter
    may be empty."""
    engine_id = checks.text("engine_id", request.engine_id, least=0)
    request_id = checks.text("request_id", request.request_id, least=0)
    reader = checks.text("reader_engine_id", request.reader_engine_id, least=0)

    def wanted(entry: Entry) -> tuple[bool, int]:
        found, reads = described(entry)
        if request_id not in ("", found):
            return False, 1
        return not reader or any(read.request.read.reader.engine_id == reader for read in reads), 1 + len(reads)

    with home.turn() as now:
        entries = {ref: each for ref, each in listed().items() if engine_id in ("", ref.engine_id)}
        among = wanted if request_id or reader else None
        found, token = page(entries, lambda entry: summary(entry, now), request.page_size, request.page_token, among)
        asked = (each for each in home.engines.all_engines() if engine_id in ("", each.ref.engine_id) and not each.dead)
        awaited = any(home.records.of_engine(each.ref).recovering for each in asked)
        return found, token, home.engines.recovering or awaited
