"""All errors of kvferry, and the only table that maps them to status codes and back.

Messages are for people. Programs use `.reason`, and `.values`, which has every dynamic part of the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

Rebuilt = TypeVar("Rebuilt", bound="KvferryError")

_BY_NAME: dict[str, type[KvferryError]] = {}
_BY_REASON: dict[str, type[KvferryError]] = {}


class KvferryError(Exception):
    """Base of all errors of kvferry.

    Next step: look in the log of the node server that the message names. Only an error that no other class fits is of
    this class, such as that of a peer of a later version.

    Attributes:
        reason: name of the `kvferry.v1.ErrorReason`, e.g. ``"BAD_BLOCK"``; empty for errors that
            never cross the wire.
        code: name of the gRPC status code.
        values: every dynamic value of the message, as strings.
        retry_after: seconds after which to repeat the same call; None: at once, or never.
    """

    reason: str = ""
    code: ClassVar[str] = "UNKNOWN"

    def __init_subclass__(cls, *, reason: str = "", code: str = "") -> None:
        # A class without its own reason or code has those of its base.
        super().__init_subclass__()
        cls.reason, cls.code = reason or cls.reason, code or cls.code
        _BY_NAME.setdefault(cls.__name__, cls)
        if reason:
            _BY_REASON.setdefault(reason, cls)

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
        """Rebuild an error of this class that another process raised, with all attributes. Calling the class does not
        do that, because the constructors of many classes compose the message."""
        error = cls.__new__(cls)
        KvferryError.__init__(error, message, retry_after=retry_after)
        error.values = dict(values)
        error._set_attributes()
        return error

    def _set_attributes(self) -> None:
        """Set further attributes from the message and the values."""

    def __reduce__(self) -> tuple[object, ...]:
        # The state is applied last, so attributes that do not follow from the values are kept.
        return (type(self).rebuilt, (self.message, self.values, self.retry_after), self.__dict__)


# Subclasses are entered by `__init_subclass__`.
_BY_NAME["KvferryError"] = KvferryError


class InvalidInput(KvferryError, ValueError, code="INVALID_ARGUMENT"):
    """An argument is wrong; repeating will not help. Next step: correct the argument that the message names."""


class InvalidField(InvalidInput, reason="INVALID_FIELD"):
    """A field is missing, malformed or out of range. Values: field, value, expected."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        value = repr(value)
        super().__init__(f"{field} is {value}, expected {expected}", field=field, value=value, expected=expected)


class DeadlineRequired(InvalidInput, reason="DEADLINE_REQUIRED"):
    """The call had no deadline."""


class BadGeometry(InvalidInput, reason="BAD_GEOMETRY"):
    """The geometry contradicts itself, or the ranks of an engine together lack units or tokens of a plane that they
    have. Values: where, problem."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}", where=where, problem=problem)


class LayoutMismatch(InvalidInput):
    """An engine's bytes are not where its planes declare them. Values: layer, problem, and those of component, block,
    token, head, expected and found that are known; where bytes were compared, expected and found are hexadecimal.
    Next step: correct the planes or the spec of the layer that is named. With vLLM, use a version that docs/vllm.md
    lists, and report the message otherwise."""

    def __init__(
        self, layer: str, problem: str, *, expected: object = None, found: object = None, **place: str | int | None
    ) -> None:
        compared = "" if expected is None else f": expected {expected}, found {found}"
        super().__init__(f"layer {layer}: {problem}{compared}", layer=layer, problem=problem)
        known = {**place, "expected": expected, "found": found}
        self.values.update({name: str(value) for name, value in known.items() if value is not None})


class BadReference(InvalidInput, reason="BAD_REFERENCE"):
    """The string is not a reference. Values: problem."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"not a kvferry reference: {problem}", problem=problem)


class BadBlock(InvalidInput, reason="BAD_BLOCK"):
    """The block may not be read or written. Values: group, side, block, num_blocks, problem."""

    def __init__(self, group: str, side: str, block: int, num_blocks: int, problem: str) -> None:
        message = f"group {group!r}, {side} block {block} of {num_blocks}: {problem}"
        super().__init__(message, group=group, side=side, block=block, num_blocks=num_blocks, problem=problem)


class BlocksShort(InvalidInput, reason="BLOCKS_SHORT", code="FAILED_PRECONDITION"):
    """The blocks of one side do not cover the tokens that were asked for. Values: group, side, asked, available."""

    def __init__(self, group: str, side: str, asked: str, available: str) -> None:
        message = f"group {group!r}: asked for {asked}, the {side} has {available}"
        super().__init__(message, group=group, side=side, asked=asked, available=available)


class PartiesMismatch(InvalidInput, reason="PARTIES_MISMATCH"):
    """The calls that belong to one read contradict each other. Values: lease_number, field, value, expected."""


