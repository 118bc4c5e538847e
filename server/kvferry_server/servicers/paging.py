"""Pages of a list (AIP-158). A token is the key of the last entry of the page before it, so that a list may change in
between."""

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
MAX_BYTES = 3 << 20
"""Of the entries of a page: below what a client takes in one message, 4 MiB."""

Key: TypeAlias = tuple[bytes, ...]
Entry = TypeVar("Entry")
Listed = TypeVar("Listed", bound=Message)


def page(
    entries: Iterable[Entry],
    key: Callable[[Entry], Key],
    encode: Callable[[Entry], Listed],
    page_size: int,
    page_token: str,
) -> tuple[list[Listed], str]:
    """One page, and the token of the next; empty after the last. It is shorter than asked where it would be too large.

    Args:
        entries: in any order.
        key: unique per entry, and public; the list is in its order.
        encode: one entry as a message.
        page_size: at most 1000; 0 means 100.
        page_token: from the page before; empty: the first page.

    Raises:
        InvalidField: not a page's size, or not a token of ours.
    """
    if page_size > MAX_SIZE:
        raise InvalidField("page_size", page_size, f"at most {MAX_SIZE}")
    size = page_size or DEFAULT_SIZE
    after = _parse(page_token) if page_token else ()
    found = nsmallest(size + 1, (entry for entry in entries if key(entry) > after), key)
    listed: list[Listed] = []
    room = MAX_BYTES
    for entry in found[:size]:
        message = encode(entry)
        room -= message.ByteSize()
        if listed and room < 0:
            break
        listed.append(message)
    return listed, _token(key(found[len(listed) - 1])) if len(listed) < len(found) else ""


def text_key(text: str) -> bytes:
    """Orders as the text does."""
    return text.encode()


def number_key(number: int) -> bytes:
    """Orders as the number (below 2**64) does."""
    return number.to_bytes(8, "big")


def _token(key: Key) -> str:
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in key)


def _parse(token: str) -> Key:
    if len(token) > MAX_TOKEN:
        raise InvalidField("page_token", f"{len(token)} characters", "a token from a page before")
    try:
        parts = token.split(".")
        return tuple(base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True) for part in parts)
    except (binascii.Error, ValueError):
        raise InvalidField("page_token", token[:64], "a token from a page before") from None
