"""Calls to etcd: to one of several endpoints at a time, with a user's token. Only this file speaks gRPC to etcd."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from kvferry._directory import etcd_v3_pb2 as etcd
from kvferry._directory.directory import unavailable
from kvferry._wire.channel import TlsConfig, connect
from kvferry._wire.status import is_too_large
from kvferry.errors import DirectoryUnavailable, MessageTooLarge

CALL_TIMEOUT = 5.0
"""Seconds for one call."""

Answer = TypeVar("Answer", bound=Message)

PACKAGE = "/etcdserverpb."
"""Prefix of etcd's methods; the package of the messages has another name here (third_party/etcd)."""

WITH_LEADER = ("hasleader", "true")
"""Makes etcd end a watch on a member that a partition has cut off from the other members."""

TOKEN_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)
"""etcd's answers to a token that it no longer knows, and to a token from before a change of users."""


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    endpoints: tuple[str, ...]
    """``host:port`` of each member."""
    tls: TlsConfig | None = None
    user: str = ""
    """Empty: no authentication."""
    password_file: Path | None = None
    """Read for each authentication, so that the password can be changed."""


class EtcdCalls:
    """Calls of one thread to etcd. After a failure the next call goes to the next endpoint. `name` is the directory's
    URL, for errors. Only `interrupt` may be called from other threads."""

    def __init__(self, name: str, access: EtcdAccess) -> None:
        self._name = name
        self._access = access
        self._at = 0
        self._token = ""
        self._channel: grpc.Channel | None = None
        self._closed = False

    def call(self, method: str, request: Message, answer: type[Answer], timeout: float | None = None) -> Answer:
        """Call a method with one answer, such as ``KV/Put``; also a streaming method, since gRPC sends the same bytes
        for one request and one answer. `timeout` is in seconds; None: `CALL_TIMEOUT`.

        Raises:
            DirectoryUnavailable: there is no answer, or etcd refused.
            MessageTooLarge: the answer does not fit a message.
        """
        had_token = bool(self._token)
        try:
            made = self._dialled().unary_unary(PACKAGE + method, _encode, answer.FromString)
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
        requests: SimpleQueue[etcd.WatchRequest | None] = SimpleQueue()
        requests.put(request)
        made: Any = self._dialled().stream_stream(f"{PACKAGE}Watch/Watch", _encode, etcd.WatchResponse.FromString)
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

    @property
    def _endpoint(self) -> str:
        return self._access.endpoints[self._at % len(self._access.endpoints)]

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        access = self._access
        if access.user and not self._token:
            try:
                password = access.password_file.read_text().rstrip("\n") if access.password_file else ""
            except (OSError, ValueError):
                raise unavailable(self._name, f"{access.password_file}, its password_file, cannot be read") from None
            decode = etcd.AuthenticateResponse.FromString
            made = self._dialled().unary_unary(f"{PACKAGE}Auth/Authenticate", _encode, decode)
            request = etcd.AuthenticateRequest(name=access.user, password=password)
            self._token = made(request, timeout=CALL_TIMEOUT).token
        return (WITH_LEADER, ("token", self._token)) if self._token else (WITH_LEADER,)

    def _failed(self, error: grpc.RpcError) -> Exception:
        """Return the error to raise, and go on with the next endpoint, unless that would answer the same."""
        endpoint = self._endpoint
        call = cast("grpc.Call", error)
        if is_too_large(call.code().name, call.details() or ""):
            return MessageTooLarge(f"{endpoint}: {call.details()}", address=endpoint)
        self._at += 1
        self._token = ""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        unreachable = call.code() is grpc.StatusCode.UNAVAILABLE
        answers = "cannot be reached" if unreachable else f"answers {call.code().name}"
        return unavailable(self._name, f"{endpoint} {answers}: {call.details()}")

    def _is_closed(self) -> DirectoryUnavailable:
        return unavailable(self._name, "it is closed")


def _encode(message: Message) -> bytes:
    return message.SerializeToString()
