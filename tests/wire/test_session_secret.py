"""What follows from a session secret: fixed values, since engines in other languages compute them too."""

from __future__ import annotations

import hashlib
import hmac

from kvferry import EngineSpec, EngineToken, Group
from kvferry._client import RegisterCache
from kvferry._wire.authority import PublicationKeys, engine_key, incarnation_of, new_session_secret, read_id_of

SECRET = bytes(range(32))


def test_derived_values_are_those_of_the_contract() -> None:
    def mac(message: bytes) -> bytes:
        return hmac.new(SECRET, message, hashlib.sha256).digest()[:16]

    assert incarnation_of(SECRET) == hashlib.sha256(b"kvferry incarnation 1" + SECRET).digest()[:16]
    assert PublicationKeys(SECRET).key(258) == mac(b"kvferry publication 1\0\0\0\0\0\0\x01\x02")
    assert engine_key(SECRET) == mac(b"kvferry engine 1\0\0\0\0\0\0\0\0")
    assert read_id_of(SECRET, "ü") == mac(b"kvferry read 1\xc3\xbc")
    assert incarnation_of(SECRET).hex() == "d71e5bf712394a46a5879c146bbc5207"
    assert PublicationKeys(SECRET).key(1).hex() == "db54b5bf47f46449c649ed204b38be41"


def test_derived_values_differ_by_secret_number_and_name() -> None:
    other = new_session_secret()
    values = [
        f(secret)
        for secret in (SECRET, other)
        for f in (
            incarnation_of,
            engine_key,
            lambda secret: PublicationKeys(secret).key(0),
            lambda secret: PublicationKeys(secret).key(1),
            lambda secret: PublicationKeys(secret).key(2**64 - 1),
            lambda secret: read_id_of(secret, ""),
            lambda secret: read_id_of(secret, "a"),
        )
    ]
    assert len(set(values)) == len(values)
    assert {len(value) for value in values} == {16}


def test_a_token_carries_the_secret_and_shows_the_incarnation() -> None:
    token = EngineToken("prefill", SECRET, "node:1")
    assert EngineToken.parse(str(token)) == token
    assert token.incarnation == incarnation_of(SECRET)
    assert repr(SECRET)[2:-1] not in repr(token)
    assert SECRET.hex() not in repr(token)


def test_the_arguments_of_a_registration_do_not_show_its_token() -> None:
    token = str(EngineToken("prefill", SECRET, "node:1"))
    assert token not in repr(
        RegisterCache(EngineSpec("prefill", (Group("full", block_tokens=1, num_blocks=1),)), token=token)
    )
