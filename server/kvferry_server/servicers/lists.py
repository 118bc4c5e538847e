"""The lists of the service `kvferry.v1.Introspection`, which the admin listener shows, too, and their pages (AIP-158).
Each list raises `InvalidField` for a malformed request.

A token names the last entry of the page before, so a listing may change between pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from kvferry._wire.reference import from_base64, to_base64
from kvferry.errors import InvalidField
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.router_keys import WaitingRead
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, encode
from kvferry_server.servicers.limits import (
    DEFAULT_PAGE_SIZE,
    LISTING_PAGE_BYTES,
    MAX_LOOKS,
    MAX_PAGE_SIZE,
    MAX_PAGE_TOKEN,
)

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
        summaries, token, recovering = _page(home, request, listed, encode.request_summary, described)
    return ipb.ListRequestsResponse(
        home_epoch=home.epoch, requests=summaries, next_page_token=token, recovering=recovering
    )


def transfers(home: Home, request: ipb.ListTransfersRequest) -> ipb.ListTransfersResponse:
    """List the reads that are under way, and ended ones whose outcome is kept."""

    def described(read: Lease | WaitingRead) -> tuple[str, Sequence[Lease | WaitingRead]]:
        return "" if isinstance(read, WaitingRead) else read.publication.request_id, (read,)

    with home.turn():
        listed = home.records.reads_by_source
        summaries, token, recovering = _page(home, request, listed, encode.transfer_summary, described)
    return ipb.ListTransfersResponse(
        home_epoch=home.epoch, transfers=summaries, next_page_token=token, recovering=recovering
    )


def _page(
    home: Home,
    request: ipb.ListRequestsRequest | ipb.ListTransfersRequest,
    listed: Mapping[EngineRef, Mapping[int, Entry]],
    summary: Callable[[Entry, float], Summary],
    described: Callable[[Entry], tuple[str, Sequence[Lease | WaitingRead]] | None],
) -> tuple[list[Summary], str, bool]:
    """Return a page of a list, the token of the next page, and whether entries may be missing, because engines or their
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
    return found, token, home.engines.recovering or any(engine.recovering for engine in asked)


def page(
    listed: Mapping[EngineRef, Mapping[int, Entry]],
    encode: Callable[[Entry], Summary],
    page_size: int,
    page_token: str,
    wanted: Callable[[Entry], tuple[bool, int]] = lambda _: (True, 0),
) -> tuple[list[Summary], str]:
    """Return one page of entries, by engine and number, and the token of the next page, empty after the last. A page
    ends early if it would exceed `LISTING_PAGE_BYTES`, or if `MAX_LOOKS` were used up to find the wanted entries; then
    it may be empty.

    Args:
        page_size: at most 1000; 0 means 100.
        page_token: from the page before; empty: the first page.
        wanted: returns whether an entry belongs to the listing, and how many looks that took.

    Raises `InvalidField` for a malformed page size or token.
    """
    size = checks.within("page_size", page_size, MAX_PAGE_SIZE) or DEFAULT_PAGE_SIZE
    after = parse_token(page_token)
    room, looks, last = LISTING_PAGE_BYTES, MAX_LOOKS, after
    found: list[Summary] = []
    for ref in sorted(listed):
        if after is not None and ref < after[0]:
            continue
        # A hundred thousand numbers, which mostly rise, are sorted in milliseconds.
        for number in sorted(listed[ref]):
            if after is not None and (ref, number) <= after:
                continue
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


def make_token(last: Key | None) -> str:
    """Return the token of the page that begins after an entry; None: the first page."""
    if last is None:
        return ""
    ref, number = last
    return to_base64(number.to_bytes(8, "big") + ref.incarnation + ref.engine_id.encode())


def parse_token(token: str) -> Key | None:
    """Return the last entry of the page before; None for the first page. Raises `InvalidField`."""
    if not token:
        return None
    try:
        key = from_base64(token) if len(token) <= MAX_PAGE_TOKEN else b""
        ref = EngineRef(key[24:].decode(), key[8:24])
    except ValueError:
        ref, key = EngineRef("", b""), b""
    if not ref.engine_id:
        raise InvalidField("page_token", token[:64], "a token from the page before")
    return ref, int.from_bytes(key[:8], "big")
