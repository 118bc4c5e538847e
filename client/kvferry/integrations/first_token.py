"""The first token of a request's answer, as the payload of a publication: for engines that decode from the token that
prefill has sampled, and read from another make of engine."""

from __future__ import annotations

_MAGIC = b"kvferry first token 1\n"
_DIGITS = 10
_MAX = 2**31 - 1


def first_token_payload(token: int) -> bytes:
    """Encode the token that prefill has sampled."""
    return _MAGIC + str(token).encode()


def first_token(payload: bytes) -> int | None:
    """Decode the token; None: the payload is another one."""
    digits = payload.removeprefix(_MAGIC)
    if digits == payload or not digits.isdigit() or len(digits) > _DIGITS:
        return None
    token = int(digits)
    return token if token <= _MAX else None
