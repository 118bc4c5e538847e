"""What is remembered of requests that have ended, so that those which come later fare as they did."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Remembered(Generic[Key]):
    """The last so many keys that were added.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[Key, None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key) -> None:
        """Remember a key, and forget the oldest if there are too many."""
        self._keys[key] = None
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]
