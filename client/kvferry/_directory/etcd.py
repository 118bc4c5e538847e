"""A directory in etcd, version 3: node servers publish their engines under a lease, and clients watch them.

    PREFIX/homes/HOME                a node server
    PREFIX/engines/ENGINE_ID/HOME    an engine, and where it has its home; the value is a `Listing`

Names in keys are quoted as in URLs. All keys of a node server hang on one lease of etcd, so that they end together. A
reader keeps listings that were parsed when they came (`Entries`), and nothing of what is none.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import closing
from urllib.parse import quote, unquote

from kvferry._directory import etcd_v3_pb2 as etcd
from kvferry._directory.directory import Directory, unavailable
from kvferry._directory.etcd_calls import EtcdAccess, EtcdCalls
from kvferry._directory.listing import Listed, Listing, checked_home
from kvferry._logs import Log
from kvferry.errors import DirectoryUnavailable, InvalidField, MessageTooLarge

logger = Log(__name__)

PAGE = 1000
"""Most keys that are asked for at once. Of large ones fewer are: an answer of etcd has to fit a message."""

WITHDRAW_TIMEOUT = 2.0
"""Seconds for taking everything back: a node server that stops does not wait longer for etcd."""

MAX_KEYS = 200_000
MAX_BYTES = 64 << 20
"""Most listings, and most bytes of their keys and values, that a client takes from a directory, so that a peer that can
write there cannot fill its memory."""

MAX_NAMED = 100
"""Most keys without a listing that are named in the log, and how many bytes of each."""

MAX_PROBLEM = 500
"""Most characters of what is wrong with a key."""


class EtcdDirectory(Directory):
    """A prefix in etcd.

    Threading: as `Directory`; `publish`, `renew` and `withdraw` are called by one thread.

    Args:
        name: the directory's URL.
        access: how etcd is reached.
        prefix: what all keys begin with, without a slash at its end.
    """

    publishes = True

    def __init__(self, name: str, access: EtcdAccess, prefix: str) -> None:
        super().__init__(name)
        self._prefix = prefix
        # The first key that may be there, and the first after all of them: "0" is the character after the slash.
        self._begin, self._end = f"{prefix}/".encode(), f"{prefix}0".encode()
        self._entries = Entries(name, prefix)
        self._reading = EtcdCalls(name, access)
        self._writing = EtcdCalls(name, access)
        self._lease = 0
        self._ttl = 0.0
        self._wanted: dict[bytes, bytes] = {}
        self._written: dict[bytes, bytes] = {}

    # For node servers.

    def publish(self, home: str, engines: Collection[Listing], ttl: float) -> None:
        self._ttl = ttl
        self._wanted = {_key(self._prefix, "homes", checked_home(home)): b"{}"} | {
            _key(self._prefix, "engines", listing.engine_id, listing.home): listing.to_json() for listing in engines
        }
        self._write()

    def renew(self) -> None:
        if self._lease:
            request = etcd.LeaseKeepAliveRequest(ID=self._lease)
            answer = self._writing.call("Lease/LeaseKeepAlive", request, etcd.LeaseKeepAliveResponse)
            if answer.TTL <= 0:
                # The lease has ended, with all its keys: etcd was out of reach for too long.
                self._lease = 0
        self._write()

    def withdraw(self) -> None:
        lease, self._lease = self._lease, 0
        self._wanted, self._written = {}, {}
        if lease:
            request = etcd.LeaseRevokeRequest(ID=lease)
            self._writing.call("Lease/LeaseRevoke", request, etcd.Done, WITHDRAW_TIMEOUT)

    def _write(self) -> None:
        if not self._wanted:
            return
        if not self._lease:
            self._written = {}
            grant = etcd.LeaseGrantRequest(TTL=math.ceil(self._ttl))
            self._lease = self._writing.call("Lease/LeaseGrant", grant, etcd.LeaseGrantResponse).ID
        try:
            for key, value in self._wanted.items():
                if self._written.get(key) != value:
                    self._writing.call("KV/Put", etcd.PutRequest(key=key, value=value, lease=self._lease), etcd.Done)
                    self._written[key] = value
            for key in self._written.keys() - self._wanted.keys():
                self._writing.call("KV/DeleteRange", etcd.DeleteRangeRequest(key=key), etcd.Done)
                del self._written[key]
        except DirectoryUnavailable:
            # Perhaps because the lease has ended. The next attempt writes everything under another one; this one, if it
            # is still there, ends by itself and takes nothing along that has been written again.
            self._lease = 0
            raise

    # For readers.

    def _follow(self) -> None:
        while not self._stop.is_set():
            revision = self._read_all()
            self._learn(self._entries.listed())
            self._watch(revision)

    def _interrupt(self) -> None:
        self._reading.interrupt()
        self._writing.interrupt()

    def _read_all(self) -> int:
        """Read all listings; returns the revision at which they were so."""
        self._entries.clear()
        request = etcd.RangeRequest(key=self._begin, range_end=self._end, limit=PAGE)
        while True:
            try:
                answer = self._reading.call("KV/Range", request, etcd.RangeResponse)
            except MessageTooLarge as error:
                if request.keys_only:
                    raise unavailable(self.name, f"it has a key that is itself too large: {error.message}") from None
                # One value that is too large by itself is passed over, by the name that its key has.
                request.keys_only = request.limit == 1
                request.limit = max(1, request.limit // 2)
                continue
            for entry in answer.kvs:
                if request.keys_only:
                    self._entries.skip(entry.key, "its value is larger than an answer of etcd may be")
                else:
                    self._entries.put(entry)
            if not request.revision:
                # The further pages are asked for as they were at this revision.
                request.revision = answer.header.revision
            if not answer.more or not answer.kvs:
                return request.revision
            request.key = answer.kvs[-1].key + b"\0"
            request.keys_only, request.limit = False, min(PAGE, 2 * request.limit)

    def _watch(self, revision: int) -> None:
        """Follow all changes after this revision. Returns when etcd has forgotten them, and must be asked for all."""
        # In fragments: a transaction of many changes would not fit an answer otherwise.
        asked = etcd.WatchCreateRequest(
            key=self._begin, range_end=self._end, start_revision=revision + 1, fragment=True
        )
        with closing(self._reading.watch(etcd.WatchRequest(create_request=asked))) as answers:
            for answer in answers:
                if answer.compact_revision:
                    return
                if answer.canceled:
                    raise unavailable(self.name, f"etcd ended the watch: {answer.cancel_reason or 'it gave no reason'}")
                for event in answer.events:
                    if event.type == etcd.Event.DELETE:
                        self._entries.drop(event.kv.key)
                    else:
                        self._entries.put(event.kv)
                if answer.events and not answer.fragment:
                    self._learn(self._entries.listed())
        raise unavailable(self.name, "etcd ended the watch")


def _key(prefix: str, kind: str, *names: str) -> bytes:
    return "/".join((prefix, kind, *(quote(name, safe="") for name in names))).encode()


class Entries:
    """The listings below a prefix. Belongs to the thread that follows the directory.

    A key that is not ours, such as one of a directory whose prefix is below this one, is passed over. A key of ours
    without a listing, or with that of another key, is named in the log once.

    Args:
        name: the directory's URL, for errors and the log.
        prefix: what its keys begin with.
    """

    def __init__(self, name: str, prefix: str) -> None:
        self._name = name
        self._prefix = prefix
        self._found: dict[bytes, tuple[int, int, str | Listing]] = {}
        """By key: bytes of key and value, the revision at which it was listed, and the home or the engine."""
        self._bytes = 0
        self._named: set[bytes] = set()

    def clear(self) -> None:
        """Forget all listings."""
        self._found, self._bytes = {}, 0

    def put(self, entry: etcd.KeyValue) -> None:
        """Take a key and its value.

        Raises:
            DirectoryUnavailable: there are more listings, or larger ones, than a client takes.
        """
        self.drop(entry.key)
        kind, *names = entry.key[len(self._prefix.encode()) + 1 :].split(b"/")
        if (kind, len(names)) not in ((b"homes", 1), (b"engines", 2)):
            return
        try:
            found = self._parsed(entry, names[0] if kind == b"homes" else None)
        except (InvalidField, UnicodeDecodeError) as error:
            # A peer that may write there may write anything; the other entries are good all the same.
            self.skip(entry.key, str(error))
            return
        size = len(entry.key) + len(entry.value)
        self._found[entry.key] = size, entry.create_revision, found
        self._bytes += size
        if len(self._found) > MAX_KEYS:
            raise unavailable(self._name, f"it has more than {MAX_KEYS} listings")
        if self._bytes > MAX_BYTES:
            raise unavailable(self._name, f"its listings have more than {MAX_BYTES} bytes")

    def drop(self, key: bytes) -> None:
        """Forget a key."""
        size, *_ = self._found.pop(key, (0,))
        self._bytes -= size

    def skip(self, key: bytes, problem: str) -> None:
        """Say once that a key has no listing."""
        # A peer that can write there can make keys of a megabyte.
        shown = key[:MAX_NAMED]
        if shown not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(shown)
            name, problem = ascii(shown.decode(errors="replace")), problem[:MAX_PROBLEM]
            logger.warning("the key %s in %s is not a listing and is left out: %s", name, self._name, problem)

    def listed(self) -> Listed:
        """All that the directory says."""
        homes = frozenset(found if isinstance(found, str) else found.home for *_, found in self._found.values())
        engines = [(revision, found) for _, revision, found in self._found.values() if isinstance(found, Listing)]
        # The newest last; the names order those of one revision.
        engines.sort(key=lambda each: (each[0], each[1].engine_id, each[1].home))
        return Listed(homes, tuple(listing for _, listing in engines))

    def _parsed(self, entry: etcd.KeyValue, home_in_key: bytes | None) -> str | Listing:
        """Return the home or the engine that an entry lists; raises `InvalidField` if it stands under another key."""
        found: str | Listing
        if home_in_key is not None:
            found = checked_home(unquote(home_in_key.decode(), errors="strict"))
            meant = _key(self._prefix, "homes", found)
        else:
            found = Listing.from_json(entry.value)
            meant = _key(self._prefix, "engines", found.engine_id, found.home)
        if meant != entry.key:
            raise InvalidField("key", entry.key.decode(), f"{meant.decode()}, as the value says")
        return found
