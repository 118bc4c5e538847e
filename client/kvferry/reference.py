"""References: the opaque string that names a publication on its way through routers. A capability: who has it may
read."""

from __future__ import annotations

import base64
import binascii

from google.protobuf.message import DecodeError

from kvferry.errors import BadReference, InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb

PREFIX = "kvf1."
MAX_LENGTH = 4096
"""Characters; longer strings are refused before they are decoded."""


def format_reference(reference: pb.Reference) -> str:
    """The canonical string of a reference."""
    encoded = base64.urlsafe_b64encode(reference.SerializeToString(deterministic=True))
    return PREFIX + encoded.decode().rstrip("=")


def parse_reference(text: str) -> pb.Reference:
    """The reference a string stands for.

    Raises:
        BadReference: not a reference, or one that names neither a publication nor a router's key.
    """
    if not isinstance(text, str):
        raise InvalidField("reference", type(text), "a string, Publication.reference")
    if not text.startswith(PREFIX):
        raise BadReference(f"it does not start with {PREFIX!r}")
    if len(text) > MAX_LENGTH:
        raise BadReference(f"it has {len(text)} characters, at most {MAX_LENGTH}")
    body = text[len(PREFIX) :]
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        reference = pb.Reference.FromString(raw)
    except (binascii.Error, DecodeError, ValueError):
        raise BadReference("its body is damaged") from None
    if not reference.home or not reference.engine_id:
        raise BadReference("it names no home or no engine")
    if len(reference.key) != 16:
        raise BadReference(f"its key has {len(reference.key)} bytes, not 16")
    if reference.router_key:
        if reference.publication or reference.incarnation:
            raise BadReference("it names a publication and a router's key")
    elif not reference.publication or len(reference.incarnation) != 16:
        raise BadReference("it names neither a publication nor a router's key")
    return reference
