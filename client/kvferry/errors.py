"""Every error of kvferry, and the one table that maps them to status codes and back.

    KvferryError
    ├── InvalidInput (ValueError)      an argument is wrong; repeating will not help
    │   ├── InvalidField
    │   ├── DeadlineRequired
    │   ├── BadGeometry
    │   ├── BadReference
    │   ├── BadBlock
    │   ├── BlocksShort
    │   └── PartiesMismatch
    ├── WrongState                     the call comes at the wrong time; the message says what to do first
    ├── Refused                        the peer rejects the request, and says why
    │   ├── Incompatible               .mismatches names every field with both values
    │   ├── WrongKey
    │   ├── WrongSession
    │   ├── WrongIdentity
    │   ├── CacheDiffers
    │   ├── EngineIdInUse              retry after .retry_after seconds
    │   ├── PeerRestarted
    │   ├── LeaseEnded
    │   ├── PublicationAborted
    │   ├── WatchTakenOver
    │   ├── RelayLoop
    │   ├── AgentsWithheld             who shows no reference cannot reach an engine's memory
    │   ├── HomeNotAllowed             the client's own allow-list does not cover a reference's home
    │   └── NotImplementedHere
    ├── NotFound
    │   ├── EngineUnknown
    │   ├── PublicationStale
    │   └── PublicationReleased
    ├── Unavailable                    retry as is
    │   ├── EngineIncomplete
    │   ├── HomeRecovering
    │   ├── ServerDraining
    │   ├── Unreachable
    │   └── LimitReached
    ├── MessageTooLarge                .values name the size and the limit
    ├── PublicationTimeout (TimeoutError)
    ├── BadAgentMetadata
    ├── TransferError                  a read that gave no good bytes; .quiet says whether its blocks may be reused
    │   ├── TransferFailed
    │   ├── TransferExpired
    │   ├── TransferCancelled
    │   ├── TransferStuck
    │   └── DataLoss                   integrity mode: bytes are not those that the source had summed
    ├── NixlError                      NIXL refused or lost something
    ├── NixlMissing                    NIXL is not installed
    ├── WrongThread                    a reading agent was used by a thread that does not own it
    ├── ForkedClient                   a client was used in a child of the process that made it
    ├── Closed                         a closed client, cache or session was used
    └── InternalError

Messages are for people. What a program needs is in `.reason` and in `.values`, which hold every dynamic part of the
message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

__all__ = [
    "AgentsWithheld",
    "BadAgentMetadata",
    "BadBlock",
    "BadGeometry",
    "BadReference",
    "BlocksShort",
    "CacheDiffers",
    "Closed",
    "DataLoss",
    "DeadlineRequired",
    "EngineIdInUse",
    "EngineIncomplete",
    "EngineUnknown",
    "ForkedClient",
    "HomeNotAllowed",
    "HomeRecovering",
    "Incompatible",
    "InternalError",
    "InvalidField",
    "InvalidInput",
    "KvferryError",
    "LeaseEnded",
    "LimitReached",
    "MessageTooLarge",
    "Mismatch",
    "NixlError",
    "NixlMissing",
    "NotFound",
    "NotImplementedHere",
    "PartiesMismatch",
    "PeerRestarted",
    "PublicationAborted",
    "PublicationReleased",
    "PublicationStale",
    "PublicationTimeout",
    "Refused",
    "RelayLoop",
    "ServerDraining",
    "TransferCancelled",
    "TransferError",
    "TransferExpired",
    "TransferFailed",
    "TransferStuck",
    "Unavailable",
    "Unreachable",
    "WatchTakenOver",
    "WrongIdentity",
    "WrongKey",
    "WrongSession",
    "WrongState",
    "WrongThread",
    "from_name",
    "from_reason",
]


Rebuilt = TypeVar("Rebuilt", bound="KvferryError")


class KvferryError(Exception):
    """Base of all errors of kvferry.

    Attributes:
        reason: name of the `kvferry.v1.ErrorReason` without its prefix, e.g. ``"BAD_BLOCK"``; empty for errors that
            never cross the wire.
        code: name of the gRPC status code that carries it.
        values: every dynamic value of the message, as strings.
        retry_after: seconds after which repeating the same call makes sense; None if it does not, or at once is fine.
    """

    reason: ClassVar[str] = ""
    code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, retry_after: float | None = None, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.values: dict[str, str] = {key: str(value) for key, value in values.items()}

    @property
    def retryable(self) -> bool:
        """Whether repeating the same call can help (PROTOCOL, Errors)."""
        return self.code == "UNAVAILABLE" or self.retry_after is not None

    @classmethod
    def rebuilt(
        cls: type[Rebuilt], message: str, values: Mapping[str, str], retry_after: float | None = None
    ) -> Rebuilt:
        """An error of this class as another process raised it, from what it said; every attribute of the class is set.

        This is the only way in which errors are rebuilt: the constructors of many classes put their message together.
        """
        error = cls.__new__(cls)
        KvferryError.__init__(error, message, retry_after=retry_after)
        error.values = dict(values)
        error._set_attributes()
        return error

    def _set_attributes(self) -> None:
        """Set what this class has beside its message and values, as far as they tell it."""

    def __reduce__(self) -> tuple[object, ...]:
        # The state comes last, so an attribute that the values don't tell is what it was.
        return (_unpickled, (type(self), self.message, self.values, self.retry_after), self.__dict__)


def _unpickled(
    cls: type[KvferryError], message: str, values: Mapping[str, str], retry_after: float | None
) -> KvferryError:
    return cls.rebuilt(message, values, retry_after)


class InvalidInput(KvferryError, ValueError):
    """An argument is wrong; repeating will not help."""

    code = "INVALID_ARGUMENT"


class InvalidField(InvalidInput):
    """A field is missing, malformed or out of range. Values: field, value, expected."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(
            f"{field} is {value!r}, expected {expected}", field=field, value=repr(value), expected=expected
        )


