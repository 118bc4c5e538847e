"""Pages of a listing (AIP-158). A token is the key of the last entry of the page before, so a listing may change
between pages.

The entries of a listing are grouped by incarnation. Only entries on the page are looked at, since listings are long and
pages are made on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from kvferry._wire.reference import from_base64, to_base64
from kvferry.errors import InvalidField
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.ordered import Ordered
from kvferry_server.servicers.checks import entry_size, within
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
    size = within("page_size", page_size, MAX_PAGE_SIZE) or DEFAULT_PAGE_SIZE
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
            room -= entry_size(summary)
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
