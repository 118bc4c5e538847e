"""A node server whose every request arrives twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.support.faults.processes import Node

STREAMS = tuple(f"/kvferry.v1.KVTransfer/{name}" for name in ("Handshake", "Watch"))


class DoublingNode(Node):
    """kvferryd behind a proxy that passes on every request twice, and answers what the second was answered.

    Args:
        folder, listen, settings: as of a `Node`.
    """

    def __init__(self, folder: Path, listen: str, **settings: object) -> None:
        self._proxy = grpc.server(ThreadPoolExecutor(64))
        self.doubled: list[str] = []
        port = self._proxy.add_insecure_port("127.0.0.1:0")
        super().__init__(folder, listen, (), advertise=f"127.0.0.1:{port}", **settings)
        self._channel = grpc.insecure_channel(self.address)
        self._proxy.add_generic_rpc_handlers((_Doubling(self._channel, self.doubled),))
        self.address = f"127.0.0.1:{port}"

    def start(self, prefix: Sequence[str] = ()) -> Node:
        """Start it."""
        super().start(prefix)
        self._proxy.start()
        return self

    def kill(self) -> None:
        """End both."""
        super().kill()
        self._proxy.stop(0)
        self._channel.close()


class _Doubling(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.Channel, doubled: list[str]) -> None:
        # Without (de)serialisers a channel takes and gives bytes, which its types do not say.
        self._channel: Any = channel
        self._doubled = doubled

    def service(self, details: Any) -> Any:
        if details.method in STREAMS:
            return grpc.unary_stream_rpc_method_handler(self._stream(details.method))
        return grpc.unary_unary_rpc_method_handler(self._unary(details.method))

    def _unary(self, method: str) -> Callable[[Any, Any], Any]:
        def call(request: Any, context: Any) -> Any:
            self._doubled.append(method)
            answers = []
            for _ in range(2):
                try:
                    answers.append(self._channel.unary_unary(method)(request, timeout=_left(context)))
                except grpc.RpcError as error:
                    answers.append(error)
            if isinstance(answers[-1], grpc.RpcError):
                _fail(context, answers[-1])
            return answers[-1]

        return call

    def _stream(self, method: str) -> Callable[[Any, Any], Iterator[Any]]:
        def call(request: Any, context: Any) -> Iterator[Any]:
            self._doubled.append(method)
            opened = threading.Event()
            copy = self._channel.unary_stream(method)(request, timeout=_left(context))
            threading.Thread(target=_drain, args=(copy, opened), daemon=True).start()
            opened.wait(5)
            second = self._channel.unary_stream(method)(request, timeout=_left(context))
            context.add_callback(second.cancel)
            context.add_callback(copy.cancel)
            try:
                yield from second
            except grpc.RpcError as error:
                _fail(context, error)

        return call


def _drain(stream: Any, opened: threading.Event) -> None:
    try:
        for _ in stream:
            opened.set()
    except grpc.RpcError:
        opened.set()


def _left(context: Any) -> float | None:
    """Seconds of a call; None: it has no deadline, which gRPC says by one in a far future."""
    left = context.time_remaining()
    return None if left is None or left > 1e6 else float(left)


def _fail(context: Any, error: Any) -> None:
    context.set_trailing_metadata(error.trailing_metadata() or ())
    context.abort(error.code(), error.details())