class DeadlineRequired(InvalidInput):
    """The call had no deadline."""

    reason = "DEADLINE_REQUIRED"


class BadGeometry(InvalidInput):
    """A geometry that contradicts itself. Values: where, problem."""

    reason = "BAD_GEOMETRY"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}", where=where, problem=problem)


class BadReference(InvalidInput):
    """A reference that is not one. Values: problem."""

    reason = "BAD_REFERENCE"

    def __init__(self, problem: str) -> None:
        super().__init__(f"not a kvferry reference: {problem}", problem=problem)


class BadBlock(InvalidInput):
    """A block id that may not be read or written. Values: group, side, block, num_blocks, problem."""

    reason = "BAD_BLOCK"

    def __init__(self, group: str, side: str, block: int, num_blocks: int, problem: str) -> None:
        super().__init__(
            f"group {group!r}, {side} block {block} of {num_blocks}: {problem}",
            group=group,
            side=side,
            block=block,
            num_blocks=num_blocks,
            problem=problem,
        )


class BlocksShort(InvalidInput):
    """One side's blocks do not hold the asked tokens. Values: group, side, asked, available."""

    reason = "BLOCKS_SHORT"
    code = "FAILED_PRECONDITION"

    def __init__(self, group: str, side: str, asked: str, available: str) -> None:
        super().__init__(
            f"group {group!r}: asked for {asked}, the {side} has {available}",
            group=group,
            side=side,
            asked=asked,
            available=available,
        )


class PartiesMismatch(InvalidInput):
    """Calls of one read disagree. Values: lease_number, field, value, expected."""

    reason = "PARTIES_MISMATCH"


class WrongState(KvferryError):
    """The call comes at the wrong time: no argument is wrong, but something else has to be done first, or was done
    already. The message says what to do. Never crosses the wire. Values: engine_id, rank, request_id ..., whatever the
    call was about."""

    code = "FAILED_PRECONDITION"


class Refused(KvferryError):
    """The peer rejects the request, and says why."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why a cache cannot be read.

    Attributes:
        kind: ``identity``, ``group``, ``format``, ``uncovered``, ``held_twice``, ``indivisible``, ``granule`` ...
        where: the plane, group or rank it is about.
        field: the field that differs; empty where it is not about one field.
        source: the source's value.
        destination: the destination's value.
        message: one sentence for people.
    """

    kind: str
    where: str
    field: str
    source: str
    destination: str
    message: str


