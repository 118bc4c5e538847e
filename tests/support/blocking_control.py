"""A client's connection to a node server on an event loop of its own, for the thread of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvferry._clock import now
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._loop import Loop
from kvferry._wire.channel import TlsConfig
from kvferry._wire.geometry_codec import Handshaken
from kvferry.v1 import kv_transfer_pb2 as pb

Result = TypeVar("Result")


def on_loop(loop: Loop, call: Callable[[], Result]) -> Result:
    """Call something on a loop, and return its result."""

    async def run() -> Result:
        return call()

    return loop.run(run())


def turns(loop: Loop) -> None:
    """Let a loop do all that it has to do now."""

    async def run() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    loop.run(run())


@contextmanager
def looping(clock: Callable[[], float] = now) -> Iterator[Loop]:
    """A loop, until the end of the block."""
    loop = Loop("kvferry-test-loop", clock)
    try:
        yield loop
    finally:
        loop.close(30)


class BlockingControl:
    """`Control`, whose calls wait for their answers.

    Attributes:
        loop, control: the loop, and the connection that belongs to it.
    """

    def __init__(self, address: str, tls: TlsConfig | None = None, control: Control | None = None) -> None:
        self.loop = Loop("kvferry-test-loop") if control is None else control._loop
        self.control = control or Control(address, tls, self.loop)
        self._owned = control is None

    def register_cache(self, request: pb.RegisterCacheRequest, timeout: float) -> pb.RegisterCacheResponse:
        return self.loop.run(self.control.register_cache(request, timeout))

    def handshake(self, request: pb.HandshakeRequest, timeout: float) -> Handshaken:
        return self.loop.run(self.control.handshake(request, timeout))

    def notify(self, request: pb.NotifyRequest, timeout: float = 30.0) -> list[NotificationAnswer]:
        return self.loop.run(self.control.notify(request, timeout))

    def notify_one(self, request: pb.NotifyRequest, timeout: float = 30.0) -> pb.NotificationResult:
        return self.loop.run(self.control.notify_one(request, timeout))

    def read_blocks(self, request: pb.ReadBlocksRequest, timeout: float = 30.0) -> pb.ReadBlocksResponse:
        async def ask() -> pb.ReadBlocksResponse:
            return await self.control.read_blocks(request, timeout)

        return self.loop.run(ask())

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.WatchResponse]:
        """Open a Watch with the first event that is taken."""
        messages = self.control.watch(request)

        async def take() -> pb.WatchResponse | None:
            async for message in messages:
                return message
            return None

        while (message := self.loop.run(take())) is not None:
            yield message

    def close(self) -> None:
        """End the connection, and its loop, unless both are a client's."""
        if self._owned:
            on_loop(self.loop, self.control.close)
            self.loop.close(30)
