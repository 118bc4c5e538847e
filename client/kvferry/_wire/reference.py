"""References: opaque strings, passed through routers, that name a publication or an engine.

References are capabilities: the holder of a publication's reference may read the publication, and the holder of an
engine's reference can reach the memory that the engine's ranks registered.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import TypeVar

from google.protobuf.message import DecodeError

from kvferry import _arguments as arguments
from kvferry._prompt import MARK_BYTES
from kvferry._wire.authority import INCARNATION_BYTES, KEY_BYTES, question_name
from kvferry.errors import BadReference, InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb

PREFIX = "kvf1."
ENGINE_PREFIX = "kvf1e."
MAX_NAME = 256
"""Most bytes of an address, of an engine_id and of a router's key."""
MAX_REFERENCE_MARKS = 4
"""Most marks in a reference: references go through HTTP headers and bodies of routers."""
MAX_HINT = 2048
"""Most bytes of the hint in a reference."""
MAX_HINT_BLOCKS = 1 << 16
"""Most blocks of a hint, over all groups: a million tokens in blocks of 16. A reader makes their ids in its engine's
step, of whatever a router, or its client, has written: a few bytes of runs can stand for any number of ids."""
HINT_DIGEST_BYTES = 16
MAX_LENGTH = 4096
"""Most characters of a reference; longer strings are refused before they are decoded."""

Body = TypeVar("Body", pb.Reference, pb.EngineReference)


def format_reference(reference: pb.Reference | pb.EngineReference) -> str:
    """Encode a reference, of a publication or of an engine, as its canonical string."""
    prefix = PREFIX if isinstance(reference, pb.Reference) else ENGINE_PREFIX
    return prefix + to_base64(reference.SerializeToString(deterministic=True))


def router_reference(
    home: str, engine_id: str, *, router_key: str = "", key: bytes = b"", data_parallel_rank: int = 0
) -> str:
    """Make a reference before there is a publication: for a router that asks source and destination at once.

    The source publishes with this reference (`EngineSession.publish`, `SchedulerPort.publish`), the destination reads
    with it. Make a new reference for each request and each attempt. Like any reference it is a capability.

    Args:
        home: address of the source's home; empty: the reader's directory has the address.
        engine_id: the source, or the deployment whose data-parallel engines are named ``{engine_id}_dp{n}``.
        router_key: the request's name, 1 to 256 bytes, printable, unique at its source; empty: a random name.
        key: 16 bytes that others cannot guess; empty: random bytes. Two routers that must make the same reference
            without talking to each other give equal bytes.
        data_parallel_rank: n, see `engine_id`.

    Raises:
        InvalidField: an argument is out of range.
    """
    if len(arguments.text("home", home).encode()) > MAX_NAME:
        raise InvalidField("home", home[:MAX_NAME], f"at most {MAX_NAME} bytes")
    arguments.label("engine_id", engine_id, MAX_NAME)
    router_key = arguments.label("router_key", router_key or secrets.token_hex(16), MAX_NAME)
    if not isinstance(key, bytes) or len(key) not in (0, KEY_BYTES):
        # The value may be a key.
        given = f"{len(key)} bytes" if isinstance(key, bytes) else type(key)
        raise InvalidField("key", given, f"{KEY_BYTES} bytes")
    made = pb.Reference(
        home=home,
        engine_id=engine_id,
        router_key=router_key,
        key=key or secrets.token_bytes(KEY_BYTES),
        data_parallel_rank=arguments.integer("data_parallel_rank", data_parallel_rank, 0, 2**32 - 1),
    )
    return format_reference(made)


def question_reference(home: str, engine_id: str) -> str:
    """Make the reference of a question, which an engine is asked with (`kvferry.v1.Ask`); new for each question. Raises
    `InvalidField` as `router_reference`."""
    key = secrets.token_bytes(KEY_BYTES)
    return router_reference(home, engine_id, router_key=question_name(key), key=key)


