"""A directory in etcd, version 3: node servers publish their engines under a lease, and clients watch them.

    PREFIX/homes/HOME                a node server
    PREFIX/engines/ENGINE_ID/HOME    an engine, and where it has its home; the value is a `Listing`

Names in keys are quoted as in URLs. All keys of a node server hang on one lease of etcd, so that they end together.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Iterator
from urllib.parse import quote, unquote

from kvferry._directory import etcd_v3_pb2 as etcd
from kvferry._directory.directory import Directory, unavailable
from kvferry._directory.etcd_calls import (
    DELETE,
    GRANT,
    KEEP_ALIVE,
    PUT,
    RANGE,
    REVOKE,
    WATCH,
    EtcdAccess,
    EtcdCalls,
)
from kvferry._directory.listing import Listed, Listing, checked_home
from kvferry.errors import DirectoryUnavailable, InvalidField

logger = logging.getLogger(__name__)

PAGE = 1000
"""Keys that are asked for at once: an answer stays far below the largest message."""

MAX_KEYS = 200_000
"""Most keys that a client takes from a directory, so that whoever can write there cannot fill its memory."""

WITHDRAW_TIMEOUT = 2.0
"""Seconds for taking everything back: a node server that stops does not wait longer for etcd."""


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
        self._reading = EtcdCalls(name, access)
        self._writing = EtcdCalls(name, access)
        self._lease = 0
        self._ttl = 0.0
        self._wanted: dict[bytes, bytes] = {}
        self._written: dict[bytes, bytes] = {}

    # For node servers.

    def publish(self, home: str, engines: Collection[Listing], ttl: float) -> None:
        """See `Directory.publish`."""
        home = checked_home(home)
        self._ttl = ttl
        self._wanted = {self._key("homes", home): b"{}"} | {
            self._key("engines", listing.engine_id, listing.home): listing.to_json() for listing in engines
        }
        self._write()

    def renew(self) -> None:
        """See `Directory.renew`."""
        if self._lease:
            answer = self._writing.ask_once(KEEP_ALIVE, etcd.LeaseKeepAliveRequest(ID=self._lease))
            if answer.TTL <= 0:
                # The lease has ended, with all its keys: etcd was out of reach for too long.
                self._lease = 0
        self._write()

    def withdraw(self) -> None:
        """See `Directory.withdraw`."""
        lease, self._lease = self._lease, 0
        self._wanted, self._written = {}, {}
        if lease:
            self._writing.call(REVOKE, etcd.LeaseRevokeRequest(ID=lease), WITHDRAW_TIMEOUT)

    def _write(self) -> None:
        if not self._wanted:
            return
        if not self._lease:
            self._written = {}
            self._lease = self._writing.call(GRANT, etcd.LeaseGrantRequest(TTL=math.ceil(self._ttl))).ID
        try:
            for key, value in self._wanted.items():
                if self._written.get(key) != value:
                    self._writing.call(PUT, etcd.PutRequest(key=key, value=value, lease=self._lease))
                    self._written[key] = value
            for key in self._written.keys() - self._wanted.keys():
                self._writing.call(DELETE, etcd.DeleteRangeRequest(key=key))
                del self._written[key]
        except DirectoryUnavailable:
            # Perhaps because the lease has ended. The next attempt writes everything under another one; this one, if it
            # is still there, ends by itself and takes nothing along that has been written again.
            self._lease = 0
            raise

    # For readers.

    def _follow(self) -> None:
        while not self._stop.is_set():
            entries, revision = self._all()
            self._learn(self._listed_in(entries))
            self._watch(entries, revision)

    def _interrupt(self) -> None:
        self._reading.interrupt()
        self._writing.interrupt()

    def _all(self) -> tuple[dict[bytes, etcd.KeyValue], int]:
        """Return all keys, and the revision at which they were so."""
        entries: dict[bytes, etcd.KeyValue] = {}
        request = etcd.RangeRequest(key=self._begin, range_end=self._end, limit=PAGE)
        while True:
            answer = self._reading.call(RANGE, request)
            entries.update((entry.key, entry) for entry in answer.kvs)
            self._check(entries)
            if not request.revision:
                # The further pages are asked for as they were at this revision.
                request.revision = answer.header.revision
            if not answer.more or not answer.kvs:
                return entries, request.revision
            request.key = answer.kvs[-1].key + b"\0"

    def _watch(self, entries: dict[bytes, etcd.KeyValue], revision: int) -> None:
        """Follow all changes after this revision. Returns when etcd has forgotten them, and must be asked for all."""
        asked = etcd.WatchCreateRequest(key=self._begin, range_end=self._end, start_revision=revision + 1)
        over = threading.Event()
        try:
            self._apply(self._reading.stream(WATCH, _requests(etcd.WatchRequest(create_request=asked), over)), entries)
        finally:
            over.set()

    def _apply(self, answers: Iterator[etcd.WatchResponse], entries: dict[bytes, etcd.KeyValue]) -> None:
        for answer in answers:
            if answer.compact_revision:
                return
            if answer.canceled:
                raise unavailable(self.name, f"etcd ended the watch: {answer.cancel_reason or 'it gave no reason'}")
            for event in answer.events:
                if event.type == etcd.Event.DELETE:
                    entries.pop(event.kv.key, None)
                else:
                    entries[event.kv.key] = event.kv
            self._check(entries)
            if answer.events:
                self._learn(self._listed_in(entries))
        raise unavailable(self.name, "etcd ended the watch")

    def _listed_in(self, entries: dict[bytes, etcd.KeyValue]) -> Listed:
        homes: set[str] = set()
        engines: list[tuple[int, Listing]] = []
        for entry in entries.values():
            try:
                kind, _, rest = entry.key[len(self._begin) :].decode().partition("/")
                if kind == "homes":
                    homes.add(checked_home(unquote(rest, errors="strict")))
                elif kind == "engines":
                    engines.append((entry.create_revision, Listing.from_json(entry.value)))
            except (InvalidField, UnicodeDecodeError) as error:
                # Whoever may write there may write anything; the other entries are good all the same.
                logger.debug("an entry of %s is not a listing: %s", self.name, error)
        ordered = [
            listing for _, listing in sorted(engines, key=lambda each: (each[0], each[1].engine_id, each[1].home))
        ]
        return Listed(frozenset(homes.union(listing.home for listing in ordered)), tuple(ordered))

    def _check(self, entries: dict[bytes, etcd.KeyValue]) -> None:
        if len(entries) > MAX_KEYS:
            raise unavailable(self.name, f"it has more than {MAX_KEYS} keys")

    @property
    def _begin(self) -> bytes:
        return f"{self._prefix}/".encode()

    @property
    def _end(self) -> bytes:
        # The first key after all that begin with the prefix and a slash: "0" is the character after it.
        return f"{self._prefix}0".encode()

    def _key(self, *parts: str) -> bytes:
        return "/".join((self._prefix, parts[0], *(quote(part, safe="") for part in parts[1:]))).encode()


def _requests(request: etcd.WatchRequest, over: threading.Event) -> Iterator[etcd.WatchRequest]:
    """The requests of a watch. It lasts until its requests end; gRPC takes them on a thread of its own."""
    yield request
    over.wait()
