"""The name of one start of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class EngineRef:
    """One start of an engine.

    Attributes:
        engine_id: the stable name.
        incarnation: 16 bytes, random, chosen once per start by one process of the engine.
    """

    engine_id: str
    incarnation: bytes

    def __str__(self) -> str:
        return f"engine {self.engine_id!r}, incarnation {self.incarnation.hex()}"
