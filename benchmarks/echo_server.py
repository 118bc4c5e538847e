"""A bare gRPC server of the node server's kind (grpc.aio on uvloop, a UNIX socket, its own process) that does nothing:
what any call of a given kind and size costs at least. `python -m benchmarks.echo_server SOCKET` runs it."""

from __future__ import annotations

import asyncio
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from benchmarks.node_server import ServerProcess, server_process

SERVICE = "benchmarks.Echo"
SIZE = struct.Struct("<I")
TIMEOUT = 10.0
SMALL = 64
"""Bytes of a message of the echo that everything is compared with."""


async def _unary(request: bytes, _context: Any) -> bytes:
    """Answer as many bytes as the request's first number says."""
    return bytes(SIZE.unpack_from(request)[0])


async def _stream(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    """Answer messages of the sizes in the request's numbers, of which the first says how many; then stay open until the
    caller cancels."""
    (count,) = SIZE.unpack_from(request)
    for size in struct.unpack_from(f"<{count}I", request, SIZE.size):
        yield bytes(size)
    await asyncio.Event().wait()


async def serve(socket: str) -> None:
    """Serve until the process is ended."""
    # The options of neither side are set: this is gRPC as it comes.
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
        "Stream": grpc.unary_stream_rpc_method_handler(_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    print("ready", file=sys.stderr, flush=True)
    await server.wait_for_termination()


class Echo:
    """Calls of the bare server, synchronous, as engines make them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._unary: Callable[..., Any] = channel.unary_unary(f"/{SERVICE}/Unary")
        self._stream: Callable[..., Any] = channel.unary_stream(f"/{SERVICE}/Stream")

    def unary(self, request: int = SMALL, answer: int = SMALL) -> Callable[[], None]:
        """A call with a request and an answer of so many bytes.

        Raises, when called:
            AssertionError: the answer has another size.
        """
        message = SIZE.pack(answer).ljust(request, b"\0")

        def call() -> None:
            if len(self._unary(message, timeout=TIMEOUT)) != answer:
                raise AssertionError("the echo server answered something else")

        return call

    def stream(self, request: int, answers: Sequence[int]) -> Callable[[], None]:
        """A call that takes messages of these sizes from a stream, and cancels it after the last."""
        message = struct.pack(f"<{1 + len(answers)}I", len(answers), *answers).ljust(request, b"\0")

        def call() -> None:
            stream = self._stream(message, timeout=TIMEOUT)
            if [len(next(stream)) for _ in answers] != list(answers):
                raise AssertionError("the echo server answered something else")
            stream.cancel()

        return call


@contextmanager
def echo_server() -> Iterator[tuple[Echo, ServerProcess]]:
    """The bare server, and a channel to it, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        socket = f"{folder}/echo.sock"
        with (
            server_process(["-m", "benchmarks.echo_server", socket], socket) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            yield Echo(channel), server


def main() -> None:
    """Serve on the socket that the command line names."""
    import uvloop

    uvloop.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
