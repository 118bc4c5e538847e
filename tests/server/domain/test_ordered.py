"""Entries in the order of their keys, from any key on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_server.domain.ordered import Ordered

keys = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(st.tuples(st.booleans(), keys)), st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple))
def test_what_is_there_is_listed_in_order_from_any_key_on(
    steps: list[tuple[bool, tuple[int, int]]], after: tuple[int, ...] | None
) -> None:
    ordered, there = Ordered[str](), dict[tuple[int, ...], str]()
    for added, key in steps:
        if added and key not in there:
            there[key] = str(key)
            ordered.add(key, there[key])
        elif not added and key in there:
            del there[key]
            ordered.remove(key)
    assert len(ordered) == len(there)
    assert list(ordered.after(after)) == sorted((k, v) for k, v in there.items() if after is None or k > after)


def test_what_is_not_there_cannot_be_removed() -> None:
    ordered = Ordered[str]()
    ordered.add((1,), "one")
    with pytest.raises(KeyError):
        ordered.remove((2,))
    assert list(ordered.after(None)) == [((1,), "one")]
