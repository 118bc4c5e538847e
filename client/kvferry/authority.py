"""The secrets of an engine, and what is derived from them (PROTOCOL, Authority).

An engine's first process draws a session secret. Its incarnation is a digest of the secret, so that a home which has
lost its memory knows the engine again. The keys of its references are derived from it, so that a home can check them
and stores none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SECRET_BYTES = 32
"""Length of a session secret."""

INCARNATION_BYTES = 16
"""Length of an incarnation."""

KEY_BYTES = 16
"""Length of a reference's key."""


def new_session_secret() -> bytes:
    """A session secret for a new incarnation."""
    return secrets.token_bytes(SECRET_BYTES)


def incarnation_of(session_secret: bytes) -> bytes:
    """The incarnation that a session secret proves."""
    return hashlib.sha256(b"kvferry incarnation 1" + session_secret).digest()[:INCARNATION_BYTES]


def publication_key(session_secret: bytes, publication: int) -> bytes:
    """The key in the reference of a publication."""
    return _key(session_secret, b"kvferry publication 1", publication)


def engine_key(session_secret: bytes) -> bytes:
    """The key in an engine's own reference."""
    return _key(session_secret, b"kvferry engine 1", 0)


def _key(session_secret: bytes, kind: bytes, publication: int) -> bytes:
    message = kind + publication.to_bytes(8, "big")
    return hmac.digest(session_secret, message, "sha256")[:KEY_BYTES]
