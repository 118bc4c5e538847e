"""The policy: which identity has which role, for which engines. Pure: it knows neither gRPC nor files.

An identity is a name in a caller's verified certificate: a DNS name (``node-7.prefill.example``) or a URI
(``spiffe://fleet/prefill/7``). A URI has a colon and a DNS name has none, so the one is never taken for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

EVERY = "*"  # The pattern of every engine_id
ANYBODY = "**"  # The pattern of every identity, and the part of one that stands for any number of parts


class PolicyRole(Enum):
    """What a policy lets a caller do."""

    ENGINE = "engine"  # Open and register these engines, publish in their names, and decline their references
    READER = "reader"  # Read from these engines, and decline their references
    RELAY = "relay"  # Relay for ranks of these engines
    OBSERVER = "observer"  # List, describe and plan (Introspection)
    ADMIN = "admin"  # Act as an operator (Admin)


@dataclass(frozen=True, slots=True)
class Need:
    """What a call takes: one of `roles`, for an engine."""

    roles: tuple[PolicyRole, ...]  # one of them is enough
    engine_id: str | None = None  # the engine that the call is about; None: the role for any engine is enough
    # Another engine that the call may be about; the role for it is enough as well. None: no other.
    or_engine_id: str | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """What somebody may do."""

    # Shell patterns of the engine_ids that each role is for.
    engine: tuple[str, ...] = ()
    reader: tuple[str, ...] = ()
    relay: tuple[str, ...] = ()
    observer: bool = False
    admin: bool = False

    def allows(self, need: Need) -> bool:
        """Whether this is enough."""
        for role in need.roles:
            engines = self._engines(role)
            if engines and need.engine_id is None:
                return True
            names = [name for name in (need.engine_id, need.or_engine_id) if name is not None]
            if any(matches(pattern, name) for pattern in engines for name in names):
                return True
        return False

    def covers(self, roles: Iterable[PolicyRole]) -> bool:
        """Whether each of these roles is granted for every engine, so that no request needs to be looked at."""
        return all(EVERY in self._engines(role) for role in roles)

    def _engines(self, role: PolicyRole) -> tuple[str, ...]:
        """The patterns of engine_ids that a role is for. A role that is for no engine in particular is for all."""
        granted: tuple[str, ...] | bool = getattr(self, role.value)
        if isinstance(granted, bool):
            return (EVERY,) if granted else ()
        return granted

    def __or__(self, other: Grant) -> Grant:
        return Grant(
            engine=self.engine + other.engine,
            reader=self.reader + other.reader,
            relay=self.relay + other.relay,
            observer=self.observer or other.observer,
            admin=self.admin or other.admin,
        )


MEMBER = Grant(engine=(EVERY,), reader=(EVERY,), relay=(EVERY,), observer=True)  # Every role but admin, for all engines
OPERATOR = MEMBER | Grant(admin=True)  # Every role


@dataclass(frozen=True, slots=True)
class Rule:
    """A grant for all who have an identity that fits one of these patterns."""

    identities: tuple[str, ...]
    grant: Grant


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may do what."""

    # what every caller may do, whoever it is
    everyone: Grant = MEMBER
    # What callers with certain identities may do as well. All rules that fit count together.
    rules: tuple[Rule, ...] = ()

    def granted(self, identities: Collection[str]) -> Grant:
        """Return what a caller with these identities may do."""
        granted = self.everyone
        for rule in self.rules:
            if any(identity_matches(pattern, identity) for pattern in rule.identities for identity in identities):
                granted |= rule.grant
        return granted


def matches(pattern: str, engine_id: str) -> bool:
    """Whether an engine_id fits a shell pattern."""
    return fnmatchcase(engine_id, pattern)


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
