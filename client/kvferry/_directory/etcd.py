"""A directory in etcd, version 3: node servers publish their engines under a lease, and clients watch them.

    PREFIX/homes/HOME                a node server
    PREFIX/engines/ENGINE_ID/HOME    an engine, and where it has its home; the value is a `Listing`

Names in keys are quoted as in URLs. All keys of a node server have one lease of etcd, so that they end together. A
reader parses listings on arrival, and keeps nothing of other keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar, cast
from urllib.parse import quote, unquote

import grpc
from google.protobuf.message import Message

from kvferry._directory import etcd_v3_pb2 as etcd
from kvferry._directory.directory import Directory, Listed, Listing, checked_home, unavailable
from kvferry._logs import Log
from kvferry._wire.channel import TlsConfig, connect
from kvferry.errors import DirectoryUnavailable, InvalidField

logger = Log(__name__)

CALL_TIMEOUT = 5.0  # Seconds for one call

Answer = TypeVar("Answer", bound=Message)

PACKAGE = "/etcdserverpb."  # Of etcd's methods; that of the messages has another name here (third_party/etcd)
WITH_LEADER = ("hasleader", "true")  # Makes etcd end a watch on a member that a partition has cut off from the others
TOKEN_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)
"""etcd's answers to a token that it no longer knows, and to a token from before a change of users."""

PAGE = 200  # Most keys in one request: an answer of etcd has to fit a message of 4 MiB, and an entry has up to 16 KiB
WITHDRAW_TIMEOUT = 2.0  # Seconds that a stopping node server waits for etcd to withdraw its listings


class EtcdDirectory(Directory):
    """A prefix of etcd's keys, without a slash at its end. One thread calls `publish`, `renew` and `withdraw`."""

    publishes = True

    def __init__(self, name: str, access: EtcdAccess, prefix: str) -> None:
        super().__init__(name)
        # The first possible key, and the first key after all possible ones: "0" is the character after the slash.
        self._begin, self._end = f"{prefix}/".encode(), f"{prefix}0".encode()
        # By key: the revision at which it was listed, and the home or the engine.
        self._found: dict[bytes, tuple[int, str | Listing]] = {}
        self._reading = EtcdCalls(name, access)
        self._writing = EtcdCalls(name, access)
        self._lease = 0
        self._ttl = 0.0
        self._wanted: dict[bytes, bytes] = {}
        self._written: dict[bytes, bytes] = {}

    def publish(self, home: str, engines: Collection[Listing], ttl: float) -> None:
        self._ttl = ttl
        self._wanted = {self._key("homes", checked_home(home)): b"{}"}
        self._wanted |= {self._key("engines", each.engine_id, each.home): each.to_json() for each in engines}
        self._write()

    def renew(self) -> None:
        if self._lease:
            request = etcd.LeaseKeepAliveRequest(ID=self._lease)
            answer = self._writing.call("Lease/LeaseKeepAlive", request, etcd.LeaseKeepAliveResponse)
            if answer.TTL <= 0:
                # The lease has ended with all its keys: etcd was unreachable for too long.
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
            # Perhaps the lease has ended. The next attempt writes all keys under a new lease. If the old lease still
            # exists, its end deletes no key that has been written again.
            self._lease = 0
            raise

    def _follow(self) -> float:
        revision = self._read_all()
        self._learn_found()
        self._watch(revision)
        return 0.0

    def _interrupt(self) -> None:
        self._reading.interrupt()
        self._writing.interrupt()

    def _read_all(self) -> int:
        """Read all listings, and return their revision."""
        self._found = {}
        request = etcd.RangeRequest(key=self._begin, range_end=self._end, limit=PAGE)
        while True:
            answer = self._reading.call("KV/Range", request, etcd.RangeResponse)
            for entry in answer.kvs:
                self._put(entry)
            # Further pages are read at the same revision.
            request.revision = request.revision or answer.header.revision
            if not answer.more or not answer.kvs:
                return request.revision
            request.key = answer.kvs[-1].key + b"\0"

    def _watch(self, revision: int) -> None:
        """Follow all changes after this revision. Returns if etcd no longer has them, so that all keys must be read."""
        asked = etcd.WatchCreateRequest(key=self._begin, range_end=self._end, start_revision=revision + 1)
        # A transaction of many changes may not fit one answer.
        asked.fragment = True
        with closing(self._reading.watch(etcd.WatchRequest(create_request=asked))) as answers:
            for answer in answers:
                if answer.compact_revision:
                    return
                if answer.canceled:
                    raise unavailable(self.name, f"etcd ended the watch: {answer.cancel_reason or 'it gave no reason'}")
                for event in answer.events:
                    if event.type == etcd.Event.DELETE:
                        self._found.pop(event.kv.key, None)
                    else:
                        self._put(event.kv)
                if answer.events and not answer.fragment:
                    self._learn_found()
        raise unavailable(self.name, "etcd ended the watch")

    def _put(self, entry: etcd.KeyValue) -> None:
        """Add or replace a key and its value. Foreign keys, such as those of a directory with a prefix below this one,
        are ignored. The log names a key of this directory if its value is no listing, or the listing of another key."""
        self._found.pop(entry.key, None)
        kind, *names = entry.key[len(self._begin) :].split(b"/")
        found: str | Listing
        try:
            if kind == b"homes" and len(names) == 1:
                found = checked_home(unquote(names[0].decode(), errors="strict"))
                meant = self._key("homes", found)
            elif kind == b"engines" and len(names) == 2:
                found = Listing.from_json(entry.value)
                meant = self._key("engines", found.engine_id, found.home)
            else:
                return
            if meant != entry.key:
                raise InvalidField("key", entry.key.decode(), f"{meant.decode()}, as the value says")
        except (InvalidField, UnicodeDecodeError) as error:
            # One wrong entry does not make the others wrong.
            shown = ascii(entry.key.decode(errors="replace")), self.name, str(error)
            logger.warning("the key %.100s in %s is not a listing and is left out: %.500s", *shown)
            return
        self._found[entry.key] = entry.create_revision, found

    def _learn_found(self) -> None:
        homes = frozenset(found if isinstance(found, str) else found.home for _, found in self._found.values())
        engines = [(revision, found) for revision, found in self._found.values() if isinstance(found, Listing)]
        # The newest last; within a revision by name.
        engines.sort(key=lambda each: (each[0], each[1].engine_id, each[1].home))
        self._learn(Listed(homes, tuple(listing for _, listing in engines)))

    def _key(self, kind: str, *names: str) -> bytes:
        return self._begin + "/".join((kind, *(quote(name, safe="") for name in names))).encode()


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    endpoints: tuple[str, ...]  # `host:port` of each member
    tls: TlsConfig | None = None
    user: str = ""  # Empty: no authentication
    password_file: Path | None = None  # Read for each authentication, so that the password can be changed


