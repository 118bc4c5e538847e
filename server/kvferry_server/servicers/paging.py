"""Pages of a list (AIP-158). A token is the key of the last entry of the page before it, so that a list may change in
between.

A list lies on shelves, one for each start of an engine: only those are looked at whose entries are on the page, since
lists are long and whoever asks holds up all others.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from heapq import nsmallest
from operator import itemgetter
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from kvferry.errors import InvalidField
from kvferry_server.domain.identity import EngineRef
from kvferry_server.servicers.checks import entry_size

DEFAULT_SIZE = 100
MAX_SIZE = 1000
MAX_TOKEN = 4096
PAGE_BYTES = 1 << 18
"""Bytes of a page, unless its first entry has more: small, because pages are made on the event loop."""

Numbers: TypeAlias = "tuple[int, ...]"
Key: TypeAlias = "tuple[bytes, ...]"
Entry = TypeVar("Entry")
Summary = TypeVar("Summary", bound=Message)


def page(
    shelves: Mapping[EngineRef, Iterable[tuple[Numbers, Entry]]],
    encode: Callable[[Entry], Summary],
    page_size: int,
    page_token: str,
) -> tuple[list[Summary], str]:
    """One page, and the token of the next; empty after the last. A page ends early before it is larger than a message.

    Args:
        shelves: entries in any order, each with numbers (below 2**64) that are unique on the shelf and order it.
        encode: makes of an entry what is answered.
        page_size: at most 1000; 0 means 100.
        page_token: from the page before; empty: the first page.

    Raises:
        InvalidField: not a page's size, or not a token of ours.
    """
    size = check_size(page_size) or DEFAULT_SIZE
    after = parse_token(page_token)
    room, last = PAGE_BYTES, after
    found: list[Summary] = []
    for engine_key, ref in sorted((_engine_key(ref), ref) for ref in shelves):
        if engine_key < after[:2]:
            continue
        # Only the shelf on which the page before ended has entries that were on it.
        begun = tuple(int.from_bytes(part, "big") for part in after[2:]) if engine_key == after[:2] else None
        entries = (entry for entry in shelves[ref] if begun is None or entry[0] > begun)
        for numbers, entry in nsmallest(size + 1 - len(found), entries, itemgetter(0)):
            summary = encode(entry)
            room -= entry_size(summary)
            if found and (room < 0 or len(found) == size):
                return found, make_token(last)
            found.append(summary)
            last = (*engine_key, *(number_key(number) for number in numbers))
    return found, ""


def check_size(page_size: int) -> int:
    """A page_size, 0 included; raises `InvalidField`."""
    if page_size > MAX_SIZE:
        raise InvalidField("page_size", page_size, f"at most {MAX_SIZE}")
    return page_size


def number_key(number: int) -> bytes:
    """Orders as the number (below 2**64) does."""
    return number.to_bytes(8, "big")


def _engine_key(ref: EngineRef) -> Key:
    """Orders as the engine_id does."""
    return ref.engine_id.encode(), ref.incarnation


def make_token(key: Key) -> str:
    """The token of the page that begins after an entry."""
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in key)


def parse_token(token: str) -> Key:
    """The key of the last entry of the page before; none for the first page. Raises `InvalidField`."""
    if not token:
        return ()
    if len(token) > MAX_TOKEN:
        raise InvalidField("page_token", f"{len(token)} characters", "a token from a page before")
    try:
        parts = token.split(".")
        return tuple(base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True) for part in parts)
    except (binascii.Error, ValueError):
        raise InvalidField("page_token", token[:64], "a token from a page before") from None
