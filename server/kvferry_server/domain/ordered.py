"""A mapping whose entries are listed in the order of their keys, from any key on, without going through the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

Numbers: TypeAlias = "tuple[int, ...]"
"""A key: numbers that name an entry within its incarnation."""

Entry = TypeVar("Entry")


class Ordered(Generic[Entry]):
    """Entries by numbers. Numbers mostly rise, so that adding one takes no longer than to a list."""

    def __init__(self) -> None:
        self._keys: list[Numbers] = []
        self._entries: dict[Numbers, Entry] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Numbers, entry: Entry) -> None:
        """Add an entry under a new key."""
        insort(self._keys, key)
        self._entries[key] = entry

    def remove(self, key: Numbers) -> None:
        """Remove an entry; KeyError if there is none."""
        del self._entries[key]
        del self._keys[bisect_left(self._keys, key)]

    def after(self, key: Numbers | None) -> Iterator[tuple[Numbers, Entry]]:
        """Yield the entries after a key, which need not be here, in order; None: all. Nothing may be added or removed
        meanwhile."""
        begin = 0 if key is None else bisect_right(self._keys, key)
        for index in range(begin, len(self._keys)):
            found = self._keys[index]
            yield found, self._entries[found]
