"""Messages built from descriptors: well-formed, with values that no well-behaved peer would send."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from hypothesis import strategies as st

from kvferry._wire.version import introduce
from kvferry.v1 import admin_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.fuzz.methods import Method
from tests.support.raw_parties import Party

DEPTH = 5
"""Depth to which fields are searched: EngineGeometry, ranks, planes, token_shard and its fields."""

F = FieldDescriptor
_UNSIGNED_32 = [0, 1, 2, 16, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1]
_UNSIGNED_64 = [0, 1, 2, 16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_SIGNED_32 = [0, 1, -1, 3, 2**31 - 1, -(2**31)]
_SIGNED_64 = [0, 1, -1, 10**9, 2**31, 2**53, 2**63 - 1, -(2**63)]
_TEXTS = ["", "x", "\0", "\U0001f98a" * 64, "x" * 256, "y" * 257, "kvf1.", "kvf1." + "A" * 4096, "z" * 100_000]
_BYTES = [b"", b"\0" * 15, b"\0" * 16, b"\xff" * 16, b"\0" * 17, b"\xff" * 32, bytes(100_000)]

EXTREMES: dict[int, list[Any]] = {
    F.TYPE_UINT32: _UNSIGNED_32,
    F.TYPE_FIXED32: _UNSIGNED_32,
    F.TYPE_UINT64: _UNSIGNED_64,
    F.TYPE_FIXED64: _UNSIGNED_64,
    F.TYPE_INT32: _SIGNED_32,
    F.TYPE_SINT32: _SIGNED_32,
    F.TYPE_SFIXED32: _SIGNED_32,
    F.TYPE_ENUM: _SIGNED_32,
    F.TYPE_INT64: _SIGNED_64,
    F.TYPE_SINT64: _SIGNED_64,
    F.TYPE_SFIXED64: _SIGNED_64,
    F.TYPE_BOOL: [False, True],
    F.TYPE_FLOAT: [0.0, -1.0, float("inf"), float("nan")],
    F.TYPE_DOUBLE: [0.0, -1.0, float("inf"), float("nan")],
    F.TYPE_STRING: _TEXTS,
    F.TYPE_BYTES: _BYTES,
}
"""Extreme values of a field, by its type."""


def seed(method: Method, party: Party) -> Message:
    """Return a request as a well-behaved peer sends it, in the name of `party`; for a method that is not listed here,
    a request with the party's identities in the fields of their names."""
    message = method.request_class()
    known: dict[str, Callable[[], Message]] = {
        "RegisterCache": party.registration,
        "Handshake": party.handshake,
        "ReadBlocks": lambda: party.read_request(party.lease_id),
        "Notify": party.notifications,
        "KVTransfer/Watch": party.watch_request,
        "PlanRead": party.plan,
        # Not the party itself, which would be gone for good.
        "EvictEngine": lambda: admin_pb2.EvictEngineRequest(engine=pb.EngineRef(engine_id="~", incarnation=bytes(16))),
        "ServerReflectionInfo": lambda: method.request_class(file_containing_symbol="kvferry.v1"),
        "Check": lambda: health_pb2.HealthCheckRequest(service="kvferry.v1.KVTransfer"),
    }
    for name, make in known.items():
        if method.path.endswith(name):
            return introduced(make())
    identities = {"engine_id": party.name, "page_token": "YQ.YQ", "page_size": 5, "engine": party.ref}
    for field in method.request.fields:
        value = identities.get(field.name)
        if isinstance(value, Message) and field.message_type is value.DESCRIPTOR:
            getattr(message, field.name).CopyFrom(value)
        elif value is not None and not isinstance(value, Message):
            setattr(message, field.name, value)
    return introduced(message)


def introduced(message: Message) -> Message:
    """Set the caller's version, without which every request is refused."""
    if "version" in message.DESCRIPTOR.fields_by_name:
        introduce(cast("Any", message))
    return message


def damaged(message: bytes, turns: random.Random) -> bytes:
    """Return the bytes of a message, cut, flipped or doubled; or random bytes."""
    if not message or turns.random() < 0.1:
        return turns.randbytes(turns.choice([1, 2, 7, 100, 5000]))
    raw = bytearray(message)
    for _ in range(turns.randint(1, 3)):
        at = turns.randrange(len(raw)) if raw else 0
        match turns.randrange(6):
            case 0:
                del raw[at:]
            case 1 if raw:
                raw[at] ^= 1 << turns.randrange(8)
            case 2:
                raw[at:at] = raw[at : at + turns.randint(1, 40)]
            case 3:
                # The longest varint, and longer ones.
                raw[at:at] = b"\xff" * turns.choice([9, 10, 11]) + b"\x01"
            case 4:
                # Groups, which the contract does not use, nested as deep as there is room.
                raw[at:at] = b"\x0b" * turns.choice([1, 99, 101, 20_000])
            case _:
                raw[at : at + turns.randint(1, 8)] = turns.randbytes(turns.randint(1, 8))
    return bytes(raw)


