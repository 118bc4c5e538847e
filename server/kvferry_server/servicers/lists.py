"""The lists of the service `kvferry.v1.Introspection`, which the admin listener shows, too, and their pages (AIP-158).
Each list raises `InvalidField` for a malformed request.

A token is the key of the last entry of the page before, so a listing may change between pages. The entries of a listing
are grouped by incarnation. Only entries on the page are looked at, since listings are long and pages are made on the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from kvferry._wire.reference import from_base64, to_base64
from kvferry.errors import InvalidField
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.ordered import Ordered
from kvferry_server.domain.publications import Lease, PublicationRecord
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

Key: TypeAlias = "tuple[bytes, ...]"
Entry = TypeVar("Entry")
Summary = TypeVar("Summary", bound=Message)


def engines(home: Home, request: ipb.ListEnginesRequest) -> ipb.ListEnginesResponse:
    """List the engines that are not dead."""
    with home.turn():
        listed = {engine.ref: Ordered[Engine]() for engine in home.engines.engines()}
        for engine in home.engines.engines():
            listed[engine.ref].add((), engine)
        summaries, token = page(listed, encode.engine_summary, request.page_size, request.page_token)
        return ipb.ListEnginesResponse(
            home_epoch=home.epoch, engines=summaries, next_page_token=token, recovering=home.engines.recovering
        )


def requests(home: Home, request: ipb.ListRequestsRequest) -> ipb.ListRequestsResponse:
    """List the publications that have arrived and whose release is not acknowledged."""

    def described(publication: PublicationRecord) -> tuple[str, Sequence[Lease]]:
        return publication.request_id, publication.reads

    with home.turn():
        listed = {source: engine.listed for source, engine in home.records.engines.items()}
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
    listed: Mapping[EngineRef, Ordered[Entry]],
    summary: Callable[[Entry, float], Summary],
    described: Callable[[Entry], tuple[str, Sequence[Lease | WaitingRead]]],
) -> tuple[list[Summary], str, bool]:
    """Return a page of a list, the token of the next page, and whether entries may be missing, because engines or their
    snapshots are awaited. `described` returns an entry's request_id and reads, for the request's filters; each filter
    may be empty."""
    engine_id = checks.text("engine_id", request.engine_id, least=0)
    request_id = checks.text("request_id", request.request_id, least=0)
    reader, now = checks.text("reader_engine_id", request.reader_engine_id, least=0), home.clock.now()

    def wanted(entry: Entry) -> tuple[bool, int]:
        found, reads = described(entry)
        if request_id not in ("", found):
            return False, 1
        return not reader or any(read.request.read.reader.engine_id == reader for read in reads), 1 + len(reads)

    entries = {ref: each for ref, each in listed.items() if engine_id in ("", ref.engine_id)}
    among = wanted if request_id or reader else None
    found, token = page(entries, lambda entry: summary(entry, now), request.page_size, request.page_token, among)
    asked = (each for each in home.engines.all_engines() if engine_id in ("", each.ref.engine_id) and not each.dead)
    return found, token, home.engines.recovering or any(engine.recovering for engine in asked)


def page(
    listed: Mapping[EngineRef, Ordered[Entry]],
    encode: Callable[[Entry], Summary],
    page_size: int,
    page_token: str,
    wanted: Callable[[Entry], tuple[bool, int]] | None = None,
) -> tuple[list[Summary], str]:
    """Return one page, and the token of the next page, empty after the last. A page ends early if it would exceed
    `LISTING_PAGE_BYTES`, or if `MAX_LOOKS` were used up to find the wanted entries; then it may be empty.

    Args:
        page_size: at most 1000; 0 means 100.
        page_token: from the page before; empty: the first page.
        wanted: returns whether an entry belongs to the listing, and how many looks that took; None: all do.

    Raises `InvalidField` for a malformed page size or token.
    """
    size = checks.within("page_size", page_size, MAX_PAGE_SIZE) or DEFAULT_PAGE_SIZE
    after = parse_token(page_token)
    room, looks, last = LISTING_PAGE_BYTES, MAX_LOOKS, after
    found: list[Summary] = []
    for engine_key, ref in sorted(((ref.engine_id.encode(), ref.incarnation), ref) for ref in listed):
        if engine_key < after[:2]:
            continue
        # Only the incarnation at which the page before ended has entries that were on that page.
        begun = tuple(int.from_bytes(part, "big") for part in after[2:]) if engine_key == after[:2] else None
        for numbers, entry in listed[ref].after(begun):
            key = (*engine_key, *map(number_key, numbers))
            if wanted is not None:
                if looks <= 0:
                    return found, make_token(last)
                it_is, took = wanted(entry)
                looks -= took
                if not it_is:
                    last = key
                    continue
            summary = encode(entry)
            room -= checks.entry_size(summary)
            if found and (room < 0 or len(found) == size):
                return found, make_token(last)
            found.append(summary)
            last = key
    return found, ""


def number_key(number: int) -> bytes:
    """Return a number (below 2**64) as bytes that sort in the same order."""
    return number.to_bytes(8, "big")


def make_token(key: Key) -> str:
    """Return the token of the page that begins after the entry with this key."""
    return ".".join(map(to_base64, key))


def parse_token(token: str) -> Key:
    """Return the key of the last entry of the page before; empty for the first page. Raises `InvalidField`."""
    if not token:
        return ()
    if len(token) > MAX_PAGE_TOKEN:
        raise InvalidField("page_token", f"{len(token)} characters", "a token from the page before")
    try:
        return tuple(map(from_base64, token.split(".")))
    except ValueError:
        raise InvalidField("page_token", token[:64], "a token from the page before") from None
