"""The first token of a request's answer, as the payload of a publication: for engines that read from another make of
engine, and decode from the token that prefill has sampled."""

from __future__ import annotations

from typing import NamedTuple

_MAGIC = b"kvferry first token 1\n"
_DIGITS = 10
_MAX = 2**31 - 1


class FirstToken(NamedTuple):
    """The token that prefill has sampled, and the number of tokens of the prompt before it; None: prefill did not state
    the number."""

    token: int
    prompt_tokens: int | None = None


def first_token_payload(token: int, prompt_tokens: int | None = None) -> bytes:
    """Encode the token that prefill has sampled; see `FirstToken`."""
    numbers = [token] if prompt_tokens is None else [token, prompt_tokens]
    return _MAGIC + " ".join(map(str, numbers)).encode()


def first_token(payload: bytes) -> FirstToken | None:
    """Decode the token; None: the payload is not that of a first token."""
    if not payload.startswith(_MAGIC):
        return None
    written = payload.removeprefix(_MAGIC).split(b" ", 2)
    if not all(digits.isdigit() and len(digits) <= _DIGITS and int(digits) <= _MAX for digits in written):
        return None
    token, *prompt = map(int, written)
    return FirstToken(token, *prompt) if len(prompt) < 2 else None
