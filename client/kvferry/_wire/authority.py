"""The session secret of an engine, and the values derived from it (PROTOCOL, Authority).

The process that opens an engine draws a random session secret. The incarnation is a digest of the secret, so that a
home which has lost its records can verify the engine again. The keys of references are derived from the secret, so that
a home can check keys without storing any. The read_ids that ranks share are derived too: ranks agree on a read_id
without a message, and other processes cannot guess the read_id.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SECRET_BYTES = 32
INCARNATION_BYTES = 16
KEY_BYTES = 16  # Of a reference's key
AGENT_KEY_BYTES = 32
READ_ID_BYTES = 16

AGENT_PREFIX = "kvferry.agent/"
"""Prefix of the names of agents that have a key."""


def new_session_secret() -> bytes:
    """Draw a session secret for a new incarnation."""
    return secrets.token_bytes(SECRET_BYTES)


def incarnation_of(session_secret: bytes) -> bytes:
    """Derive the incarnation that a session secret proves."""
    return hashlib.sha256(b"kvferry incarnation 1" + session_secret).digest()[:INCARNATION_BYTES]


class PublicationKeys:
    """The keys in the references of one engine's publications."""

    def __init__(self, session_secret: bytes) -> None:
        # Once for all keys: OpenSSL takes longer to begin an HMAC than to compute it.
        self._begun = hmac.new(session_secret, b"kvferry publication 1", hashlib.sha256)

    def key(self, publication: int) -> bytes:
        found = self._begun.copy()
        found.update(publication.to_bytes(8, "big"))
        return found.digest()[:KEY_BYTES]


def read_id_of(session_secret: bytes, name: str) -> bytes:
    """Derive the read_id for the home from the name that the ranks of a read share. The name is not secret."""
    return _derived(session_secret, b"kvferry read 1" + name.encode())


def engine_key(session_secret: bytes) -> bytes:
    """Derive the key in an engine's own reference."""
    return _derived(session_secret, b"kvferry engine 1" + bytes(8))


def question_name(key: bytes) -> str:
    """Derive the router_key of a question's reference from the reference's key. An asker can then take no name that a
    router uses, and a home recognises the answer to a question, also one that has ended, by its name."""
    return hashlib.sha256(b"kvferry question 1" + key).hexdigest()[:32]


def agent_name(agent_key: bytes, engine_id: str, rank: int) -> str:
    """Name an agent after its key. Readers identify agents by name alone. Homes register this name only with its key,
    which readers never receive, so no other rank can take the name."""
    return f"{AGENT_PREFIX}{_agent_digest(agent_key)}/{engine_id}/{rank}"


def has_agent_key(name: str) -> bool:
    """Return whether homes register this agent name only with its key."""
    return name.startswith(AGENT_PREFIX)


def proves_agent(agent_key: bytes, name: str) -> bool:
    """Return whether the key belongs to this agent name, or the name needs no key."""
    if not has_agent_key(name):
        return True
    digest = name.removeprefix(AGENT_PREFIX).partition("/")[0]
    return hmac.compare_digest(digest.encode(), _agent_digest(agent_key).encode())


def _agent_digest(agent_key: bytes) -> str:
    return hashlib.sha256(b"kvferry agent 1" + agent_key).hexdigest()


def _derived(session_secret: bytes, message: bytes) -> bytes:
    """Derive 16 bytes that do not reveal the secret. Messages of different kinds never have a common prefix."""
    return hmac.digest(session_secret, message, "sha256")[:16]