class Refused(KvferryError, code="FAILED_PRECONDITION"):
    """The peer rejects the request and gives a reason.
    Next step: read the message, which says what the peer rejects; repeating will not help."""


class WrongKey(Refused, reason="WRONG_KEY", code="PERMISSION_DENIED"):
    """The key in the reference is wrong. Values: engine_id; publication, if the reference names one."""


class WrongSession(Refused, reason="WRONG_SESSION", code="PERMISSION_DENIED"):
    """The session secret does not belong to the incarnation. Values: engine_id."""


class WrongIdentity(Refused, reason="WRONG_IDENTITY", code="PERMISSION_DENIED"):
    """The lease was acquired under a certificate that shares no name with this one. Values: lease_number."""


class NotAllowed(Refused, reason="NOT_ALLOWED", code="PERMISSION_DENIED"):
    """The policy of the node server does not allow the call to this caller. Values: identity, the names in the caller's
    certificate; role, the missing role; engine_id, of the engine, if the call is about an engine; method."""


class CacheDiffers(Refused, reason="CACHE_DIFFERS", code="ALREADY_EXISTS"):
    """The rank is already registered, with different content. Values: engine_id, rank, field."""


class EngineIdInUse(Refused, reason="ENGINE_ID_IN_USE", code="ALREADY_EXISTS"):
    """Another incarnation of this engine_id is alive; it may have ended after `.retry_after` seconds. Values:
    engine_id, incarnation."""


class PeerRestarted(Refused, reason="PEER_RESTARTED"):
    """The message names an incarnation of the engine that has ended: a new incarnation has replaced it, or an operator
    evicted it. Values: engine_id, incarnation, current."""


class LeaseEnded(Refused, reason="LEASE_ENDED"):
    """The lease has ended. Values: lease_number, if the home knows it."""


class PublicationAborted(Refused, reason="PUBLICATION_ABORTED"):
    """The source aborted the publication. Values: engine_id, publication."""


class NotPublished(Refused, reason="NOT_PUBLISHED"):
    """The source has given the publication up, because the home refused it. Values: engine_id, publication; 0 for a
    router's reference."""


class RouterKeyUsed(Refused, reason="ROUTER_KEY_USED", code="ALREADY_EXISTS"):
    """Another publication of the engine has, or had a short time ago, the same key of a router. Values: engine_id,
    publication, the number of the other one."""


class ContractDiffers(Refused, reason="CONTRACT_DIFFERS"):
    """Two programs whose revisions of the contract do not work together. Values: party, party_revision, 0 if the party
    states none, party_release; other, other_revision, other_release.
    Next step: upgrade the older of the two; docs/operations.md says in which order."""


class WatchTakenOver(Refused, reason="WATCH_TAKEN_OVER", code="ABORTED"):
    """A newer Watch of the same process has replaced this one. Values: engine_id."""


class RelayLoop(Refused, reason="RELAY_LOOP"):
    """A relayed call reached a node server that is not the home. Values: relayed_by."""


class HomeNotAllowed(Refused):
    """The reference names a home that this client may not connect to. Values: home.
    Next step: if the address is that of one of your node servers, add it to the client's allowed_homes, use TLS, or use
    a directory that lists it; if not, find out where the reference came from."""


class NotImplementedHere(Refused, reason="NOT_IMPLEMENTED", code="UNIMPLEMENTED"):
    """The server does not offer this part of the contract. Values: what."""


class NotFound(KvferryError, code="NOT_FOUND"):
    """The call names something that does not exist, and will not exist later.
    Next step: compute the request, or check the names; they may be those of an engine that has ended."""


class EngineUnknown(NotFound, reason="ENGINE_UNKNOWN"):
    """The node server knows no engine of this id. Values: engine_id."""


class EngineNotListed(NotFound):
    """The directory does not list the engine. Values: engine_id, directory.
    Next step: check that the engine's node server publishes in this directory and lists the engine (`kvferry engines
    --all`). An engine that has just started is listed soon."""


class PublicationStale(NotFound, reason="PUBLICATION_STALE"):
    """The publication is not live, and its number is not above the highest that the home has seen. Values: engine_id,
    publication."""


class PublicationReleased(NotFound, reason="PUBLICATION_RELEASED"):
    """The publication was released. Values: engine_id, publication, outcome."""


class PrefixMiss(NotFound, reason="PREFIX_MISS"):
    """The engine that was asked for the beginning of a prompt has nothing to read, or did not answer in time. Values:
    engine_id; why, the name of a `kvferry.v1.MissReason` without its prefix."""


class Unavailable(KvferryError, code="UNAVAILABLE"):
    """The call cannot be served now; the same call may succeed later.
    Next step: repeat the call, after `retry_after` seconds if set. If the error lasts, the message names what is
    missing."""


