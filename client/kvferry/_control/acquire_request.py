"""What a read asks for, and what it is granted: the values of an `Acquisition`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry import _arguments as arguments
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.questions import AskedPrefix
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.right_prompt import ReaderPrompt
from kvferry._prompt import Prompt
from kvferry._tracing import NO_SPAN, Span
from kvferry._wire.reference import engine_ids, format_reference, parse_reference
from kvferry.errors import InvalidField, NotPublished, PublicationAborted, PublicationTimeout, TransferExpired
from kvferry.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class ReadTerms:
    """How a publication is acquired: arguments that `Cache.read` explains. They are checked here."""

    timeout: float
    traceparent: str = ""
    prompt: Prompt = Prompt.unknown
    progressive: bool = False
    expected_reads: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", arguments.seconds("timeout", self.timeout))
        arguments.check_fields(self)
        arguments.integer("expected_reads", self.expected_reads, 0, 2**31 - 1)


@dataclass(slots=True, eq=False)
class AcquireRequest:
    """Asks for one read of one publication. Once a read with a router's reference is accepted, `reference` and `text`
    are the publication's own, and `given` is the router's.

    Attributes:
        parties: number of ranks that share the read_id, and will report.
        expected_reads: number of reads that will be made of the publication; 0: the number that its source gave.
        deadline: time on `kvferry._clock` until which to wait for the publication.
        progressive: return the lease with the first blocks; if False, with all blocks.
        hint: the hint in the given reference; empty: none, or it must not be used.
        asked: what the source is asked to publish under the reference; None: nothing, since somebody else has.
        span: the caller's; once the read was started, that of its acquisition.
    """

    home: Control
    reference: pb.Reference = field(repr=False)
    text: str = field(repr=False)
    read_id: str
    parties: int
    expected_reads: int
    deadline: float
    prompt: ReaderPrompt = field(default_factory=ReaderPrompt)
    span: Span = NO_SPAN
    progressive: bool = False
    given: str = field(default="", repr=False)
    hint: bytes = field(default=b"", repr=False)
    asked: AskedPrefix | None = None

    def is_for(self, reference: str) -> bool:
        """Whether this reference is the publication's own, or the one that the engine gave."""
        return reference in (self.text, self.given)

    def found(self, reference: str, source: pb.EngineRef, publication: int) -> None:
        """Use the publication's own reference from now on. Its home stays the one that was asked, also in the string:
        the answer of a home must not direct this client, or a later owner of the string, to another host. Raises
        `InvalidField` or `BadReference` if the answer contradicts itself, or is about another engine."""
        parsed, asked = parse_reference(reference), self.reference
        named = (parsed.engine_id, parsed.incarnation, parsed.publication)
        if parsed.router_key or named != (source.engine_id, source.incarnation, publication):
            raise InvalidField("reference of a publication", "another publication's", "that of the one accepted")
        engines = engine_ids(asked.engine_id, asked.data_parallel_rank)
        if parsed.engine_id not in engines:
            raise InvalidField("source of a publication", parsed.engine_id, f"{' or '.join(engines)}, as asked")
        parsed.home, self.given = asked.home, self.text
        self.reference, self.text = parsed, format_reference(parsed)

    @property
    def named(self) -> str:
        """What is read, for logs and errors."""
        if self.reference.router_key:
            return f"what engine {self.reference.engine_id!r} publishes as {self.reference.router_key!r}"
        return f"publication {self.reference.publication} of engine {self.reference.engine_id!r}"

    def timed_out(self) -> PublicationTimeout:
        """Make the error for a publication that was not complete in time."""
        return PublicationTimeout(f"{self.named} was not complete in time", **self._publication)

    def expired(self, problem: str) -> TransferExpired:
        return TransferExpired(f"read {self.read_id}: {problem}", read_id=self.read_id)

    def revoked(self, request_id: str, number: int) -> NotPublished | PublicationAborted:
        """Make the error for a publication that was revoked for the reason of this number."""
        if number == pb.REVOKE_REASON_NOT_PUBLISHED:
            problem = "was given up by its source, whose home did not take it; the source's log says why"
            return NotPublished(f"{self.named} {problem}", **self._publication)
        known = number in pb.RevokeReason.values()
        reason = pb.RevokeReason.Name(pb.RevokeReason.ValueType(number)) if known else f"{number}"
        message = f"the publication of request {request_id!r} was revoked: {reason.removeprefix('REVOKE_REASON_')}"
        return PublicationAborted(message, **self._publication)

    @property
    def _publication(self) -> dict[str, Any]:
        return {"engine_id": self.reference.engine_id, "publication": self.reference.publication}


@dataclass(frozen=True, slots=True, eq=False)
class Acquired:
    """A lease, and the first blocks that the lease covers. `request_id` is the source's name for the request;
    `accepted_at`, for metrics, when the home's promise arrived, on `kvferry._clock`."""

    lease: ReaderLease
    source: pb.EngineRef
    request_id: str
    part: GrantedPart
    accepted_at: float = 0.0

    @property
    def hinted(self) -> bool:
        """Whether there is no lease: the blocks are from a hint, and count only once the home has validated the
        read."""
        return not self.lease.lease_id

    def promises_as(self, other: Acquired) -> bool:
        """Whether both are the same but for their leases."""
        mine, theirs = self.part, other.part
        promised = (self.source, self.request_id, mine.blocks, mine.told, mine.complete)
        return promised == (other.source, other.request_id, theirs.blocks, theirs.told, theirs.complete)
