"""The entries of a directory, their form as JSON, and the choice between several entries of an engine. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry._arguments import instance, mapping, string_map, text
from kvferry._wire.authority import INCARNATION_BYTES
from kvferry._wire.channel import parse_address
from kvferry.errors import InvalidField

MAX_NAME_BYTES = 256  # Most bytes of an engine_id, of a home, and of the name and the value of a label
MAX_LABELS = 16
MAX_ENTRY_BYTES = 16 * 1024  # Most bytes of an entry that is read from a directory: more than any valid entry has


@dataclass(frozen=True, slots=True)
class Listing:
    """The home of one engine. All fields are public. Raises `InvalidField` for a field of the wrong type or value.

    Attributes:
        engine_id: the engine.
        home: ``host:port`` at which other hosts reach the engine's home.
        incarnation: tells apart two engines of one name; empty: not known.
        labels: for people and routers, such as ``{"role": "prefill", "model": "llama3-70b"}``.
    """

    engine_id: str
    home: str
    incarnation: bytes = b""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 1 <= len(text("engine_id", self.engine_id).encode()) <= MAX_NAME_BYTES:
            raise InvalidField("engine_id", self.engine_id, f"1 to {MAX_NAME_BYTES} bytes")
        if len(instance("incarnation", self.incarnation, bytes, "bytes")) not in (0, INCARNATION_BYTES):
            raise InvalidField("incarnation", self.incarnation, f"{INCARNATION_BYTES} bytes, or none")
        object.__setattr__(self, "home", checked_home(self.home))
        object.__setattr__(self, "labels", checked_labels(self.labels))

    def to_json(self) -> bytes:
        """Encode the listing as directories keep it."""
        said = {"engine_id": self.engine_id, "home": self.home, "labels": dict(self.labels)}
        if self.incarnation:
            said["incarnation"] = self.incarnation.hex()
        return json.dumps(said, sort_keys=True).encode()

    @classmethod
    def from_json(cls, encoded: bytes) -> Listing:
        """Decode a listing, and ignore fields that a later version has added. Raises `InvalidField`."""
        if len(encoded) > MAX_ENTRY_BYTES:
            raise InvalidField("listing", f"{len(encoded)} bytes", f"at most {MAX_ENTRY_BYTES}")
        try:
            said: Any = mapping("listing", json.loads(encoded), "a JSON object")
            incarnation = bytes.fromhex(text("incarnation", said.get("incarnation", "")))
        except InvalidField:
            raise
        except (ValueError, RecursionError):
            raise InvalidField("listing", f"{len(encoded)} bytes", "a JSON object") from None
        return cls(said.get("engine_id"), said.get("home"), incarnation, said.get("labels", {}))


@dataclass(frozen=True, slots=True)
class Listed:
    """The content of a directory at one time.

    Attributes:
        homes: ``host:port`` of every node server, with and without engines.
        engines: the engines, the last listed at the end. An engine may be listed twice, e.g. while its old home has not
            noticed yet that the engine moved.
        aliases: further addresses of the same homes, which references may contain.
    """

    homes: frozenset[str] = frozenset()
    engines: tuple[Listing, ...] = ()
    aliases: frozenset[str] = frozenset()

    def find(self, engine_id: str, incarnation: bytes = b"") -> Listing | None:
        """Return the listing of this incarnation of an engine, else the engine's newest listing, else None.

        Another incarnation's home helps, too: it answers with a typed error that the engine has restarted.
        """
        found = [listing for listing in self.engines if listing.engine_id == engine_id]
        same = [listing for listing in found if incarnation and listing.incarnation == incarnation]
        chosen = same or found
        return chosen[-1] if chosen else None

    def covers(self, home: str) -> bool:
        """Whether a listed home has this address."""
        return home in self.homes or home in self.aliases or any(listing.home == home for listing in self.engines)


def checked_home(home: str) -> str:
    """Return the address of a home if other hosts can connect to it; else raises `InvalidField`."""
    address = parse_address(text("home", home), "home")
    if address.is_unix or not address.port or len(home.encode()) > MAX_NAME_BYTES or not home.isprintable():
        raise InvalidField("home", home, f"host:port, as other hosts reach it, in at most {MAX_NAME_BYTES} bytes")
    return str(address)


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels if they are few, short and printable; else raises `InvalidField`."""
    checked = dict(string_map("labels", labels))
    if len(checked) > MAX_LABELS:
        raise InvalidField("labels", f"{len(checked)} labels", f"at most {MAX_LABELS}")
    for part in (*checked, *checked.values()):
        if len(part.encode()) > MAX_NAME_BYTES or not part.isprintable():
            raise InvalidField("labels", part, f"printable names and values of at most {MAX_NAME_BYTES} bytes")
    return checked
