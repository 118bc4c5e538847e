"""Identifiers that nobody else has."""

from __future__ import annotations

import uuid


def unique_id(prefix: str) -> str:
    """An engine_id nobody else has."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