class Incompatible(Refused):
    """The caches of two engines cannot be read from each other; `.mismatches` says why, completely.

    In the message, and on the wire, those that differ only in where they are stand as one, since a wrong dtype is wrong
    in every layer; at most 16 are spelled out. `.values["mismatches"]` is the number of all.
    """

    reason = "INCOMPATIBLE"
    SPELLED_OUT = 16

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        sorts: dict[tuple[str, ...], tuple[Mismatch, int]] = {}
        for found in mismatches:
            sort = (found.kind, found.field, found.source, found.destination)
            first, alike = sorts.get(sort, (found, -1))
            sorts[sort] = first, alike + 1
        told = list(sorts.values())[: self.SPELLED_OUT]
        super().__init__(_message(told, len(mismatches)))
        self.values = {"mismatches": str(len(mismatches))}
        for index, (found, alike) in enumerate(told):
            for name in Mismatch.__slots__:
                self.values[f"mismatch.{index}.{name}"] = getattr(found, name)
            if alike:
                self.values[f"mismatch.{index}.alike"] = str(alike)
        self.mismatches = mismatches

    def _set_attributes(self) -> None:
        """The mismatches that were spelled out, and the message that they make, which the wire may have cut."""
        told: list[tuple[Mismatch, int]] = []
        while f"mismatch.{len(told)}.kind" in self.values:
            index = len(told)
            found = Mismatch(**{name: self.values.get(f"mismatch.{index}.{name}", "") for name in Mismatch.__slots__})
            told.append((found, _number(self.values.get(f"mismatch.{index}.alike", ""))))
        self.mismatches = tuple(found for found, _ in told)
        if told:
            spelled_out = sum(1 + alike for _, alike in told)
            self.message = _message(told, max(spelled_out, _number(self.values.get("mismatches", ""))))
            self.args = (self.message,)


def _message(told: list[tuple[Mismatch, int]], total: int) -> str:
    lines = [found.message + (f" (and {alike} more alike)" if alike else "") for found, alike in told]
    left = total - sum(1 + alike for _, alike in told)
    if left:
        lines.append(f"and {left} more")
    return "; ".join(lines)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


class WrongKey(Refused):
    """The reference's key is not the publication's, or the engine's. Values: engine_id; publication, if it is the
    reference of one."""

    reason = "WRONG_KEY"
    code = "PERMISSION_DENIED"


class WrongSession(Refused):
    """The session secret is not that of the incarnation. Values: engine_id."""

    reason = "WRONG_SESSION"
    code = "PERMISSION_DENIED"


class WrongIdentity(Refused):
    """The lease was acquired under a certificate that shares no name with this one. Values: lease_number."""

    reason = "WRONG_IDENTITY"
    code = "PERMISSION_DENIED"


class CacheDiffers(Refused):
    """The rank is registered with another content. Values: engine_id, rank, field."""

    reason = "CACHE_DIFFERS"
    code = "ALREADY_EXISTS"


class EngineIdInUse(Refused):
    """Another incarnation of this engine_id lives; `.retry_after` says when it can be gone. Values: engine_id,
    incarnation."""

    reason = "ENGINE_ID_IN_USE"
    code = "ALREADY_EXISTS"


class PeerRestarted(Refused):
    """A message about an incarnation that is not the engine's any more. Values: engine_id, incarnation, current."""

    reason = "PEER_RESTARTED"


class LeaseEnded(Refused):
    """The lease is not live. Values: lease_number, if the home knows it."""

    reason = "LEASE_ENDED"


class PublicationAborted(Refused):
    """The source aborted the publication. Values: engine_id, publication."""

    reason = "PUBLICATION_ABORTED"


class WatchTakenOver(Refused):
    """A newer Watch of the same process took over. Values: engine_id."""

    reason = "WATCH_TAKEN_OVER"
    code = "ABORTED"


class RelayLoop(Refused):
    """A relayed registration reached a node server that is not the home. Values: relayed_by."""

    reason = "RELAY_LOOP"


class HomeNotAllowed(Refused):
    """A reference names a home that this client may not dial. Values: home."""


class NotImplementedHere(Refused):
    """A part of the contract that this server does not offer. Values: what."""

    reason = "NOT_IMPLEMENTED"
    code = "UNIMPLEMENTED"


class NotFound(KvferryError):
    """There is no such thing, and there will not be."""

    code = "NOT_FOUND"


class EngineUnknown(NotFound):
    """No engine of this id. Values: engine_id."""

    reason = "ENGINE_UNKNOWN"


class PublicationStale(NotFound):
    """A publication number at or below the high-water mark that is not live. Values: engine_id, publication."""

    reason = "PUBLICATION_STALE"


class PublicationReleased(NotFound):
    """The publication was released. Values: engine_id, publication, outcome."""

    reason = "PUBLICATION_RELEASED"


class Unavailable(KvferryError):
    """Not now; the same call may work later."""

    code = "UNAVAILABLE"


class EngineIncomplete(Unavailable):
    """Not all ranks are registered (yet, or any more). Values: engine_id; missing_ranks, the first 64 of them, and
    missing, how many; nodes, the node servers that relayed for some of them."""

    reason = "ENGINE_INCOMPLETE"


class HomeRecovering(Unavailable):
    """The home restarted and its engines have not refilled it yet. Values: engine_id."""

    reason = "HOME_RECOVERING"


class ServerDraining(Unavailable):
    """The node server is draining."""

    reason = "DRAINING"


class Unreachable(Unavailable):
    """A node server could not be reached. Values: address."""

    reason = "UNREACHABLE"


