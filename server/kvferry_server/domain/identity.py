"""Identities: one start of an engine, and the names in a certificate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry._wire.authority import question_name

Names: TypeAlias = frozenset[bytes]  # The names in a verified certificate

NOBODY: Names = frozenset()  # The names of a caller without a certificate


@dataclass(frozen=True, slots=True, order=True)
class EngineRef:
    """One start of an engine."""

    engine_id: str
    incarnation: bytes  # 16 bytes, derived from the session secret that one process of the engine draws per start

    def __str__(self) -> str:
        return f"engine {self.engine_id!r}, incarnation {self.incarnation.hex()}"


@dataclass(frozen=True, slots=True)
class RouterKey:
    """A router's own name for a request, in a reference that the router made, with the reference's key."""

    name: str  # The router_key, unique at its engine. Public, like a request_id.
    key: bytes = field(repr=False)  # 16 bytes, secret

    @property
    def of_question(self) -> bool:
        """Whether an asker, and no router, made the reference (`kvferry.v1.Ask`)."""
        return self.name == question_name(self.key)


@dataclass(frozen=True, slots=True)
class RouterReference:
    """A reference that a router made."""

    home: str  # the address in the reference
    engine_ids: tuple[str, ...]  # names that the source may have
    router_key: RouterKey
