"""The memory that a request will take once decoded, found by a walk over its encoded bytes: an empty message in a list
takes two bytes on the wire and hundreds in memory. The walk follows the message's descriptor: it skips strings and
bytes whole, and enters only messages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvferry_server.node.limits import DECODED_FACTOR, DECODED_SPARE, MAX_FIELDS

MESSAGE_BYTES = 24  # Of a message without its fields
ENTRY_BYTES = 64  # Of a map entry without the content of its strings
STRING_BYTES = 16  # Of a string or bytes without the content
ALIGNED_BYTES = 8  # Of the shortest content of a string, and of any number or reference to a message
UNKNOWN_BYTES = 24  # Of a field that the message's descriptor does not have
WALK_STEPS = 1024  # Fields between two pauses of the walk: half a millisecond
LONG_LIST = 4096  # Bytes from which numpy counts the numbers of a list. For a short list numpy takes longer than Python

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_GROUPS = (3, 4)
_STRINGS = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})
_FIXED_NAMES = ("FIXED32", "FIXED64", "SFIXED32", "SFIXED64", "FLOAT", "DOUBLE")
_FIXED = frozenset(getattr(FieldDescriptor, f"TYPE_{name}") for name in _FIXED_NAMES)
_CONTINUED = bytes(range(128, 256))  # All that are not the last byte of a variable-length number


class Shape:
    """What the walk knows of one type of message."""

    def __init__(self, kind: Descriptor) -> None:
        # By the fields' tags: shapes of messages that are not flat, bytes of each other field, and bytes of each number
        # in a list of variable-length numbers.
        self.inner: dict[int, Shape] = {}
        self.skipped: dict[int, int] = {}
        self.packed: dict[int, int] = {}
        # The type has no lists, and no messages but flat ones. The content of a flat message takes less than seven
        # bytes of memory per byte on the wire (unknown fields take most), so the walk does not enter the message.
        self.flat = True
        # Bytes of a decoded message with the reference to it; with its content only if it is flat.
        self.size = ENTRY_BYTES if kind.GetOptions().map_entry else MESSAGE_BYTES + ALIGNED_BYTES
        # The most bytes of memory that the content takes per byte on the wire.
        self.factor = UNKNOWN_BYTES / 2
        for field in kind.fields:
            self._add(field)
        # The members of a oneof share their memory.
        self.size += (STRING_BYTES + ALIGNED_BYTES) * len(kind.oneofs)
        if self.flat:
            inner = [field.message_type for field in kind.fields if field.message_type is not None]
            self.size += sum(shape_of(each).size for each in inner)

    def _add(self, field: FieldDescriptor) -> None:
        tag, repeated = field.number << 3, _is_repeated(field)
        self.flat = self.flat and not repeated
        if field.containing_oneof is None:
            self.size += STRING_BYTES if field.type in _STRINGS else ALIGNED_BYTES
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = shape_of(field.message_type)
            # On the wire the members of a oneof may come repeatedly, and each allocates a new message.
            self.flat = self.flat and inner.flat and field.containing_oneof is None
            self.factor = max(self.factor, inner.factor, inner.size / 2)
            if inner.flat:
                self.skipped[tag | _LENGTH] = inner.size
            else:
                self.inner[tag | _LENGTH] = inner
        elif field.type in _STRINGS:
            self.skipped[tag | _LENGTH] = STRING_BYTES + ALIGNED_BYTES if repeated else ALIGNED_BYTES
        else:
            for wire in (_VARINT, _FIXED64, _FIXED32):
                self.skipped[tag | wire] = ALIGNED_BYTES if repeated else 0
            if repeated:
                # Numbers of fixed length take in memory what they take on the wire.
                self.packed[tag | _LENGTH] = 0 if field.type in _FIXED else ALIGNED_BYTES


shape_of = cache(Shape)
"""Returns the shape of a type of message that does not contain itself."""


def _is_repeated(field: FieldDescriptor) -> bool:
    # protobuf 4 has the label alone, and protobuf 7 warns of it.
    found: bool | None = getattr(field, "is_repeated", None)
    # The type stubs no longer have the label.
    return field.label == FieldDescriptor.LABEL_REPEATED if found is None else found  # type: ignore[attr-defined]


class Decoded:
    """The walk over one message."""

    def __init__(self, raw: bytes, shape: Shape) -> None:
        self._raw = raw
        self._shape = shape
        # Bytes that the decoded message takes, as far as the walk has come. Never less than the bytes that protobuf
        # allocates for messages and elements of lists, up to the first damage.
        self.size = len(raw) + shape.size
        self.fields = 0  # That the walk has looked at, in units of `WALK_STEPS`
        self.most = DECODED_FACTOR * len(raw) + DECODED_SPARE  # The limit of `size`

    @property
    def fits(self) -> bool:
        """Whether the message is within the limits of memory and of fields, as far as the walk has come."""
        return self.size <= self.most and self.fields <= MAX_FIELDS

    def walk(self) -> Iterator[None]:
        """Yield after every `WALK_STEPS` fields. Ends as soon as `fits` is false, and at damage, as decoding does."""
        raw, shape, place, end = self._raw, self._shape, 0, len(self._raw)
        outer: list[tuple[Shape, int]] = []
        left = WALK_STEPS
        try:
            while self.size <= self.most:
                while place == end:
                    if not outer:
                        return
                    shape, end = outer.pop()
                left -= 1
                if not left:
                    left = WALK_STEPS
                    self.fields += WALK_STEPS
                    if not self.fits:
                        return
                    yield
                tag, place = _number(raw, place)
                wire = tag & 7
                if wire != _LENGTH:
                    self.size += shape.skipped.get(tag, UNKNOWN_BYTES)
                    if wire in _GROUPS:
                        # The contract has no groups, and to skip one takes a further walk.
                        self.size += self.most
                        return
                    place = _number(raw, place)[1] if wire == _VARINT else place + _WIDTHS[wire]
                    if place > end:
                        return
                    continue
                length, place = _number(raw, place)
                if place + length > end:
                    return
                inner = shape.inner.get(tag)
                if inner is not None:
                    self.size += inner.size
                    outer.append((shape, end))
                    shape, end = inner, place + length
                    continue
                each = shape.packed.get(tag)
                if each is not None:
                    self.size += each * _count_numbers(raw, place, length)
                else:
                    self.size += shape.skipped.get(tag, UNKNOWN_BYTES)
                place += length
        except (IndexError, KeyError):
            return


def _count_numbers(raw: bytes, place: int, length: int) -> int:
    """Return how many variable-length numbers `length` bytes hold."""
    if length < LONG_LIST:
        return len(raw[place : place + length].translate(None, _CONTINUED))
    return int(np.count_nonzero(np.frombuffer(raw, np.int8, length, place) >= 0))


def _number(raw: bytes, place: int) -> tuple[int, int]:
    """Return the variable-length number at a place, and the place after the number."""
    byte = raw[place]
    place += 1
    if byte < 128:
        return byte, place
    number, shift = byte & 127, 7
    while shift < 70:
        byte = raw[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7
    raise IndexError
