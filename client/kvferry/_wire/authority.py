"""The session secret of an engine, and the values derived from it (PROTOCOL, Authority).

The process that opens an engine draws a random session secret. The incarnation is a digest of it, so that a home which
has lost its records can verify the engine again. The keys of references are derived from it, so that a home can check
them without storing any. The read_ids that ranks share are derived from it too: the ranks need no message to agree on
one, and nobody else can guess it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SECRET_BYTES = 32
"""Bytes of a session secret."""

INCARNATION_BYTES = 16
"""Bytes of an incarnation."""

KEY_BYTES = 16
"""Bytes of a reference's key."""


def new_session_secret() -> bytes:
    """Draw a session secret for a new incarnation."""
    return secrets.token_bytes(SECRET_BYTES)


def incarnation_of(session_secret: bytes) -> bytes:
    """Derive the incarnation that a session secret proves."""
    return hashlib.sha256(b"kvferry incarnation 1" + session_secret).digest()[:INCARNATION_BYTES]


def publication_key(session_secret: bytes, publication: int) -> bytes:
    """Derive the key in the reference of a publication."""
    return _derived(session_secret, b"kvferry publication 1" + publication.to_bytes(8, "big"))


def read_id_of(session_secret: bytes, name: str) -> bytes:
    """Derive the read_id that is sent to the home from the name that the ranks of a read share. The name is not
    secret."""
    return _derived(session_secret, b"kvferry read 1" + name.encode())


def engine_key(session_secret: bytes) -> bytes:
    """Derive the key in an engine's own reference."""
    return _derived(session_secret, b"kvferry engine 1" + bytes(8))


def _derived(session_secret: bytes, message: bytes) -> bytes:
    """Derive 16 bytes that do not reveal the secret. Messages of different kinds never have a common prefix."""
    return hmac.digest(session_secret, message, "sha256")[:16]
