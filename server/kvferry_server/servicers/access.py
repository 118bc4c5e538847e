"""Access: roles, the policy that says which identity has which role, for which engines, and the only table of the roles
that each method needs. A method that is not in the table is refused. The guard asks before a handler sees the request,
so that a refusal does not reveal what exists.

An identity is a name in a caller's verified certificate: a DNS name (``node-7.prefill.example``) or a URI
(``spiffe://fleet/prefill/7``). A URI has a colon and a DNS name has none, so neither is taken for the other.

A role replaces no secret: a caller still has to show the session secret, the reference's key or the lease_id that the
call needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any

from kvferry._wire.reference import engine_ids, parse_reference
from kvferry.errors import BadReference, NotAllowed
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.servicers.callers import Context, identities_of
from kvferry_server.servicers.limits import MAX_NOTIFICATIONS, MAX_TEXT
from kvferry_server.servicers.notify import OF_A_SOURCE

MAX_KEPT = 4096  # Callers whose grants are kept, per listener
EVERY = "*"  # The pattern of every engine_id
ANYBODY = "**"  # The pattern of every identity; as a part of a pattern, any number of parts


class PolicyRole(Enum):
    """A role that a policy grants."""

    ENGINE = "engine"  # Open and register these engines, publish in their names, and decline their references
    READER = "reader"  # Read from these engines, and decline their references
    RELAY = "relay"  # Relay for ranks of these engines
    OBSERVER = "observer"  # List, describe and plan (Introspection)
    ADMIN = "admin"  # Act as an operator (Admin)


@dataclass(frozen=True, slots=True)
class Need:
    """The role that a call needs: one of `roles`, for an engine."""

    roles: tuple[PolicyRole, ...]
    engine_id: str | None = None  # the engine that the call is about; None: the role for any engine is enough
    or_engine_id: str | None = None  # another engine for which the role is enough as well


@dataclass(frozen=True, slots=True)
class Grant:
    """The roles that a caller has: shell patterns of engine_ids for each, `EVERY` if it is not per engine."""

    engine: tuple[str, ...] = ()
    reader: tuple[str, ...] = ()
    relay: tuple[str, ...] = ()
    observer: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def allows(self, need: Need) -> bool:
        for role in need.roles:
            engines = self._engines(role)
            names = [name for name in (need.engine_id, need.or_engine_id) if name is not None]
            if engines and (need.engine_id is None or any(map(_any_of(engines).match, names))):
                return True
        return False

    def covers(self, roles: Iterable[PolicyRole]) -> bool:
        """Whether each of these roles is granted for every engine, so that no request has to be looked at."""
        return all(EVERY in self._engines(role) for role in roles)

    def _engines(self, role: PolicyRole) -> tuple[str, ...]:
        granted: tuple[str, ...] = getattr(self, role.value)
        return granted

    def __or__(self, other: Grant) -> Grant:
        return Grant(**{role.value: self._engines(role) + other._engines(role) for role in PolicyRole})


@lru_cache(MAX_KEPT)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return shell patterns as one: a batch may name a thousand engines, and a policy as many patterns."""
    return re.compile("|".join(map(translate, patterns)))


OPERATOR = Grant(**{role.value: (EVERY,) for role in PolicyRole})  # Every role, for all engines
MEMBER = replace(OPERATOR, admin=())  # Every role but admin


