"""The sum by its definition, in plain integers."""

from __future__ import annotations

MASK = 2**64 - 1


def mix(value: int) -> int:
    """The finaliser of splitmix64."""
    value = value * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def sum_of(text: bytes) -> int:
    """The 32-bit sum of a string."""
    total = mix(MASK - len(text))
    for index in range(-(-len(text) // 8)):
        word = int.from_bytes(text[8 * index : 8 * index + 8].ljust(8, b"\0"), "little", signed=True)
        total += word * mix(2 * index + 1) + (word >> 32) * mix(2 * index + 2)
    return (total & MASK) >> 32
