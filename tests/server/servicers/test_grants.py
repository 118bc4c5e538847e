"""Grants of a policy, without certificates."""

from __future__ import annotations

import pytest

from kvferry_server.servicers.access import (
    EVERY,
    MEMBER,
    OPERATOR,
    Grant,
    Need,
    Policy,
    PolicyRole,
    Rule,
    identity_matches,
)

ENGINE, READER, RELAY = PolicyRole.ENGINE, PolicyRole.READER, PolicyRole.RELAY


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("node-1.example", ["node-1.example", "NODE-1.Example"], ["node-1.example.org", "xnode-1.example", "example"]),
        ("*.example", ["a.example"], ["a.b.example", "example", ".a.example"]),
        ("node-*.example", ["node-.example", "node-12.example"], ["node-1.x.example"]),
        ("**.example", ["a.example", "a.b.example", "example"], ["example.org"]),
        (
            "spiffe://fleet/decode/*",
            ["spiffe://fleet/decode/7"],
            ["spiffe://fleet/decode/7/x", "spiffe://fleet/decode"],
        ),
        ("spiffe://fleet/**", ["spiffe://fleet/a", "spiffe://fleet/a/b"], ["spiffe://other/a", "spiffe://fleet.b/a"]),
        ("spiffe://fleet/**/7", ["spiffe://fleet/7", "spiffe://fleet/a/b/7"], ["spiffe://fleet/a/8"]),
        ("spiffe://*/decode", ["spiffe://fleet/decode"], ["spiffe://evil/fleet/decode"]),
        ("spiffe://Fleet/a", ["spiffe://Fleet/a"], ["spiffe://fleet/a"]),
        ("*", ["localhost"], ["a.b", "spiffe://fleet/a", "urn:x"]),
        ("**", ["localhost", "a.b", "spiffe://fleet/a"], []),
    ],
)
def test_a_pattern_fits_names_part_by_part(pattern: str, fits: list[str], does_not: list[str]) -> None:
    assert [name for name in fits if not identity_matches(pattern, name)] == []
    assert [name for name in does_not if identity_matches(pattern, name)] == []


def test_rules_that_fit_count_together() -> None:
    policy = Policy(
        Grant(),
        (
            Rule(("a.example",), Grant(engine=("p-*",))),
            Rule(("*.example",), Grant(reader=("d-1", "d-2"))),
            Rule(("b.example",), Grant(admin=(EVERY,))),
        ),
    )
    granted = policy.granted(("other", "a.example"))
    assert granted == Grant(engine=("p-*",), reader=("d-1", "d-2"))
    assert policy.granted(("other",)) == policy.granted(()) == Grant()


def test_a_role_is_for_the_engines_that_its_patterns_fit() -> None:
    granted = Grant(engine=("p-*",), observer=(EVERY,))
    assert granted.allows(Need((ENGINE,), "p-1"))
    assert granted.allows(Need((READER, ENGINE), "p-1"))
    assert not granted.allows(Need((ENGINE,), "d-1"))
    assert not granted.allows(Need((ENGINE,), ""))
    assert not granted.allows(Need((READER,), "p-1"))
    # For any engine.
    assert granted.allows(Need((ENGINE,)))
    assert not granted.allows(Need((RELAY,)))
    assert granted.allows(Need((PolicyRole.OBSERVER,)))
    assert not granted.covers((ENGINE,))
    assert Grant(engine=("p-*", "*")).covers((ENGINE,))


def test_member_has_every_role_but_admin_and_an_operator_all() -> None:
    roles = set(PolicyRole)
    assert {role for role in roles if MEMBER.covers((role,))} == roles - {PolicyRole.ADMIN}
    assert OPERATOR.covers(roles)
    assert Policy().granted(("anybody",)) == MEMBER
