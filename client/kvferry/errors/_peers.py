"""Errors that a node server or another engine answers with, or that stand for a missing answer."""

from __future__ import annotations

from kvferry.errors._base import KvferryError


class Refused(KvferryError):
    """The peer rejects the request and gives a reason.

    Next step: read the message, which says what the peer rejects; repeating will not help.
    """

    code = "FAILED_PRECONDITION"


class WrongKey(Refused):
    """The key in the reference is wrong. Values: engine_id; publication, if the reference names one."""

    reason = "WRONG_KEY"
    code = "PERMISSION_DENIED"


class WrongSession(Refused):
    """The session secret does not belong to the incarnation. Values: engine_id."""

    reason = "WRONG_SESSION"
    code = "PERMISSION_DENIED"


class WrongIdentity(Refused):
    """The lease was acquired under a certificate that shares no name with this one. Values: lease_number."""

    reason = "WRONG_IDENTITY"
    code = "PERMISSION_DENIED"


class NotAllowed(Refused):
    """The policy of the node server does not let this caller do that. Values: identity, the names in its certificate;
    role, what it lacks; engine_id, for which engine, if it is about one; method."""

    reason = "NOT_ALLOWED"
    code = "PERMISSION_DENIED"


class CacheDiffers(Refused):
    """The rank is already registered, with different content. Values: engine_id, rank, field."""

    reason = "CACHE_DIFFERS"
    code = "ALREADY_EXISTS"


class EngineIdInUse(Refused):
    """Another incarnation of this engine_id is alive; `.retry_after` says when it may have ended. Values: engine_id,
    incarnation."""

    reason = "ENGINE_ID_IN_USE"
    code = "ALREADY_EXISTS"


class PeerRestarted(Refused):
    """The message names an incarnation of the engine that has ended: another took its place, or an operator evicted it.
    Values: engine_id, incarnation, current."""

    reason = "PEER_RESTARTED"


class LeaseEnded(Refused):
    """The lease has ended. Values: lease_number, if the home knows it."""

    reason = "LEASE_ENDED"


class PublicationAborted(Refused):
    """The source aborted the publication. Values: engine_id, publication."""

    reason = "PUBLICATION_ABORTED"


class NotPublished(Refused):
    """The source has given the publication up, because its home did not take it. Values: engine_id, publication; 0 for
    a router's reference."""

    reason = "NOT_PUBLISHED"


class RouterKeyUsed(Refused):
    """Another publication of the engine has, or had a short time ago, the same key of a router. Values: engine_id,
    publication, the number of the other one."""

    reason = "ROUTER_KEY_USED"
    code = "ALREADY_EXISTS"


class ContractDiffers(Refused):
    """Two programs whose revisions of the contract do not work together. Values: party, party_revision, 0 if it says
    none, party_release; other, other_revision, other_release.

    Next step: upgrade the older of the two; docs/operations.md says in which order.
    """

    reason = "CONTRACT_DIFFERS"


class WatchTakenOver(Refused):
    """A newer Watch of the same process has replaced this one. Values: engine_id."""

    reason = "WATCH_TAKEN_OVER"
    code = "ABORTED"


class RelayLoop(Refused):
    """A relayed call reached a node server that is not the home. Values: relayed_by."""

    reason = "RELAY_LOOP"


class HomeNotAllowed(Refused):
    """The reference names a home that this client may not connect to. Values: home.

    Next step: if the address is one of your node servers, add it to the client's allowed_homes, use TLS, or a directory
    that lists it; if not, ask where the reference came from.
    """


class NotImplementedHere(Refused):
    """The server does not offer this part of the contract. Values: what."""

    reason = "NOT_IMPLEMENTED"
    code = "UNIMPLEMENTED"


class NotFound(KvferryError):
    """What the call names does not exist, and will not exist later.

    Next step: compute the request, or look whether its names are right; they may be those of an engine that has
    ended.
    """

    code = "NOT_FOUND"


class EngineUnknown(NotFound):
    """The node server knows no engine of this id. Values: engine_id."""

    reason = "ENGINE_UNKNOWN"


class EngineNotListed(NotFound):
    """The directory does not list the engine. Values: engine_id, directory.

    Next step: see whether the engine's node server publishes in this directory and lists the engine
    (`kvferry engines --all`). One that has just started is listed soon.
    """


class PublicationStale(NotFound):
    """The publication is not live, and its number is not above the highest that the home has seen. Values: engine_id,
    publication."""

    reason = "PUBLICATION_STALE"


class PublicationReleased(NotFound):
    """The publication was released. Values: engine_id, publication, outcome."""

    reason = "PUBLICATION_RELEASED"


class Unavailable(KvferryError):
    """The call cannot be served now; the same call may succeed later.

    Next step: repeat the call, after `retry_after` seconds if it has them. If it lasts, the message says what is
    waited for.
    """

    code = "UNAVAILABLE"


class EngineIncomplete(Unavailable):
    """Some ranks of the engine are not registered: not yet, or no longer. Values: engine_id; missing, how many;
    missing_ranks, the first 64 of them; nodes, the node servers that relayed for some of them."""

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


class DirectoryUnavailable(Unavailable):
    """The directory cannot be read, and has not been read before; or cannot be written. Values: directory, problem.

    Next step: the problem says what failed. Reads whose references carry an address go on without a directory.
    """


class LimitReached(Unavailable):
    """A limit of the server is reached; retry after `.retry_after` seconds. Values: limit, value."""

    reason = "LIMIT"
    code = "RESOURCE_EXHAUSTED"


class MessageTooLarge(KvferryError):
    """The message is larger than a node server accepts; or an answer is larger than the client accepts. Values: what,
    size, limit; if gRPC itself found it: address.

    Next step: publish or register in smaller parts: `what` says what is too large. If gRPC found it, caller and
    node server may be of different versions.
    """

    code = "RESOURCE_EXHAUSTED"


class PublicationTimeout(KvferryError, TimeoutError):
    """The request was not published in time. Values: engine_id, publication, waited_ms."""

    reason = "PUBLICATION_TIMEOUT"
    code = "DEADLINE_EXCEEDED"


class AgentsWithheld(Refused):
    """The home gave the geometry of an engine without its agents, because the caller showed no reference. Values:
    engine_id, missing.

    Next step: give `Cache.warm` the engine's `engine_reference`, or the reference of a live publication.
    """


class BadAgentMetadata(KvferryError):
    """The agent metadata of a rank is missing, or not what the rank announced. Values: engine_id, rank, problem."""

    reason = "BAD_AGENT_METADATA"
    code = "DATA_LOSS"


class InternalError(KvferryError):
    """The server failed; its log has the details under `error_id`."""

    reason = "INTERNAL"
    code = "INTERNAL"
