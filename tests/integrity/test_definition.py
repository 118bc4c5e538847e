"""The sum of a string of bytes, against its definition in plain integers; and that it notices what it should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.planner.checksum import padded, sampled, sums_of
from tests.integrity.definition import sum_of


def numpy_sum(text: bytes) -> int:
    words = np.frombuffer(text.ljust(padded(len(text)), b"\0"), np.int64).reshape(1, 1, -1)
    return int(sums_of(words, len(text))[0, 0])


@given(st.binary(min_size=1, max_size=200))
def test_sum_is_as_defined(text: bytes) -> None:
    assert numpy_sum(text) == sum_of(text)


def test_sums_are_the_same_in_every_release() -> None:
    """Engines of different versions compare them: these values are part of the contract."""
    assert sum_of(b"\0") == 0x61BC8EA8
    assert sum_of(bytes(range(256))) == 0x467EF0C9


@given(st.binary(min_size=1, max_size=64), st.data())
def test_sum_changes_with_any_byte(text: bytes, data: st.DataObject) -> None:
    at, change = data.draw(st.integers(0, len(text) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(text)
    changed[at] ^= change
    assert sum_of(bytes(changed)) != sum_of(text)


def test_sum_depends_on_the_highest_bits() -> None:
    """Sums that wrap forget them easily: two flipped signs must not cancel out."""
    text = bytes(range(64))
    found = {sum_of(text)}
    for a in range(64):
        for b in range(a):
            changed = bytearray(text)
            changed[a] ^= 0x80
            changed[b] ^= 0x80
            found.add(sum_of(bytes(changed)))
    assert len(found) == 1 + 64 * 63 // 2


def test_sum_depends_on_length_and_order() -> None:
    assert len({sum_of(bytes(count)) for count in range(1, 100)}) == 99
    assert sum_of(b"abcdefghABCDEFGH") != sum_of(b"ABCDEFGHabcdefgh")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_sample_has_its_share_and_is_part_of_larger_samples(share: float) -> None:
    places = np.arange(20_000)
    for publication in (1, 2, 2**40):
        chosen = sampled(publication, places, share)
        assert share / 1.25 < chosen.mean() < share * 1.25
        assert sampled(publication, places, min(1.0, 2 * share))[chosen].all()
        # A block is not judged by where it lies in the list.
        assert np.array_equal(sampled(publication, places[500:], share), chosen[500:])
    assert not np.array_equal(sampled(1, places, share), sampled(2, places, share))


def test_sample_can_be_everything_or_nothing() -> None:
    places = np.arange(1000)
    assert sampled(7, places, 1.0).all()
    assert not sampled(7, places, 0.0).any()