@dataclass(frozen=True, slots=True)
class Place:
    """A field somewhere within a message."""

    fields: tuple[FieldDescriptor, ...]

    def __str__(self) -> str:
        return ".".join(field.name for field in self.fields)

    @property
    def field(self) -> FieldDescriptor:
        return self.fields[-1]

    def holder(self, message: Message, turn: int = 0) -> Any:
        """Return the message that has the field, made if missing. `turn` chooses among those in a list."""
        found: Any = message
        for field in self.fields[:-1]:
            found = getattr(found, field.name)
            if field.is_repeated:
                found = found[turn % len(found)] if len(found) else found.add()
        return found

    def put(self, message: Message, value: Any, turn: int = 0) -> None:
        """Set the field. A repeated one gets the value once more."""
        holder, field = self.holder(message, turn), self.field
        if is_map(field):
            getattr(holder, field.name)[str(value)] = value
        elif field.is_repeated:
            getattr(holder, field.name).append(value)
        else:
            setattr(holder, field.name, value)

    def clear(self, message: Message, turn: int = 0) -> None:
        """Take the field away."""
        self.holder(message, turn).ClearField(self.field.name)

    def repeat(self, message: Message, limit: int) -> None:
        """Fill a repeated field with as much as fits `limit` bytes; texts that name an element differ."""
        items = getattr(self.holder(message), self.field.name)
        if is_map(self.field):
            for index in range(limit // 24):
                items[f"{index}"] = 1 if _value_type(self.field) == F.TYPE_UINT32 else "v"
            return
        if self.field.message_type is None:
            value = EXTREMES[self.field.type][1]
            fixed = {F.TYPE_FIXED32: 4, F.TYPE_FIXED64: 8}
            each = fixed.get(self.field.type, 1)
            if self.field.type in (F.TYPE_STRING, F.TYPE_BYTES):
                each = len(str(value)) + 2
            items.extend([value] * (limit // each))
            return
        first = type(items[0])() if len(items) else items.add()
        if len(items):
            first.CopyFrom(items[0])
        named = next(
            (field for field in first.DESCRIPTOR.fields if field.type == F.TYPE_STRING and not field.is_repeated), None
        )
        numbered = next((field for field in first.DESCRIPTOR.fields if field.name in ("rank", "publication")), None)
        del items[:]
        size = 0
        for index in range(limit):
            element = items.add()
            element.CopyFrom(first)
            if named is not None:
                setattr(element, named.name, f"{getattr(first, named.name)}{index}")
            if numbered is not None:
                setattr(element, numbered.name, index)
            size += element.ByteSize() + 4
            if size >= limit:
                return


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map, which protobuf encodes as a repeated message."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def places(descriptor: Any, before: tuple[FieldDescriptor, ...] = ()) -> Iterator[Place]:
    """Yield every field of a message and of the messages in it."""
    for field in descriptor.fields:
        yield Place((*before, field))
        if field.message_type is not None and not is_map(field) and len(before) < DEPTH:
            yield from places(field.message_type, (*before, field))


def _value_type(field: FieldDescriptor) -> int:
    """The type of a map's values."""
    entry = field.message_type
    assert entry is not None
    return entry.fields_by_name["value"].type


def values(field: FieldDescriptor) -> list[Any]:
    """Return the values to put into a field; none for a message, whose fields are places of their own."""
    if is_map(field):
        return EXTREMES[_value_type(field)]
    return [] if field.message_type is not None else EXTREMES[field.type]


def edit(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any], most: int = 6) -> None:
    """Put extreme values into up to `most` fields, or clear them."""
    found = list(places(message.DESCRIPTOR))
    if not found:
        return
    for place in draw(st.lists(st.sampled_from(found), min_size=1, max_size=most)):
        turn, extremes = draw(st.integers(0, 7)), values(place.field)
        if not extremes or draw(st.integers(0, 4)) == 0:
            place.clear(message, turn)
        else:
            place.put(message, draw(st.sampled_from(extremes)), turn)
