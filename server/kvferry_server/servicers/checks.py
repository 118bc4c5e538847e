"""Fields of requests: every one is checked before anything is done with it (R9). The limits are those at the top of the
contract."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvferry._clock import from_duration
from kvferry._wire.authority import SECRET_BYTES
from kvferry._wire.channel import MAX_MESSAGE_BYTES
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.identity import EngineRef

MAX_TEXT = 256
MAX_SECONDS = 1e9

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""Bytes of an answer: what grows in it is paged, or refused. Less than any caller takes, for what gRPC adds."""


def text(field: str, value: str, least: int = 1, most: int = MAX_TEXT) -> str:
    """A string of `least` to `most` bytes."""
    size = len(value.encode())
    if not least <= size <= most:
        raise InvalidField(field, f"{size} bytes", f"{least} to {most} bytes")
    return value


def random_bytes(field: str, value: bytes, *, optional: bool = False) -> bytes:
    """16 bytes, or none where that is allowed. They may be secret, so an error does not repeat them."""
    return _exactly(field, value, 16, optional=optional)


def session_secret(value: bytes, *, optional: bool = False) -> bytes:
    """The secret of an engine's session. Whether it is the right one is the home's to say."""
    return _exactly("session_secret", value, SECRET_BYTES, optional=optional)


def engine_ref(field: str, message: pb.EngineRef) -> EngineRef:
    """One start of an engine."""
    return EngineRef(
        text(f"{field}.engine_id", message.engine_id),
        random_bytes(f"{field}.incarnation", message.incarnation),
    )


def positive(field: str, value: int) -> int:
    """A number of at least 1."""
    if value < 1:
        raise InvalidField(field, value, "at least 1")
    return value


def seconds(field: str, value: Duration) -> float:
    """A duration that is not negative."""
    if value.seconds < 0 or not 0 <= value.nanos < 1_000_000_000 or value.seconds > MAX_SECONDS:
        raise InvalidField(field, f"{value.seconds} s {value.nanos} ns", f"0 to {MAX_SECONDS:.0f} seconds")
    return from_duration(value)


def _exactly(field: str, value: bytes, size: int, *, optional: bool) -> bytes:
    if len(value) != size and not (optional and not value):
        raise InvalidField(field, f"{len(value)} bytes", f"{size} bytes" + (", or none" if optional else ""))
    return value


def entry_size(message: Message) -> int:
    """Bytes that a message takes as an entry of a repeated field, about: never less."""
    return message.ByteSize() + 6
