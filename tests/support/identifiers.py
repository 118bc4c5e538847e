"""Unique identifiers."""

from __future__ import annotations

import uuid


def unique_id(prefix: str) -> str:
    """A unique engine_id."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
