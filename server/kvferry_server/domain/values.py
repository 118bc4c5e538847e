"""The values of the domain: engines, references of routers, reads, reports and verdicts."""

from __future__ import annotations

import enum
from collections.abc import Hashable
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


LEASE_BYTES = 1024  # Bytes that a lease takes in memory, with its entries in the home's indexes; estimated
REPORT_BYTES = 160  # Bytes that a rank's report takes in memory, estimated


class LeaseState(enum.IntEnum):
    """The state of a read, numbered as in the proto. The lease is live in the first two."""

    WAITING = 1
    READING = 2
    VALID = 3
    FAILED = 4
    CANCELLED = 5
    EXPIRED = 6


class RankOutcome(enum.IntEnum):
    """How the transfer of one rank ended, numbered as in the proto."""

    DONE = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4


class Verdict(enum.IntEnum):
    """The home's verdict on a report, numbered as in the proto."""

    VALID = 1
    EXPIRED = 2
    UNKNOWN = 3


class RevokeReason(enum.IntEnum):
    """Why a lease is not renewed any more, numbered as in the proto."""

    ABORTED = 1
    SOURCE_LOST = 2
    FINAL_DEADLINE = 3
    OPERATOR = 4
    NOT_PUBLISHED = 5


@dataclass(frozen=True, slots=True)
class RankReport:
    """The end of one rank's transfer."""

    rank: int  # of the reader
    outcome: RankOutcome
    bytes: int = 0  # bytes moved
    reason: str = ""  # name of an ErrorReason; empty: none


@dataclass(frozen=True, slots=True)
class ReadKey:
    """The identity of a read: calls with equal keys belong to one read (PROTOCOL, Identities)."""

    source: EngineRef
    publication: int
    reader: EngineRef
    read_id: bytes = field(repr=False)  # 16 bytes, a secret of the reader


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A reader's call for a lease on a publication."""

    read: ReadKey
    key: bytes = field(repr=False)  # the key in the reference
    parties: int = 1  # ranks that will report
    expected_reads: int = 0  # reads that the publication will get; 0: as its source stated
    names: Names = NOBODY  # the names in the caller's certificate
    host: str = ""  # the host the call came from; empty if unknown
    # The reference if a router made it: the call waits for a publication under the router's key, and source,
    # publication and its own key are filled in once they are known.
    routed: RouterReference | None = None

    @property
    def holder(self) -> Hashable:
        """The holder in budgets: the host, because readers choose their own names; the reader if that is unknown."""
        return self.host or self.read.reader

    @property
    def size(self) -> int:
        """Estimated bytes of its lease in memory, with the reports of all participants: a report always has room."""
        return LEASE_BYTES + REPORT_BYTES * self.parties
