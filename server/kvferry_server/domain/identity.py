"""Identities: one start of an engine, and the names in a certificate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Names: TypeAlias = frozenset[bytes]  # The names in a verified certificate

NOBODY: Names = frozenset()  # The names of a caller without a certificate


@dataclass(frozen=True, slots=True, order=True)
class EngineRef:
    """One start of an engine."""

    engine_id: str  # the stable name
    incarnation: bytes  # 16 bytes, derived from the session secret that one process of the engine draws per start

    def __str__(self) -> str:
        return f"engine {self.engine_id!r}, incarnation {self.incarnation.hex()}"


@dataclass(frozen=True, slots=True)
class RouterKey:
    """What a router chose, in a reference that it made itself, to name a request."""

    name: str  # The router_key, unique at its engine. Public, like a request_id.
    key: bytes = field(repr=False)  # The reference's key, 16 bytes. Secret.


@dataclass(frozen=True, slots=True)
class RouterReference:
    """A reference that a router made: the source, as the router named it, and the key that it chose."""

    engine_id: str
    data_parallel_rank: int
    router_key: RouterKey