def engine_ids(engine_id: str, data_parallel_rank: int) -> tuple[str, ...]:
    """Return the possible names of the engine in a router's reference; see `Reference.data_parallel_rank`."""
    of_rank = f"{engine_id}_dp{data_parallel_rank}"
    return (of_rank,) if data_parallel_rank else (engine_id, of_rank)


def parse_reference(text: str) -> pb.Reference:
    """Decode a publication's reference. Raises `BadReference` for a string that is none, or that names neither a
    publication nor a router's key, and `InvalidField` for another value."""
    if not isinstance(text, str):
        raise InvalidField("reference", type(text), "a string, Publication.reference")
    if text.startswith(ENGINE_PREFIX):
        raise BadReference("it names an engine, not a publication")
    reference = _decoded(text, PREFIX, pb.Reference)
    if reference.router_key:
        if reference.publication or reference.incarnation:
            raise BadReference("it names both a publication and a router's key")
        if reference.marks or reference.hint:
            raise BadReference("it names a router's key, and has marks of a prompt or a hint")
    elif not reference.publication or len(reference.incarnation) != INCARNATION_BYTES:
        raise BadReference("it names neither a publication nor a router's key")
    if len(reference.hint) > MAX_HINT:
        raise BadReference(f"its hint has {len(reference.hint)} bytes, more than {MAX_HINT}")
    if len(reference.marks) > MAX_REFERENCE_MARKS:
        raise BadReference(f"it has {len(reference.marks)} marks, more than {MAX_REFERENCE_MARKS}")
    if any(not mark.end or len(mark.digest) != MARK_BYTES for mark in reference.marks):
        raise BadReference(f"it has a mark of no tokens, or one whose digest is not of {MARK_BYTES} bytes")
    return reference


def add_hint(reference: pb.Reference, hint: pb.Hint) -> bytes:
    """Put a hint into a reference, if it fits. Returns its digest; empty: it does not fit."""
    encoded = hint.SerializeToString(deterministic=True)
    if len(encoded) > MAX_HINT:
        return b""
    reference.hint = encoded
    if len(format_reference(reference)) > MAX_LENGTH:
        reference.ClearField("hint")
        return b""
    return hint_digest(encoded)


def hint_digest(hint: bytes) -> bytes:
    """Return the digest under which the home knows a hint (PROTOCOL, Optimistic reads)."""
    return hashlib.sha256(hint).digest()[:HINT_DIGEST_BYTES]


def parse_engine_reference(text: str) -> pb.EngineReference:
    """Decode an engine's reference; raises `BadReference`."""
    reference = _decoded(text, ENGINE_PREFIX, pb.EngineReference)
    if len(reference.incarnation) != INCARNATION_BYTES:
        raise BadReference(f"its incarnation has {len(reference.incarnation)} bytes, not {INCARNATION_BYTES}")
    return reference


def parse_source_reference(text: str) -> pb.EngineReference | pb.Reference:
    """Decode an engine's reference, or a publication's that names its engine's incarnation; raises `BadReference`."""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        return parse_engine_reference(text)
    reference = parse_reference(text)
    if reference.router_key:
        raise BadReference("it names a router's key, and not yet an engine's incarnation")
    return reference


def _decoded(text: str, prefix: str, of: type[Body]) -> Body:
    if not text.startswith(prefix):
        raise BadReference(f"it does not start with {prefix!r}")
    if len(text) > MAX_LENGTH:
        raise BadReference(f"it has {len(text)} characters, more than {MAX_LENGTH}")
    try:
        reference = of.FromString(from_base64(text[len(prefix) :]))
    except (DecodeError, ValueError):
        raise BadReference("its body is damaged") from None
    # The home may be empty: the reader's directory then has its address.
    if not reference.engine_id:
        raise BadReference("it names no engine")
    if len(reference.key) != KEY_BYTES:
        raise BadReference(f"its key has {len(reference.key)} bytes, not {KEY_BYTES}")
    return reference


def to_base64(body: bytes) -> str:
    """Encode bytes for URLs, without padding."""
    return base64.urlsafe_b64encode(body).decode().rstrip("=")


def from_base64(text: str) -> bytes:
    """Decode the text of `to_base64`; raises `ValueError`."""
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
