"""Pages of a list (AIP-158), bounded in entries and in bytes. A token is the key of the last entry of the page before
it, so that a list may change in between."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from kvferry.errors import InvalidField

DEFAULT_SIZE = 100
MAX_SIZE = 1000
MAX_TOKEN = 4096
MAX_BYTES = 1 << 18
"""Of the entries of a page: far below what a message may have, because pages are made on the event loop."""

Key: TypeAlias = tuple[bytes, ...]
Entry = TypeVar("Entry")
Encoded = TypeVar("Encoded", bound=Message)


def page(
    entries: Iterable[Entry],
    key: Callable[[Entry], Key],
    encode: Callable[[Entry], Encoded],
    page_size: int,
    page_token: str,
) -> tuple[list[Encoded], str]:
    """One page, and the token of the next; empty after the last.

    Args:
        entries: in any order.
        key: unique per entry, and public; the list is in its order.
        encode: makes the message of an entry.
        page_size: at most 1000; 0 means 100.
        page_token: from the page before; empty: the first page.

    Raises:
        InvalidField: not a page's size, or not a token of ours.
    """
    most = check_size(page_size) or DEFAULT_SIZE
    after = parse_token(page_token)
    found = nsmallest(most + 1, (entry for entry in entries if key(entry) > after), key)
    messages: list[Encoded] = []
    room = MAX_BYTES
    for entry in found[:most]:
        message = encode(entry)
        room -= message.ByteSize()
        if messages and room < 0:
            break
        messages.append(message)
    more = len(found) > len(messages)
    return messages, make_token(key(found[len(messages) - 1])) if more else ""


def check_size(page_size: int) -> int:
    """A page_size, 0 included; raises `InvalidField`."""
    if page_size > MAX_SIZE:
        raise InvalidField("page_size", page_size, f"at most {MAX_SIZE}")
    return page_size


def text_key(text: str) -> bytes:
    """Orders as the text does."""
    return text.encode()


def number_key(number: int) -> bytes:
    """Orders as the number (below 2**64) does."""
    return number.to_bytes(8, "big")


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
