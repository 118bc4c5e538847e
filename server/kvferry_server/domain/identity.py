"""Who somebody is: one start of an engine, and the names of a certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Names: TypeAlias = frozenset[bytes]
"""What a verified certificate calls its owner."""

NOBODY: Names = frozenset()
"""A caller without a certificate."""


@dataclass(frozen=True, slots=True, order=True)
class EngineRef:
    """One start of an engine.

    Attributes:
        engine_id: the stable name.
        incarnation: 16 bytes, the digest of the session secret that one process of the engine draws per start.
    """

    engine_id: str
    incarnation: bytes

    def __str__(self) -> str:
        return f"engine {self.engine_id!r}, incarnation {self.incarnation.hex()}"