class EtcdCalls:
    """Calls of one thread to etcd. After a failure the next call goes to the next endpoint. `name` is the directory's
    URL, for errors. Only `interrupt` may be called from other threads."""

    def __init__(self, name: str, access: EtcdAccess) -> None:
        self._name = name
        self._access = access
        self._endpoints = itertools.cycle(access.endpoints)
        self._endpoint = next(self._endpoints)
        self._token = ""
        self._channel: grpc.Channel | None = None
        self._closed = False

    def call(self, method: str, request: Message, answer: type[Answer], timeout: float | None = None) -> Answer:
        """Call a method, such as ``KV/Put``; also a streaming method with one request and one answer, for which gRPC
        sends the same bytes. None: `CALL_TIMEOUT`. Raises `DirectoryUnavailable` if etcd does not answer or refuses."""
        had_token = bool(self._token)
        try:
            made = self._dialled().unary_unary(PACKAGE + method, type(request).SerializeToString, answer.FromString)
            return made(request, timeout=timeout or CALL_TIMEOUT, metadata=self._metadata())
        except grpc.RpcError as error:
            if not had_token or cast("grpc.Call", error).code() not in TOKEN_REFUSED:
                raise self._failed(error) from None
        except ValueError:
            # gRPC raises it for a channel that `interrupt` has closed.
            raise self._is_closed() from None
        self._token = ""
        return self.call(method, request, answer, timeout)

    def watch(self, request: etcd.WatchRequest) -> Generator[etcd.WatchResponse]:
        """Yield the answers of a watch, until etcd ends it or the generator is closed. Raises as `call`."""
        # A watch lasts until its requests end. gRPC takes them on a thread of gRPC.
        requests: Queue[etcd.WatchRequest | None] = Queue()
        requests.put(request)
        encode, decode = etcd.WatchRequest.SerializeToString, etcd.WatchResponse.FromString
        made: Any = self._dialled().stream_stream(f"{PACKAGE}Watch/Watch", encode, decode)
        try:
            yield from made(iter(requests.get, None), metadata=self._metadata())
        except grpc.RpcError as error:
            raise self._failed(error) from None
        finally:
            requests.put(None)

    def interrupt(self) -> None:
        """End the call in progress and all later calls. Any thread may call this."""
        self._closed = True
        channel = self._channel
        if channel is not None:
            channel.close()

    def _dialled(self) -> grpc.Channel:
        channel = self._channel
        if channel is None:
            channel = self._channel = connect(self._endpoint, self._access.tls)
        # Only now: `interrupt` closes a channel that it finds, and this one any other.
        if self._closed:
            channel.close()
            raise self._is_closed()
        return channel

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        access = self._access
        if access.user and not self._token:
            try:
                password = access.password_file.read_text().rstrip("\n") if access.password_file else ""
            except (OSError, ValueError):
                raise unavailable(self._name, f"{access.password_file}, its password_file, cannot be read") from None
            encode, decode = etcd.AuthenticateRequest.SerializeToString, etcd.AuthenticateResponse.FromString
            made = self._dialled().unary_unary(f"{PACKAGE}Auth/Authenticate", encode, decode)
            request = etcd.AuthenticateRequest(name=access.user, password=password)
            self._token = made(request, timeout=CALL_TIMEOUT).token
        return (WITH_LEADER, ("token", self._token)) if self._token else (WITH_LEADER,)

    def _failed(self, error: grpc.RpcError) -> DirectoryUnavailable:
        """Return the error to raise, and go on with the next endpoint."""
        endpoint, call = self._endpoint, cast("grpc.Call", error)
        self._endpoint, self._token = next(self._endpoints), ""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        unreachable = call.code() is grpc.StatusCode.UNAVAILABLE
        answers = "cannot be reached" if unreachable else f"answers {call.code().name}"
        return unavailable(self._name, f"{endpoint} {answers}: {call.details()}")

    def _is_closed(self) -> DirectoryUnavailable:
        return unavailable(self._name, "it is closed")
