"""The secrets of an engine, and what is derived from them (PROTOCOL, Authority).

An engine's first process draws a session secret. Its incarnation is a digest of the secret, so that a home which has
lost its memory knows the engine again. The keys of its references are derived from it, so that a home can check them
and stores none. So are the read_ids that its ranks have in common: they agree on one without a message, and nobody else
can guess it.
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
    return _derived(session_secret, b"kvferry publication 1" + publication.to_bytes(8, "big"))


def read_id_of(session_secret: bytes, name: str) -> bytes:
    """The read_id of a read that the ranks of one engine call by a common name. The name itself is no secret."""
    return _derived(session_secret, b"kvferry read 1" + name.encode())


def engine_key(session_secret: bytes) -> bytes:
    """The key in an engine's own reference."""
    return _derived(session_secret, b"kvferry engine 1" + bytes(8))


def _derived(session_secret: bytes, message: bytes) -> bytes:
    """16 bytes that say nothing of the secret. No message begins with the kind of another one."""
    return hmac.digest(session_secret, message, "sha256")[:16]
