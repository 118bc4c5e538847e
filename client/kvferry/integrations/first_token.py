"""The first token of a request's answer, as the payload of a publication: for engines that read from another make of
engine, and decode from the token that prefill has sampled."""

from __future__ import annotations

import re
from typing import NamedTuple

_MAGIC = b"kvferry first token 1\n"
_FORM = re.compile(re.escape(_MAGIC) + rb"(\d{1,10}) (\d{1,10})")
_MAX = 2**31 - 1


class FirstToken(NamedTuple):
    """The token that prefill has sampled, and the number of tokens of the prompt before it."""

    token: int
    prompt_tokens: int


def first_token_payload(token: int, prompt_tokens: int) -> bytes:
    """Encode the token that prefill has sampled; see `FirstToken`."""
    return _MAGIC + f"{token} {prompt_tokens}".encode()


def first_token(payload: bytes) -> FirstToken | None:
    """Decode the token; None: the payload is not that of a first token."""
    found = _FORM.fullmatch(payload)
    token, prompt_tokens = map(int, found.groups()) if found else (_MAX + 1, 0)
    return FirstToken(token, prompt_tokens) if max(token, prompt_tokens) <= _MAX else None
