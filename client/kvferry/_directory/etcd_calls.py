"""Calls to etcd: one of several endpoints at a time, with its user's token. The only file that speaks gRPC to etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message

from kvferry._directory import etcd_v3_pb2 as etcd
from kvferry._directory.directory import unavailable
from kvferry._wire.channel import TlsConfig, connect
from kvferry._wire.status import is_too_large
from kvferry.errors import MessageTooLarge

CALL_TIMEOUT = 5.0
"""Seconds for one call."""

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)
Answer_co = TypeVar("Answer_co", bound=Message, covariant=True)


class AnswerStream(Protocol[Answer_co]):
    """A stream of answers that can be ended from another thread."""

    def __iter__(self) -> Iterator[Answer_co]: ...
    def cancel(self) -> bool: ...


class Method(Generic[Request, Answer]):
    """One method of etcd's API: its path, and how its answers are decoded."""

    def __init__(self, path: str, _: type[Request], answer: type[Answer]) -> None:
        # The messages' package has another name here, but the paths are etcd's (third_party/etcd).
        self.path, self.decode = f"/etcdserverpb.{path}", answer.FromString


RANGE = Method("KV/Range", etcd.RangeRequest, etcd.RangeResponse)
PUT = Method("KV/Put", etcd.PutRequest, etcd.Done)
DELETE = Method("KV/DeleteRange", etcd.DeleteRangeRequest, etcd.Done)
GRANT = Method("Lease/LeaseGrant", etcd.LeaseGrantRequest, etcd.LeaseGrantResponse)
REVOKE = Method("Lease/LeaseRevoke", etcd.LeaseRevokeRequest, etcd.Done)
KEEP_ALIVE = Method("Lease/LeaseKeepAlive", etcd.LeaseKeepAliveRequest, etcd.LeaseKeepAliveResponse)
WATCH = Method("Watch/Watch", etcd.WatchRequest, etcd.WatchResponse)
AUTHENTICATE = Method("Auth/Authenticate", etcd.AuthenticateRequest, etcd.AuthenticateResponse)

WITH_LEADER = ("hasleader", "true")
"""Has etcd end a watch on a member that a partition has cut off from the others."""

TOKEN_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)
"""How etcd answers a token that it does not know any more, and one from before a change of its users."""


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How etcd is reached.

    Attributes:
        endpoints: ``host:port`` of its members.
        tls: credentials; None: no TLS.
        user: name of the user; empty: no authentication.
        password_file: file with the user's password. It is read for each authentication, so that it can be changed.
    """

    endpoints: tuple[str, ...]
    tls: TlsConfig | None = None
    user: str = ""
    password_file: Path | None = None


class EtcdCalls:
    """Calls of one thread to etcd. After a failure the next call goes to the next endpoint.

    Threading: for one thread, except `interrupt`.

    Args:
        name: the directory's URL, for errors.
        access: how etcd is reached.
    """

    def __init__(self, name: str, access: EtcdAccess) -> None:
        self._name = name
        self._access = access
        self._at = 0
        self._token = ""
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._closed = False

    def call(self, method: Method[Request, Answer], request: Request, timeout: float | None = None) -> Answer:
        """Make a unary call, which takes `timeout` seconds at most; None: `CALL_TIMEOUT`.

        Raises:
            DirectoryUnavailable: there is no answer, or etcd refused.
            MessageTooLarge: the answer does not fit a message.
        """
        return self._attempt(lambda: self._unary(method, request, timeout or CALL_TIMEOUT))

    def ask_once(self, method: Method[Request, Answer], request: Request, timeout: float | None = None) -> Answer:
        """Make a call of a method that is a stream, with one request and one answer. Raises as `call`."""

        def ask() -> Answer:
            stream = self._open(method, iter((request,)), timeout or CALL_TIMEOUT)
            try:
                for answer in stream:
                    return answer
            finally:
                stream.cancel()
            raise unavailable(self._name, f"{self._endpoint} did not answer")

        return self._attempt(ask)

    def stream(self, method: Method[Request, Answer], requests: Iterable[Request]) -> Iterator[Answer]:
        """Yield the answers of a stream, until it ends. Raises as `call`.

        `requests` must not end before the stream shall.
        """
        try:
            yield from self._open(method, requests, None)
        except grpc.RpcError as error:
            raise self._failed(error) from None

    def interrupt(self) -> None:
        """End the call in progress, and all later ones. May be called on any thread."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @property
    def _endpoint(self) -> str:
        return self._access.endpoints[self._at % len(self._access.endpoints)]

    def _attempt(self, attempt: Callable[[], Answer]) -> Answer:
        had = bool(self._token)
        try:
            return attempt()
        except grpc.RpcError as error:
            if not had or cast("grpc.Call", error).code() not in TOKEN_REFUSED:
                raise self._failed(error) from None
        except ValueError:
            # What gRPC raises for a channel that `interrupt` has closed.
            raise unavailable(self._name, "it is closed") from None
        self._token = ""
        try:
            return attempt()
        except grpc.RpcError as error:
            raise self._failed(error) from None

    def _unary(self, method: Method[Request, Answer], request: Request, timeout: float) -> Answer:
        made = self._dialled().unary_unary(method.path, _encode, method.decode)
        return made(request, timeout=timeout, metadata=self._metadata())

    def _open(
        self, method: Method[Request, Answer], requests: Iterable[Request], timeout: float | None
    ) -> AnswerStream[Answer]:
        made: Any = self._dialled().stream_stream(method.path, _encode, method.decode)
        return cast("AnswerStream[Answer]", made(iter(requests), timeout=timeout, metadata=self._metadata()))

    def _dialled(self) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise unavailable(self._name, "it is closed")
            if self._channel is None:
                self._channel = connect(self._endpoint, self._access.tls)
            return self._channel

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        access = self._access
        if access.user and not self._token:
            try:
                password = access.password_file.read_text().rstrip("\n") if access.password_file else ""
            except (OSError, UnicodeDecodeError):
                raise unavailable(self._name, f"{access.password_file}, its password_file, cannot be read") from None
            made = self._dialled().unary_unary(AUTHENTICATE.path, _encode, AUTHENTICATE.decode)
            request = etcd.AuthenticateRequest(name=access.user, password=password)
            self._token = made(request, timeout=CALL_TIMEOUT).token
        return (WITH_LEADER, ("token", self._token)) if self._token else (WITH_LEADER,)

    def _failed(self, error: grpc.RpcError) -> Exception:
        """Go on with the next endpoint, unless it would answer the same; returns the error to raise."""
        endpoint = self._endpoint
        call = cast("grpc.Call", error)
        if is_too_large(call.code().name, call.details() or ""):
            return MessageTooLarge(f"{endpoint}: {call.details()}", address=endpoint)
        self._at += 1
        self._token = ""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if call.code() is grpc.StatusCode.UNAVAILABLE:
            return unavailable(self._name, f"{endpoint} cannot be reached: {call.details()}")
        return unavailable(self._name, f"{endpoint} answers {call.code().name}: {call.details()}")


def _encode(message: Message) -> bytes:
    return message.SerializeToString()
