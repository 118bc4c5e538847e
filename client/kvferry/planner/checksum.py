"""The 32-bit sum of the bytes that one unit keeps in one block: its definition, in numpy.

Integrity mode compares the reader's bytes with the bytes that the source held when it published, unit by unit. The sum
of (source plane, source block, unit) is the sum of a string of bytes that does not depend on their position: the
published states of the block, in rising order, ``state_bytes`` each. A rank that holds all of these states, in any
layout, shard or block size, gets the same sum; and since sums are looked up by block index, right bytes in a wrong
block are found.

The string, padded with zeros to words of 64 bits (little-endian, two's complement), has the sum ::

    T = start(length) + sum over words i of (word[i] * weight[2i] + (word[i] >> 32) * weight[2i + 1])     mod 2**64
    sum = T >> 32

with an arithmetic shift, ``start(n) = mix(2**64 - 1 - n)`` and ``weight[k] = mix(k + 1)``, where `mix` is the finaliser
of splitmix64. That is Multilinear of Lemire and Kaser ("Strongly universal string hashing is fast", 2014) over the
32-bit halves of the words: with random weights any two different strings of one length have the same sum with a
probability of 2**-32. The weights are fixed, so the sum guards against accidents (stale, mixed, torn or misplaced
bytes), not against adversaries. It needs only wrapping integer multiplications and additions, so numpy and torch agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.blocks import TOKEN_LIMIT

Words: TypeAlias = npt.NDArray[np.int64]
Sums: TypeAlias = npt.NDArray[np.uint32]

WORD = 8
"""Bytes of a word."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def padded(length: int) -> int:
    """Bytes of a string of `length` bytes after padding."""
    return -(-length // WORD) * WORD


@lru_cache(maxsize=64)
def weights(words: int) -> tuple[Words, Words]:
    """The weights of whole words and of their upper halves, ``int64[words]`` each."""
    found = _mix(np.arange(1, 2 * words + 1, dtype=np.uint64)).view(np.int64)
    whole, upper = np.ascontiguousarray(found[0::2]), np.ascontiguousarray(found[1::2])
    # All threads share the weights.
    whole.flags.writeable = upper.flags.writeable = False
    return whole, upper


def start(length: int) -> int:
    """The initial value of the sum of a string of `length` bytes, as a signed number."""
    value = np.array([~np.uint64(length)], np.uint64)
    return int(_mix(value).view(np.int64)[0])


def sums_of(words: Words, length: int) -> Sums:
    """The sums of strings of `length` bytes each, ``uint32[blocks, units]``. `words` are ``int64[blocks, units,
    padded(length) / 8]``; the bytes past `length` are zero."""
    whole, upper = weights(words.shape[2])
    total = np.einsum("buw,w->bu", words, whole)
    total += np.einsum("buw,w->bu", words >> 32, upper)
    total += np.int64(start(length))
    sums: Sums = (total.view(np.uint64) >> np.uint64(32)).astype(np.uint32)
    return sums


def sampled(publication: int, indices: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """The blocks of a publication that are summed if only a share of its blocks is (0.0: none, 1.0: all), ``bool[n]``.

    A function of the publication's number and the indices of the source's blocks alone, so that a source and its
    readers choose the same blocks without a message. A larger share contains the blocks of a smaller one.
    """
    seed = _mix(np.array([publication], np.uint64))
    drawn = _mix(indices.astype(np.uint64) + seed) >> np.uint64(32)
    return drawn < np.uint64(round(share * 2**32))


def places_of(starts: Sequence[int], counts: Sequence[int], most: int) -> npt.NDArray[np.int64]:
    """The block indices of a peer's runs; raises `InvalidField` unless they rise and are 1 to `most` in number."""
    firsts, lengths = np.array(starts, np.uint64), np.array(counts, np.uint64)
    expected = f"runs that rise, of together 1 to {most} places below {TOKEN_LIMIT}"
    if not 0 < len(firsts) == len(lengths) <= most or int(lengths.min()) < 1 or int(firsts.max()) >= TOKEN_LIMIT:
        raise InvalidField("places", f"{len(firsts)} starts, {len(lengths)} counts", expected)
    total = int(lengths.sum())
    # Counts have 32 bits, so that neither sum wraps.
    if total > most or bool((firsts[1:] < (firsts + lengths)[:-1]).any()):
        raise InvalidField("places", total, expected)
    before = np.cumsum(lengths) - lengths
    indices: npt.NDArray[np.int64] = np.arange(total, dtype=np.int64)
    indices += np.repeat((firsts - before).view(np.int64), lengths.view(np.int64))
    return indices


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """See the module's docstring."""
    value = value * _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
