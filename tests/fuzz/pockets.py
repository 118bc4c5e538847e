"""The knowledge of a hostile peer: every value of every answer, error and token, with every usual encoding undone."""

from __future__ import annotations

import base64
import binascii
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvferry._wire.reference import parse_reference
from kvferry._wire.status import DETAILS_KEY
from kvferry.errors import BadReference
from tests.fuzz.messages import is_map

MOST = 400
"""Values of one kind that are remembered."""
RECENT = 6
"""The newest values, which are drawn most."""


class Pocket:
    """Values of one kind, the last received at the end."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def put(self, value: Any) -> None:
        key = value.SerializeToString(deterministic=True) if isinstance(value, Message) else value
        self._kept.pop(key, None)
        self._kept[key] = value
        if len(self._kept) > MOST:
            # The oldest but for the first eighth, which are from before the peer's first call.
            del self._kept[next(itertools.islice(self._kept, MOST // 8, None))]

    def has(self, value: Any) -> bool:
        """Whether a scalar is here."""
        return value in self._kept

    def all(self, *, of: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """Return the values that satisfy `of`."""
        return [value for value in self._kept.values() if of(value)]

    def draw(self, turns: random.Random, of: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return a random value, often one of the newest; None without any."""
        found = self.all(of=of)
        return turns.choice(found[-RECENT:] if turns.random() < 0.6 else found) if found else None


class Pockets:
    """All values that the peer received."""

    def __init__(self) -> None:
        self.messages: dict[str, Pocket] = defaultdict(Pocket)
        self.named: dict[str, Pocket] = defaultdict(Pocket)
        self.kinds: dict[type, Pocket] = defaultdict(Pocket)
        self.nameless = Pocket()
        """Decoded bytes of unknown meaning."""

    def learn(self, message: Message) -> None:
        """Keep all values of a message."""
        self.messages[message.DESCRIPTOR.full_name].put(message)
        for field, value in message.ListFields():
            items = list(value.values()) if is_map(field) else list(value) if field.is_repeated else [value]
            for item in items:
                if isinstance(item, Message):
                    self.learn(item)
                else:
                    self.hear(field.name, item)

    def hear(self, name: str, value: Any) -> None:
        """Keep a value, and the bytes that it may encode."""
        # A `next_` field of an answer is for the field without that prefix in the next request.
        self.named[name.removeprefix("next_")].put(value)
        self.kinds[type(value)].put(value)
        if isinstance(value, str):
            with suppress(BadReference):
                self.learn(parse_reference(value))
            for part in re.split(r"[^A-Za-z0-9_=+-]+", value):
                self._decode(part)

    def learn_error(self, error: grpc.RpcError) -> None:
        """Keep an error's text and values."""
        call: Any = error
        self.hear("message", call.details() or "")
        for key, value in call.trailing_metadata() or ():
            if key != DETAILS_KEY:
                continue
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    for name, text in info.metadata.items():
                        self.hear(name, text)

    def holds(self, secrets: set[bytes]) -> bool:
        """Whether the peer received any of these secrets."""
        return not secrets.isdisjoint(self.kinds[bytes].all())

    def _decode(self, part: str) -> None:
        if not 4 <= len(part) <= 4096:
            return
        with suppress(ValueError, binascii.Error):
            self._decoded(bytes.fromhex(part))
        with suppress(ValueError, binascii.Error):
            self._decoded(base64.b64decode(part + "=" * (-len(part) % 4), b"-_", validate=True))

    def _decoded(self, value: bytes) -> None:
        self.kinds[bytes].put(value)
        if not self.named["incarnation"].has(value):
            self.nameless.put(value)
