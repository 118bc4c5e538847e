"""Roles, and the policy: which identity has which role, for which engines. Knows neither gRPC nor files.

An identity is a name in a caller's verified certificate: a DNS name (``node-7.prefill.example``) or a URI
(``spiffe://fleet/prefill/7``). A URI has a colon and a DNS name has none, so neither is taken for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

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
            if engines and need.engine_id is None:
                return True
            names = [name for name in (need.engine_id, need.or_engine_id) if name is not None]
            if any(fnmatchcase(name, pattern) for pattern in engines for name in names):
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
