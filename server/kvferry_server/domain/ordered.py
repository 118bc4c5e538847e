"""A mapping whose entries are listed in the order of their keys, from any key on, without going through the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

Numbers: TypeAlias = "tuple[int, ...]"  # A key within an incarnation

Entry = TypeVar("Entry")

FEW = 256
GONE_SHARE = 8
"""Keys of removed entries are kept up to this number, or this share of all keys, and dropped together: dropping each
separately would move all keys behind it, for each of a hundred thousand entries that are removed at once."""


class Ordered(Generic[Entry]):
    """Entries by numbers. Numbers mostly rise, so that adding an entry takes no longer than to a list."""

    def __init__(self) -> None:
        self._keys: list[Numbers] = []  # In order; includes keys of some removed entries
        self._entries: dict[Numbers, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Numbers, entry: Entry) -> None:
        self._entries[key] = entry
        if not self._keys or key > self._keys[-1]:
            self._keys.append(key)
            return
        index = bisect_left(self._keys, key)
        if self._keys[index] != key:
            self._keys.insert(index, key)

    def remove(self, key: Numbers) -> None:
        del self._entries[key]
        gone = len(self._keys) - len(self._entries)
        if gone > FEW and gone * GONE_SHARE > len(self._keys):
            self._keys = [kept for kept in self._keys if kept in self._entries]

    def after(self, key: Numbers | None) -> Iterator[tuple[Numbers, Entry]]:
        """Yield the entries after a key, which need not be here, in order; None: all. Nothing may be added or removed
        meanwhile."""
        begin = 0 if key is None else bisect_right(self._keys, key)
        for index in range(begin, len(self._keys)):
            found = self._keys[index]
            if found in self._entries:
                yield found, self._entries[found]