class LimitReached(Unavailable):
    """A limit of the server; retry after `.retry_after` seconds. Values: limit, value."""

    reason = "LIMIT"
    code = "RESOURCE_EXHAUSTED"


class MessageTooLarge(KvferryError):
    """A message that no node server takes, or one from a node server that is larger than a client takes. Values: what,
    size, limit; from gRPC itself: address."""

    code = "RESOURCE_EXHAUSTED"


class PublicationTimeout(KvferryError, TimeoutError):
    """The publication did not come in time. Values: engine_id, publication, waited_ms."""

    reason = "PUBLICATION_TIMEOUT"
    code = "DEADLINE_EXCEEDED"


class AgentsWithheld(Refused):
    """A home told an engine's geometry alone, because it was shown no reference. Values: engine_id, missing."""


class BadAgentMetadata(KvferryError):
    """Agent metadata that is not what was announced. Values: engine_id, rank, problem."""

    reason = "BAD_AGENT_METADATA"
    code = "DATA_LOSS"


class TransferError(KvferryError):
    """A read that gave no good bytes.

    Attributes:
        quiet: True when nothing can write to the destination blocks any more (R4). False: the blocks stay quarantined
            until the read is seen quiet; `Read.wait_quiet` waits for that. In the process whose transfer it was this
            becomes True by itself when it is so; in a pickle or a message it stays what it was. False in an error
            rebuilt from a message that does not say it.
    """

    def __init__(self, message: str, *, quiet: bool = True, **values: object) -> None:
        super().__init__(message)
        self.values = {key: str(value) for key, value in values.items()}
        self.quiet = quiet

    def _set_attributes(self) -> None:
        # An error is no proof that writing stopped (R4).
        self.quiet = False


class TransferFailed(TransferError):
    """A transfer to a source rank failed."""


class TransferExpired(TransferError):
    """The lease ended before the read did; the bytes don't count (R1)."""


class TransferCancelled(TransferError):
    """The read was cancelled."""


class TransferStuck(TransferError):
    """The read did not end by its deadline (R5)."""


class DataLoss(TransferError):
    """Bytes that were read are not those that the source had summed (integrity mode). Values: plane, source_rank,
    place, unit, source_block, destination_blocks, expected, computed: of the first mismatch; mismatches: how many."""

    reason = "DATA_LOSS"
    code = "DATA_LOSS"


class NixlMissing(KvferryError):
    """NIXL is not installed, or cannot be loaded."""


class NixlError(KvferryError):
    """NIXL refused or lost something. Values: call, peer, problem.

    Proves nothing about a posted read: see `ReadHandle`.
    """


class WrongThread(KvferryError):
    """A reading agent was used on another thread than its own, which would be a crash. Values: agent, call."""


class ForkedClient(KvferryError):
    """A client was used in a child of the process that made it: neither gRPC nor NIXL survive a fork."""


class Closed(KvferryError):
    """A closed client, cache or session was used."""


class InternalError(KvferryError):
    """The server failed; its log has the details under `error_id`."""

    reason = "INTERNAL"
    code = "INTERNAL"


def _subclasses(cls: type[KvferryError]) -> list[type[KvferryError]]:
    return [found for sub in cls.__subclasses__() for found in [sub, *_subclasses(sub)]]


_BY_REASON: dict[str, type[KvferryError]] = {cls.reason: cls for cls in _subclasses(KvferryError) if cls.reason}


def from_name(
    name: str,
    message: str,
    values: Mapping[str, str],
    *,
    retry_after: float | None = None,
    quiet: bool = False,
) -> KvferryError:
    """The error that another process of the same engine raised, rebuilt from the name of its class.

    Args:
        name: of the class; an unknown one is an `InternalError`.
        message, values, retry_after: its own.
        quiet: its own, if it is a `TransferError`.
    """
    known: list[type[KvferryError]] = [KvferryError, *_subclasses(KvferryError)]
    error = next((cls for cls in known if cls.__name__ == name), InternalError).rebuilt(message, values, retry_after)
    if isinstance(error, TransferError):
        error.quiet = quiet
    return error


def from_reason(
    reason: str, message: str, values: Mapping[str, str], retry_after: float | None = None
) -> KvferryError | None:
    """The error a peer raised, rebuilt from its reason and metadata; None if the reason is not one of ours.

    Args:
        reason: name of the ErrorReason without its prefix.
        message: the status message.
        values: the metadata of the ErrorInfo.
        retry_after: seconds, from RetryInfo.
    """
    cls = _BY_REASON.get(reason)
    return None if cls is None else cls.rebuilt(message, values, retry_after)
