"""A directory in etcd, version 3: node servers publish their engines under a lease, and clients watch them.

    PREFIX/homes/HOME                a node server
    PREFIX/engines/ENGINE_ID/HOME    an engine, and where it has its home; the value is a `Listing`

Names in keys are quoted as in URLs. All keys of a node server hang on one lease of etcd, so that they end together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator

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
from kvferry._directory.etcd_entries import Entries, Keys
from kvferry._directory.listing import Listing, checked_home
from kvferry.errors import DirectoryUnavailable, MessageTooLarge

PAGE = 1000
"""Most keys that are asked for at once. Of large ones fewer are: an answer of etcd has to fit a message."""

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
        self._keys = Keys(prefix)
        self._entries = Entries(name, self._keys)
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
        self._wanted = {self._keys.home(home): b"{}"} | {
            self._keys.engine(listing): listing.to_json() for listing in engines
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
            self._learn(entries.listed())
            self._watch(entries, revision)

    def _interrupt(self) -> None:
        self._reading.interrupt()
        self._writing.interrupt()

    def _all(self) -> tuple[Entries, int]:
        """Return all listings, and the revision at which they were so."""
        self._entries.clear()
        request = etcd.RangeRequest(key=self._keys.begin, range_end=self._keys.end, limit=PAGE)
        while True:
            try:
                answer = self._reading.call(RANGE, request)
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
                return self._entries, request.revision
            request.key = answer.kvs[-1].key + b"\0"
            request.keys_only, request.limit = False, min(PAGE, 2 * request.limit)

    def _watch(self, entries: Entries, revision: int) -> None:
        """Follow all changes after this revision. Returns when etcd has forgotten them, and must be asked for all."""
        # In fragments: a transaction of many changes would not fit an answer otherwise.
        asked = etcd.WatchCreateRequest(
            key=self._keys.begin, range_end=self._keys.end, start_revision=revision + 1, fragment=True
        )
        over = threading.Event()
        try:
            self._apply(self._reading.stream(WATCH, _requests(etcd.WatchRequest(create_request=asked), over)), entries)
        finally:
            over.set()

    def _apply(self, answers: Iterator[etcd.WatchResponse], entries: Entries) -> None:
        for answer in answers:
            if answer.compact_revision:
                return
            if answer.canceled:
                raise unavailable(self.name, f"etcd ended the watch: {answer.cancel_reason or 'it gave no reason'}")
            for event in answer.events:
                if event.type == etcd.Event.DELETE:
                    entries.drop(event.kv.key)
                else:
                    entries.put(event.kv)
            if answer.events and not answer.fragment:
                self._learn(entries.listed())
        raise unavailable(self.name, "etcd ended the watch")


def _requests(request: etcd.WatchRequest, over: threading.Event) -> Iterator[etcd.WatchRequest]:
    """The requests of a watch. It lasts until its requests end; gRPC takes them on a thread of its own."""
    yield request
    over.wait()