@dataclass(frozen=True, slots=True)
class Rule:
    """A grant for all callers with an identity that fits one of these patterns."""

    identities: tuple[str, ...]
    grant: Grant


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A grant for every caller, and grants for callers with certain identities. All rules that fit count together."""

    everyone: Grant = MEMBER
    rules: tuple[Rule, ...] = ()

    def granted(self, identities: Collection[str]) -> Grant:
        granted = self.everyone
        for rule in self.rules:
            if any(identity_matches(pattern, identity) for pattern in rule.identities for identity in identities):
                granted |= rule.grant
        return granted


def identity_matches(pattern: str, identity: str) -> bool:
    """Whether an identity fits a shell pattern, compared part by part: between the dots of a DNS name, whose case does
    not count, and between the slashes of a URI. So ``*`` is one part or within one, as in certificates. A part ``**``
    is any number of parts, and the pattern ``**`` is every identity."""
    if pattern == ANYBODY:
        return True
    if (":" in identity) != (":" in pattern):
        return False
    stop = "/" if ":" in identity else "."
    if stop == ".":
        pattern, identity = pattern.lower(), identity.lower()
    wanted, found = pattern.split(stop), identity.split(stop)
    if ANYBODY not in wanted:
        return len(wanted) == len(found) and all(map(fnmatchcase, found, wanted))
    at = wanted.index(ANYBODY)
    head, tail = wanted[:at], wanted[at + 1 :]
    if len(found) < len(head) + len(tail):
        return False
    ends = found[len(found) - len(tail) :]
    return all(map(fnmatchcase, found, head)) and all(map(fnmatchcase, ends, tail))


ENGINE, READER, RELAY = PolicyRole.ENGINE, PolicyRole.READER, PolicyRole.RELAY
OBSERVER, ADMIN = PolicyRole.OBSERVER, PolicyRole.ADMIN

OF_A_READ = frozenset({"validate", "ask"})  # Notifications about a reference that a reader has no lease on


@dataclass(frozen=True, slots=True)
class Entry:
    """The roles that a method needs."""

    # A caller with all of these for every engine may send any request, and a caller with none of them is refused before
    # the request is read. Empty: every caller may.
    roles: tuple[PolicyRole, ...]
    # Returns what one request needs beyond one of these roles: all of it must be granted.
    needs: Callable[[Any], Iterable[Need]] = lambda _: ()


def _in_an_engines_name(request: pb.RegisterCacheRequest | pb.WatchRequest) -> tuple[Need]:
    # A scheduler's Watch, which opens the engine, is never relayed: otherwise a relay could take engine_ids.
    opens = isinstance(request, pb.WatchRequest) and request.role == pb.WATCH_ROLE_SCHEDULER
    role = RELAY if request.relayed_by and not opens else ENGINE
    return (Need((role,), request.engine.engine_id),)


def _handshake(request: pb.HandshakeRequest) -> tuple[Need]:
    if request.reader.engine_id == request.engine_id:
        # An engine gets its own geometry, and no agents.
        return (Need((READER, ENGINE), request.engine_id),)
    # With a reference the answer has agents. Geometry alone is also in answers of Introspection.
    return (Need((READER,) if request.reference else (READER, OBSERVER), request.engine_id),)


def _named(reference: str) -> tuple[str, ...]:
    """Return the names of the engines that a reference may mean; none: it is malformed."""
    try:
        named = parse_reference(reference)
    except BadReference:
        # The handler raises a detailed error.
        return ()
    return engine_ids(named.engine_id, named.data_parallel_rank) if named.router_key else (named.engine_id,)


def _read(reference: str) -> tuple[Need, ...]:
    # The read is from whichever of these engines is alive, so the role is needed for each.
    return tuple(Need((READER,), engine_id) for engine_id in _named(reference)) or (Need((READER,)),)


def _decline(decline: pb.Decline) -> tuple[Need]:
    # A source declines as well, when it will not publish under a router's key; it could abort its publication. A node
    # server sends a decline on under its own certificate, after asking its own policy about the caller.
    roles = (READER, ENGINE, RELAY) if decline.relayed_by else (READER, ENGINE)
    return (Need(roles, *_named(decline.reference)),)


def _notify(request: pb.NotifyRequest) -> Iterator[Need]:
    if len(request.notifications) > MAX_NOTIFICATIONS:
        # The handler refuses the whole batch. Looking at half a million notifications would block the loop for seconds.
        yield Need((ENGINE, READER, RELAY))
        return
    kinds = {notification.WhichOneof("kind") for notification in request.notifications}
    for kind in kinds - OF_A_READ - {"decline"}:
        if kind in OF_A_SOURCE:
            # `rank_left` comes from the node server that relays the rank's Watch.
            yield Need((ENGINE, RELAY) if kind == "rank_left" else (ENGINE,), request.sender.engine_id)
        else:
            # The lease_id names the read, and a lease accepts only the identity that acquired it.
            yield Need((READER,))
    declines = (n.decline for n in request.notifications if n.HasField("decline"))
    yield from dict.fromkeys(need for decline in declines for need in _decline(decline))
    # Like a call of ReadBlocks: no lease was acquired before.
    of_reads = (n for n in request.notifications if n.WhichOneof("kind") in OF_A_READ)
    references = (n.ask.reference or n.validate.reference for n in of_reads)
    yield from dict.fromkeys(need for reference in references for need in _read(reference))
    if not kinds:
        yield Need((ENGINE, READER, RELAY))


EVERYBODY = Entry(())  # The entry of methods that every connected caller may call

TABLE: Mapping[str, Entry] = {
    "/kvferry.v1.KVTransfer/RegisterCache": Entry((ENGINE, RELAY), _in_an_engines_name),
    "/kvferry.v1.KVTransfer/Watch": Entry((ENGINE, RELAY), _in_an_engines_name),
    "/kvferry.v1.KVTransfer/Handshake": Entry((READER, ENGINE, OBSERVER), _handshake),
    "/kvferry.v1.KVTransfer/ReadBlocks": Entry((READER,), lambda request: _read(request.reference)),
    "/kvferry.v1.KVTransfer/ReadChecksums": Entry((READER,)),
    "/kvferry.v1.KVTransfer/Notify": Entry((ENGINE, READER, RELAY), _notify),
    **{
        f"/kvferry.v1.Introspection/{method}": Entry((OBSERVER,))
        for method in ("GetServerInfo", "ListEngines", "GetEngine", "ListRequests", "ListTransfers", "PlanRead")
    },
    **{
        f"/kvferry.v1.Admin/{method}": Entry((ADMIN,))
        for method in ("EndLease", "AbortPublication", "EvictEngine", "Drain")
    },
    # For probes, load balancers, and tools that ask for the contract, which is public.
    "/grpc.health.v1.Health/Check": EVERYBODY,
    "/grpc.health.v1.Health/List": EVERYBODY,
    "/grpc.health.v1.Health/Watch": EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": EVERYBODY,
}
"""By path of the method."""


class Access:
    """Decides over the calls of one listener. `identities` is called only where identities count."""

    def __init__(
        self, policy: Callable[[], Policy], identities: Callable[[Context], tuple[str, ...]] = identities_of
    ) -> None:
        self._policy = policy
        self._identities = identities
        # A policy may have many rules.
        self._granted = lru_cache(MAX_KEPT)(Policy.granted)

    def admit(self, method: str, context: Context) -> Callable[[Any], None]:
        """Check that a caller may call a method, whatever the request. Returns the check of the request. Both raise
        `NotAllowed`."""
        entry = TABLE.get(method)
        if entry is None:
            raise NotAllowed(f"{method} is not open to anybody here", identity="", role="", engine_id="", method=method)
        policy = self._policy()
        if policy.everyone.covers(entry.roles):
            return _admitted
        identities = self._identities(context)
        granted = self._granted(policy, identities)
        if granted.covers(entry.roles):
            return _admitted

        def check(needs: Iterable[Need]) -> None:
            for need in needs:
                if not granted.allows(need):
                    raise _refusal(method, identities, need)

        check((Need(entry.roles),))
        return lambda request: check(entry.needs(request))


def _admitted(_: object) -> None:
    """Check nothing: the caller may send any request."""


def _refusal(method: str, identities: tuple[str, ...], need: Need) -> NotAllowed:
    role = " or ".join(role.value for role in need.roles)
    caller = ", ".join(identities)
    who = f"a caller with the identity {caller}" if caller else "a caller without an identity in a certificate"
    # No handler has checked the engine_id yet, so it may be as long as a message.
    engine_id = (need.engine_id or "")[:MAX_TEXT]
    what = f" for engine {engine_id!r}" if need.engine_id is not None else ""
    if need.roles == (ADMIN,):
        then = "call over the node's UNIX socket, or give the identity that role in the file of kvferryd's --policy"
    else:
        then = "if it should have it, give it to the identity in the file that kvferryd's --policy names"
    return NotAllowed(
        f"{who} does not have the role {role}{what}, which {method.rpartition('/')[2]} takes: {then}",
        identity=caller,
        role=role,
        engine_id=engine_id,
        method=method,
    )


# For UNIX sockets: a caller that may enter the directory is trusted like the node.
TRUSTED = Access(lambda: Policy(OPERATOR), lambda _: ())

# For TCP without client certificates: every caller is a member, none an admin.
UNKNOWN_CALLERS = Access(lambda: Policy(MEMBER), lambda _: ())
