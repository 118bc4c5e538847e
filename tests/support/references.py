"""References as routers change them."""

from __future__ import annotations

from kvferry._wire.reference import format_reference, parse_reference


def without_marks(reference: str) -> str:
    """The reference as a router would make it that wants to hide whose it is."""
    parsed = parse_reference(reference)
    del parsed.marks[:]
    parsed.ClearField("hint")
    return format_reference(parsed)