class EngineIncomplete(Unavailable, reason="ENGINE_INCOMPLETE"):
    """Some ranks of the engine are not registered: not yet, or no longer. Values: engine_id; missing, their number;
    missing_ranks, the first 64; nodes, the node servers that relayed for some of these ranks."""


class HomeRecovering(Unavailable, reason="HOME_RECOVERING"):
    """The home restarted and its engines have not refilled it yet. Values: engine_id."""


class ServerDraining(Unavailable, reason="DRAINING"):
    """The node server is draining."""


class Unreachable(Unavailable, reason="UNREACHABLE"):
    """A node server could not be reached. Values: address."""


class DirectoryUnavailable(Unavailable):
    """The directory cannot be read, and has not been read before; or cannot be written. Values: directory, problem.
    Next step: see the problem. Reads whose references carry an address go on without a directory."""


class LimitReached(Unavailable, reason="LIMIT", code="RESOURCE_EXHAUSTED"):
    """A limit of the server is reached; retry after `.retry_after` seconds. Values: limit, value."""


class MessageTooLarge(KvferryError, code="RESOURCE_EXHAUSTED"):
    """The message is larger than a node server accepts; or an answer is larger than the client accepts. Values: what,
    size, limit; if gRPC itself refused the message: address.
    Next step: publish or register in smaller parts: `what` names what is too large. If gRPC refused the message, caller
    and node server may be of different versions."""


class PublicationTimeout(KvferryError, TimeoutError, reason="PUBLICATION_TIMEOUT", code="DEADLINE_EXCEEDED"):
    """The request was not published in time. Values: engine_id, publication, waited_ms."""


class AgentsWithheld(Refused):
    """The home gave the geometry of an engine without its agents, because the caller showed no reference. Values:
    engine_id, missing.
    Next step: give `Cache.warm` the engine's `engine_reference`, or the reference of a live publication."""


class BadAgentMetadata(KvferryError, reason="BAD_AGENT_METADATA", code="DATA_LOSS"):
    """The agent metadata of a rank is missing, or not what the rank announced. Values: engine_id, rank, problem."""


class InternalError(KvferryError, reason="INTERNAL", code="INTERNAL"):
    """The server failed; its log has the details under `error_id`."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why a cache cannot be read.

    Attributes:
        kind: ``identity``, ``group``, ``format``, ``uncovered``, ``held_twice``, ``indivisible``, ``granule`` ...
        where: the plane, group or rank.
        field: the field that differs; empty if the mismatch is not in one field.
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


class Incompatible(Refused, reason="INCOMPATIBLE"):
    """The destination cannot read the source's cache. `.mismatches` lists every reason.

    The message, and the error on the wire, combine mismatches that differ only in the place, because a wrong dtype is
    usually wrong in every layer. They list at most 16; `.values["mismatches"]` is the number of all. `.lines` has the
    sentences of the message.
    """

    SPELLED_OUT = 16
    lines: tuple[str, ...]

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        sorts: dict[tuple[str, ...], tuple[Mismatch, int]] = {}
        for found in mismatches:
            sort = (found.kind, found.field, found.source, found.destination)
            first, alike = sorts.get(sort, (found, -1))
            sorts[sort] = first, alike + 1
        told = list(sorts.values())[: self.SPELLED_OUT]
        self.lines = _sentences(told, len(mismatches))
        super().__init__("; ".join(self.lines))
        self.values = {"mismatches": str(len(mismatches))}
        for index, (found, alike) in enumerate(told):
            for name in Mismatch.__slots__:
                self.values[f"mismatch.{index}.{name}"] = getattr(found, name)
            if alike:
                self.values[f"mismatch.{index}.alike"] = str(alike)
        self.mismatches = mismatches

    def _set_attributes(self) -> None:
        """Set the mismatches from the values. The message is composed again, because the wire may have cut it."""
        told: list[tuple[Mismatch, int]] = []
        while f"mismatch.{len(told)}.kind" in self.values:
            index = len(told)
            found = Mismatch(**{name: self.values.get(f"mismatch.{index}.{name}", "") for name in Mismatch.__slots__})
            told.append((found, _count_in(self.values.get(f"mismatch.{index}.alike", ""))))
        self.mismatches = tuple(found for found, _ in told)
        self.lines = (self.message,)
        if told:
            spelled_out = sum(1 + alike for _, alike in told)
            self.lines = _sentences(told, max(spelled_out, _count_in(self.values.get("mismatches", ""))))
            self.message = "; ".join(self.lines)
            self.args = (self.message,)


def _sentences(told: list[tuple[Mismatch, int]], total: int) -> tuple[str, ...]:
    lines = [found.message + (f" (and {alike} more alike)" if alike else "") for found, alike in told]
    left = total - sum(1 + alike for _, alike in told)
    if left:
        lines.append(f"and {left} more")
    return tuple(lines)


def _count_in(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


class TransferError(KvferryError):
    """A read failed; the contents of its destination blocks are not valid.

    Next step: compute the request, and reuse the destination blocks only when `quiet` is True.

    Attributes:
        quiet: whether no writes to the destination blocks are possible any more (R4). While `quiet` is False, do not
            reuse the blocks; `Read.wait_quiet` waits until it is True. It becomes True in the process that ran the
            transfer; in a copy that was pickled or sent it does not change. In an error that was rebuilt from a message
            without this value, it is False.
    """

    def __init__(self, message: str, *, quiet: bool = True, **values: object) -> None:
        super().__init__(message)
        self.values = {key: str(value) for key, value in values.items()}
        self.quiet = quiet

    def _set_attributes(self) -> None:
        # An error is no proof that writing stopped (R4).
        self.quiet = False


class TransferFailed(TransferError, reason="TRANSFER_FAILED", code="ABORTED"):
    """A rank's share of a read failed: the transfer from a source rank, or something at the reader."""


