"""Checks of single fields: every field of a request is checked before it is used (R9)."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvferry._arguments import SHOWABLE, showable
from kvferry._clock import from_duration
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.values import EngineRef
from kvferry_server.servicers.limits import MAX_SECONDS, MAX_TEXT


def text(field: str, value: str, least: int = 1, most: int = MAX_TEXT) -> str:
    """Return a name: a string of `least` to `most` bytes that can be shown; raises `InvalidField` for others. A line
    end in a name could make it look like two names, or match a policy's pattern for another."""
    size = len(value.encode())
    if not least <= size <= most:
        raise InvalidField(field, f"{size} bytes", f"{least} to {most} bytes")
    if not showable(value):
        raise InvalidField(field, ascii(value), SHOWABLE)
    return value


def random_bytes(field: str, value: bytes, *, optional: bool = False) -> bytes:
    """Return 16 bytes, or none if `optional`; raises `InvalidField`, without the bytes, since they may be secret."""
    return exactly(field, value, 16, optional=optional)


def engine_ref(field: str, message: pb.EngineRef | pb.Reference | pb.EngineReference) -> EngineRef:
    """Return the incarnation that a message names; raises `InvalidField` for a malformed one."""
    return EngineRef(
        text(f"{field}.engine_id", message.engine_id), random_bytes(f"{field}.incarnation", message.incarnation)
    )


def positive(field: str, value: int) -> int:
    """Return a number of at least 1; raises `InvalidField` for others."""
    if value < 1:
        raise InvalidField(field, value, "at least 1")
    return value


def within(field: str, value: int, most: int, *, least: int = 0, unit: str = "") -> int:
    """Return a number from `least` to `most`, counted in `unit`; raises `InvalidField` for others."""
    if not least <= value <= most:
        expected = f"{least} to {most}" if least else f"at most {most}"
        raise InvalidField(field, f"{value} {unit}" if unit else value, f"{expected} {unit}".rstrip())
    return value


def seconds(field: str, value: Duration) -> float:
    """Return a duration in seconds; raises `InvalidField` for a negative or malformed one."""
    if value.seconds < 0 or not 0 <= value.nanos < 1_000_000_000 or value.seconds > MAX_SECONDS:
        raise InvalidField(field, f"{value.seconds} s {value.nanos} ns", f"0 to {MAX_SECONDS:.0f} seconds")
    return from_duration(value)


def exactly(field: str, value: bytes, size: int, *, optional: bool = False) -> bytes:
    """Return `size` bytes, or none if `optional`; raises `InvalidField`, whose message leaves out the bytes."""
    if len(value) != size and not (optional and not value):
        raise InvalidField(field, f"{len(value)} bytes", f"{size} bytes" + (", or none" if optional else ""))
    return value


def entry_size(message: Message) -> int:
    """Return an upper bound for the bytes that a message takes as an entry of a repeated field."""
    return message.ByteSize() + 6
