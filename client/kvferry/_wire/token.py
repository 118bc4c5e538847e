"""The secret that the processes of one engine share, and what follows from it."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import ClassVar

from kvferry._wire.authority import SECRET_BYTES, engine_key, incarnation_of
from kvferry._wire.reference import format_engine_reference
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class EngineToken:
    """What the processes of one engine share.

    Attributes:
        engine_id: the engine.
        session_secret: 32 bytes, drawn by the process that opens the engine. Its incarnation follows from it.
        home: address of the engine's home, to which the node servers of other ranks relay.
    """

    engine_id: str
    session_secret: bytes = field(repr=False)
    home: str

    PREFIX: ClassVar[str] = "kvt1."

    def __str__(self) -> str:
        """A string for environment variables and pipes. A secret: it lets its holder speak in the engine's name."""
        body = self.session_secret + f"{self.engine_id}\0{self.home}".encode()
        return self.PREFIX + base64.urlsafe_b64encode(body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> EngineToken:
        """The token a string stands for; raises `InvalidField` without repeating the secret."""
        if not isinstance(text, str):
            raise InvalidField("token", type(text), "the string of an EngineToken")
        body = text.removeprefix(cls.PREFIX)
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            engine_id, _, home = raw[SECRET_BYTES:].decode().rpartition("\0")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raw, engine_id, home = b"", "", ""
        if not text.startswith(cls.PREFIX) or not engine_id:
            raise InvalidField("token", f"{len(text)} characters", "the string of an EngineToken")
        return cls(engine_id, raw[:SECRET_BYTES], home)

    @property
    def incarnation(self) -> bytes:
        """This start of the engine; 16 bytes, public."""
        return incarnation_of(self.session_secret)

    @property
    def engine_reference(self) -> str:
        """The engine's own reference, for its readers' `Cache.warm`. A capability: who has it can reach the memory that
        its ranks registered."""
        return format_engine_reference(
            pb.EngineReference(
                home=self.home,
                engine_id=self.engine_id,
                incarnation=self.incarnation,
                key=engine_key(self.session_secret),
            )
        )

    def ref(self) -> pb.EngineRef:
        """The engine as a proto."""
        return pb.EngineRef(engine_id=self.engine_id, incarnation=self.incarnation)