class TransferExpired(TransferError):
    """The lease ended before the read, or its home did not confirm a read without a lease; its bytes do not count (R1).
    Next step: compute the request. If the error comes again, look for a reader that stops for longer than kvferryd's
    `--ttl`, or a home that the reader cannot reach."""


class TransferCancelled(TransferError):
    """The read was cancelled. Next step: nothing: the engine, or a close, cancelled the read."""


class TransferStuck(TransferError, reason="TRANSFER_STUCK", code="DEADLINE_EXCEEDED"):
    """The read did not end by its deadline (R5)."""


class DataLoss(TransferError, reason="DATA_LOSS", code="DATA_LOSS"):
    """The bytes that were read do not match the source's checksums (integrity mode). Values: plane, source_rank, place,
    unit, source_block, destination_blocks, expected, computed: of the first mismatch; mismatches: their number."""


class PromptMismatch(TransferError, reason="PROMPT_MISMATCH", code="FAILED_PRECONDITION"):
    """The publication is of another prompt than the reader's: a router has confused two requests. The bytes do not
    count, and the publication was not declined. Values: request_id, tokens, reader; source_request_id, engine_id,
    publication, marked, the ends of the source's marks."""


class PromptUnmarked(TransferError, reason="PROMPT_UNMARKED", code="FAILED_PRECONDITION"):
    """No mark of the source covers the tokens to read, and the reader's `prompt_check` is "require". Values: those of
    `PromptMismatch`."""


class NixlMissing(KvferryError):
    """NIXL is not installed, or cannot be loaded.
    Next step: install 'kvferry[nixl]', for the CUDA version of torch; `problem` says why the installed NIXL cannot be
    loaded."""


class NixlError(KvferryError, reason="NIXL_FAILED", code="ABORTED"):
    """A call to NIXL failed. A posted read may still be writing. Values: call, peer, problem."""


class WrongState(KvferryError, code="FAILED_PRECONDITION"):
    """The call comes at the wrong time: the arguments are valid, but another step is missing, or was already done. The
    message says what to do. Values: those of the call, such as engine_id, rank.
    Next step: take the step that the message names."""


class WrongThread(KvferryError):
    """A thread used a reading agent of another thread, which would crash. Values: agent, call.
    Next step: report it with its traceback: only kvferry's own threads make such calls."""


class ForkedClient(KvferryError):
    """A client was used in a child of the process that made it: neither gRPC nor NIXL survives a fork.
    Next step: make a client in the child, after the fork."""


class Closed(KvferryError):
    """The client, cache or session is closed.
    Next step: make a new client or session, or stop using the closed one; look for the `close` that came too early."""


def from_name(
    name: str, message: str, values: Mapping[str, str], *, retry_after: float | None = None, quiet: bool = False
) -> KvferryError:
    """Rebuild an error of another process of the same engine from the name of its class and its attributes; an unknown
    name gives an `InternalError`. `quiet` is that of a `TransferError`."""
    error = _BY_NAME.get(name, InternalError).rebuilt(message, values, retry_after)
    if isinstance(error, TransferError):
        error.quiet = quiet
    return error


def from_reason(
    reason: str, message: str, values: Mapping[str, str], retry_after: float | None = None
) -> KvferryError | None:
    """Rebuild a peer's error from the name of its ErrorReason without the prefix, the message, the ErrorInfo's metadata
    and RetryInfo's seconds; None for a reason that is not kvferry's."""
    cls = _BY_REASON.get(reason)
    return None if cls is None else cls.rebuilt(message, values, retry_after)


__all__ = [*sorted(_BY_NAME), "Mismatch", "from_name", "from_reason"]
