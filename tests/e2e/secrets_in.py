"""Finds secrets in whatever somebody can see, in every form that they are written in."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

from google.protobuf import text_encoding


def forms(secret: bytes) -> Iterator[tuple[str, bytes]]:
    """The ways in which these bytes may stand in an answer or a log."""
    yield "raw", secret
    yield "hex", secret.hex().encode()
    yield "hex in capitals", secret.hex().upper().encode()
    yield "repr", repr(secret)[2:-1].encode()
    yield "proto's text", text_encoding.CEscape(secret, as_utf8=False).encode()
    for name, altchars in (("base64", None), ("base64, for URLs", b"-_")):
        # Within something longer it may begin at any of three places of a group; what its neighbours decide is cut off.
        for before in range(3):
            encoded = base64.b64encode(bytes(before) + secret, altchars)
            first = -(-8 * before // 6)
            last = (8 * (before + len(secret))) // 6
            yield name, encoded[first:last]


def found(secrets: Mapping[str, bytes], seen: Mapping[str, bytes]) -> list[str]:
    """Where which secret stands, and how."""
    return [
        f"{name} ({form}) in {where}"
        for name, secret in secrets.items()
        for form, written in forms(secret)
        for where, text in seen.items()
        if written in text
    ]
