"""The token of an engine: the secret that its processes share, and the values derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvferry._wire.authority import SECRET_BYTES, engine_key, incarnation_of
from kvferry._wire.reference import format_reference, from_base64, to_base64
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class EngineToken:
    """Names one incarnation of an engine, and proves to node servers that a process belongs to that engine. Secret.

    The process that opens the engine makes the token. ``str`` and `parse` convert it to and from a string.

    Attributes:
        session_secret: 32 random bytes, from which the incarnation is derived.
        home: address of the engine's home, to which the node servers of other ranks relay.
    """

    engine_id: str
    session_secret: bytes = field(repr=False)
    home: str

    PREFIX: ClassVar[str] = "kvt1."

    def __str__(self) -> str:
        """Encode the token for environment variables and pipes. Secret: its holder can act as the engine."""
        body = self.session_secret + f"{self.engine_id}\0{self.home}".encode()
        return self.PREFIX + to_base64(body)

    @classmethod
    def parse(cls, text: str) -> EngineToken:
        """Parse the string of a token; raises `InvalidField`, without the secret in the message."""
        if not isinstance(text, str):
            raise InvalidField("token", type(text), "the string of an EngineToken")
        try:
            raw = from_base64(text.removeprefix(cls.PREFIX))
            engine_id, _, home = raw[SECRET_BYTES:].decode().rpartition("\0")
        except ValueError:
            raw, engine_id, home = b"", "", ""
        if not text.startswith(cls.PREFIX) or not engine_id:
            raise InvalidField("token", f"{len(text)} characters", "the string of an EngineToken")
        return cls(engine_id, raw[:SECRET_BYTES], home)

    @property
    def incarnation(self) -> bytes:
        """The engine's incarnation: 16 bytes, not secret."""
        return incarnation_of(self.session_secret)

    @property
    def engine_reference(self) -> str:
        """The engine's reference, which routers give to readers for `Cache.warm`. A capability: a holder can reach the
        memory that the engine's ranks registered."""
        key = engine_key(self.session_secret)
        made = pb.EngineReference(home=self.home, engine_id=self.engine_id, incarnation=self.incarnation, key=key)
        return format_reference(made)


def engine_ref(token: EngineToken) -> pb.EngineRef:
    """Name the engine and incarnation of a token in a message."""
    return pb.EngineRef(engine_id=token.engine_id, incarnation=token.incarnation)
