"""A bounded memory, such as of references of requests that have ended."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

MOST = 1024


def remember(known: dict[Key, Value], key: Key, value: Value, most: int = MOST) -> None:
    """Make an entry the latest one, and forget the oldest of more than `most`."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
