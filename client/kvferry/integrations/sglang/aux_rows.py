"""SGLang's data of a request beside the KV cache, as the payload of a publication.

SGLang keeps a row for each request in several buffers: the first token, counts of cached tokens, log probabilities, the
state of speculative decoding. The zeros at the end of a row are left out.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from kvferry.errors import InvalidField
from kvferry.integrations.first_token import first_token

MAGIC = b"kvferry sglang aux 1\n"
MAX_PAYLOAD = 64 << 10
"""The largest payload of a publication."""

_HEAD = struct.Struct("<QI")
_ROW = struct.Struct("<II")
_FIRST_TOKEN = 0
"""The buffer of the first token: ``MetadataBuffers.get_buf_infos`` (0.5.23) lists ``output_ids`` first, int32."""
_ROOM = -1
"""The buffer of the room. SGLang lists only the buffer of checksums after it, which the backend refuses."""


class BadPayload(ValueError):
    """This engine cannot use the payload of a publication; the message says why."""


@dataclass(frozen=True, slots=True)
class AuxRows:
    """The buffers of one rank in which each request has a row. Raises `InvalidField`: it can outgrow a payload."""

    addresses: tuple[int, ...]  # of the buffers, in SGLang's order
    sizes: tuple[int, ...]  # bytes of a row, by buffer
    vocabulary: int  # number of tokens of the model: other tokens would end the scheduler

    def __post_init__(self) -> None:
        largest = len(MAGIC) + _HEAD.size + sum(_ROW.size + size for size in self.sizes)
        if largest > MAX_PAYLOAD:
            raise InvalidField("auxiliary buffers", f"{largest} bytes", f"at most {MAX_PAYLOAD}, a payload")

    def payload(self, row: int, tokens: int) -> bytes:
        """Encode a row, and the number of tokens of the prompt."""
        parts = [MAGIC, _HEAD.pack(tokens, len(self.sizes))]
        for address, size in zip(self.addresses, self.sizes, strict=True):
            used = ctypes.string_at(address + row * size, size).rstrip(b"\0")
            parts += [_ROW.pack(size, len(used)), used]
        return b"".join(parts)

    def write(self, row: int, payload: bytes, room: int) -> int:
        """Write a source's payload, or the first token of another make of engine, into a row of a request with this
        room; return the number of tokens of the source's prompt. SGLang compares rooms, too, but waits for ever if the
        payload's is 0.

        Raises `BadPayload`: the buffers or the rooms differ, or the payload has another form. Nothing was written.
        """
        given = first_token(payload)
        if given is not None:
            rows = [b"" for _ in self.sizes]
            rows[_FIRST_TOKEN] = struct.pack("<i", given.token)
            rows[_ROOM] = struct.pack("<Q", room)
            tokens = given.prompt_tokens
        else:
            tokens, rows = self._decoded(payload)
            if rows[_ROOM][:8].ljust(8, b"\0") != struct.pack("<Q", room):
                raise BadPayload("it is the payload of a request with another bootstrap_room")
        (first,) = struct.unpack("<i", rows[_FIRST_TOKEN][:4].ljust(4, b"\0"))
        if not 0 <= first < self.vocabulary:
            raise BadPayload(f"its first token is {first}, and the model has {self.vocabulary}")
        for address, size, used in zip(self.addresses, self.sizes, rows, strict=True):
            ctypes.memmove(address + row * size, used + bytes(size - len(used)), size)
        return tokens

    def _decoded(self, payload: bytes) -> tuple[int, list[bytes]]:
        if not payload.startswith(MAGIC):
            raise BadPayload("the source has published no first token")
        try:
            at = len(MAGIC)
            tokens, count = _HEAD.unpack_from(payload, at)
            at += _HEAD.size
            sizes, rows = [], []
            for _ in range(min(count, len(payload))):
                size, used = _ROW.unpack_from(payload, at)
                at += _ROW.size
                sizes.append(size)
                rows.append(payload[at : at + used])
                at += used
        except struct.error:
            raise BadPayload("the payload is cut off") from None
        if tuple(sizes) != self.sizes or at != len(payload):
            raise BadPayload(
                f"the source hands over rows of {sizes} bytes, and this engine takes {list(self.sizes)}: both need the "
                "same version of SGLang, and the same speculative decoding"
            )
        if any(len(used) > size for used, size in zip(rows, self.sizes, strict=True)):
            raise BadPayload("a row is longer than its size")
        return tokens, rows
