"""Entries in the order of their keys, from any key on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_server.domain import ordered as module
from kvferry_server.domain.ordered import Ordered

keys = st.tuples(st.integers(0, 3), st.integers(0, 2))


@given(
    st.lists(st.tuples(st.booleans(), keys)),
    st.none() | st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([0, 3, module.FEW]),
)
def test_entries_are_listed_in_order_from_any_key_on(
    steps: list[tuple[bool, tuple[int, int]]], after: tuple[int, ...] | None, few: int
) -> None:
    ordered, there = Ordered[str](), dict[tuple[int, ...], str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", few)
        for number, (added, key) in enumerate(steps):
            if added and key not in there:
                there[key] = str(number)
                ordered.add(key, there[key])
            elif not added and key in there:
                del there[key]
                ordered.remove(key)
    assert len(ordered) == len(there)
    assert list(ordered.after(after)) == sorted((k, v) for k, v in there.items() if after is None or k > after)


def test_keys_of_removed_entries_are_dropped() -> None:
    ordered = Ordered[int]()
    for number in range(100_000):
        ordered.add((number,), number)
        if number >= 10:
            ordered.remove((number - 10,))
    assert [entry for _, entry in ordered.after(None)] == list(range(99_990, 100_000))
    assert len(ordered._keys) <= 2 * module.FEW


def test_missing_entry_cannot_be_removed() -> None:
    ordered = Ordered[str]()
    ordered.add((1,), "one")
    with pytest.raises(KeyError):
        ordered.remove((2,))
    assert list(ordered.after(None)) == [((1,), "one")]
