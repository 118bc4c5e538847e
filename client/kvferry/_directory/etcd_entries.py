"""What a reader keeps of a directory in etcd: listings that were parsed when they came, and nothing of what is none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import itemgetter
from urllib.parse import quote, unquote

from kvferry._directory import etcd_v3_pb2 as etcd
from kvferry._directory.directory import unavailable
from kvferry._directory.listing import Listed, Listing, checked_home
from kvferry.errors import InvalidField

logger = logging.getLogger(__name__)

MAX_KEYS = 200_000
MAX_BYTES = 64 << 20
"""Most listings, and most bytes of their keys and values, that a client takes from a directory, so that whoever can
write there cannot fill its memory."""

MAX_NAMED = 100
"""Most keys without a listing that are named in the log, and how many bytes of each."""

MAX_PROBLEM = 500
"""Most characters of what is wrong with a key."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of the keys below a prefix.

    Attributes:
        prefix: what all keys begin with, without a slash at its end.
    """

    prefix: str

    @property
    def begin(self) -> bytes:
        """The first key that may be there."""
        return f"{self.prefix}/".encode()

    @property
    def end(self) -> bytes:
        """The first key after all that begin with the prefix and a slash: "0" is the character after it."""
        return f"{self.prefix}0".encode()

    def home(self, home: str) -> bytes:
        """The key of a node server."""
        return self._key("homes", home)

    def engine(self, listing: Listing) -> bytes:
        """The key of an engine at its home."""
        return self._key("engines", listing.engine_id, listing.home)

    def _key(self, kind: str, *names: str) -> bytes:
        return "/".join((self.prefix, kind, *(quote(name, safe="") for name in names))).encode()


class Entries:
    """The listings below a prefix. Belongs to the thread that follows the directory.

    A key that is not ours, such as one of a directory whose prefix is below this one, is passed over. A key of ours
    without a listing, or with that of another key, is named in the log once.

    Args:
        name: the directory's URL, for errors and the log.
        keys: the names of its keys.
    """

    def __init__(self, name: str, keys: Keys) -> None:
        self._name = name
        self._keys = keys
        self._homes: dict[bytes, str] = {}
        self._engines: dict[bytes, tuple[tuple[int, str, str], Listing]] = {}
        """Each with what orders them: the revision at which it was listed, and the names for those of one revision."""
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0
        self._named: set[bytes] = set()

    def clear(self) -> None:
        """Forget all listings."""
        self._homes, self._engines, self._sizes, self._bytes = {}, {}, {}, 0

    def put(self, entry: etcd.KeyValue) -> None:
        """Take a key and its value.

        Raises:
            DirectoryUnavailable: there are more listings, or larger ones, than a client takes.
        """
        self.drop(entry.key)
        kind, *names = entry.key[len(self._keys.begin) :].split(b"/")
        if (kind, len(names)) not in ((b"homes", 1), (b"engines", 2)):
            return
        try:
            self._parse(kind, names, entry)
        except (InvalidField, UnicodeDecodeError) as error:
            # Whoever may write there may write anything; the other entries are good all the same.
            self.skip(entry.key, str(error))
            return
        size = self._sizes[entry.key] = len(entry.key) + len(entry.value)
        self._bytes += size
        if len(self._sizes) > MAX_KEYS:
            raise unavailable(self._name, f"it has more than {MAX_KEYS} listings")
        if self._bytes > MAX_BYTES:
            raise unavailable(self._name, f"its listings have more than {MAX_BYTES} bytes")

    def drop(self, key: bytes) -> None:
        """Forget a key."""
        self._homes.pop(key, None)
        self._engines.pop(key, None)
        self._bytes -= self._sizes.pop(key, 0)

    def skip(self, key: bytes, problem: str) -> None:
        """Say once that a key has no listing."""
        # Whoever can write there can make keys of a megabyte.
        shown = key[:MAX_NAMED]
        if shown not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(shown)
            name, problem = ascii(shown.decode(errors="replace")), problem[:MAX_PROBLEM]
            logger.warning("the key %s in %s is not a listing and is left out: %s", name, self._name, problem)

    def listed(self) -> Listed:
        """All that the directory says."""
        engines = sorted(self._engines.values(), key=itemgetter(0))
        homes = frozenset(self._homes.values()).union(listing.home for _, listing in engines)
        return Listed(homes, tuple(listing for _, listing in engines))

    def _parse(self, kind: bytes, names: list[bytes], entry: etcd.KeyValue) -> None:
        if kind == b"homes":
            home = checked_home(unquote(names[0].decode(), errors="strict"))
            meant = self._keys.home(home)
            self._homes[entry.key] = home
        else:
            listing = Listing.from_json(entry.value)
            meant = self._keys.engine(listing)
            self._engines[entry.key] = (entry.create_revision, listing.engine_id, listing.home), listing
        if meant != entry.key:
            self.drop(entry.key)
            raise InvalidField("key", entry.key.decode(), f"{meant.decode()}, as the value says")
