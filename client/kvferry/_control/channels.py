"""The channel to one node server, which is replaced when the TLS files change. Calls in progress keep theirs."""

from __future__ import annotations

import grpc

from kvferry._wire.channel import Dial, TlsConfig, TlsContent
from kvferry._wire.tls_files import TlsFiles, tls_files
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub


class SharedChannel:
    """A channel, its credentials, and the number of calls that use it."""

    def __init__(self, channel: grpc.Channel, tls: TlsContent | None) -> None:
        self.channel = channel
        self.stub = KVTransferStub(channel)
        self.tls = tls
        self.calls = 0

    def begin(self) -> None:
        self.calls += 1

    def end(self) -> None:
        self.calls -= 1


class CurrentChannel:
    """The newest channel to a node server, and older ones until their calls have ended. Not thread-safe."""

    def __init__(self, address: str, tls: TlsConfig | None, dial: Dial) -> None:
        self._address = address
        self._files: TlsFiles | None = None if tls is None or address.startswith("unix:") else tls_files(tls)
        self._dial = dial
        self._newest: SharedChannel | None = None
        self._older: list[SharedChannel] = []

    def newest(self) -> SharedChannel:
        """Return the channel for the next call.

        Raises:
            InvalidField: the address is malformed, or the TLS files cannot be used and never could.
        """
        tls = None if self._files is None else self._files.content()
        if self._newest is None or self._newest.tls is not tls:
            shared = SharedChannel(self._dial(self._address, tls), tls)
            if self._newest is not None:
                self._older.append(self._newest)
            self._newest = shared
        if self._older:
            self._close_idle()
        return self._newest

    def distrust(self) -> None:
        """Read the TLS files before the next call, since a connection has failed. Thread-safe."""
        if self._files is not None:
            self._files.look_soon()

    def drop(self) -> grpc.Channel | None:
        """Forget the newest channel, and return it, still open."""
        shared, self._newest = self._newest, None
        return shared.channel if shared is not None else None

    def drop_all(self) -> list[grpc.Channel]:
        """Forget all channels, and return them, still open."""
        kept = [*self._older, *([self._newest] if self._newest is not None else [])]
        self._older, self._newest = [], None
        return [shared.channel for shared in kept]

    def _close_idle(self) -> None:
        for shared in self._older:
            if not shared.calls:
                shared.channel.close()
        self._older = [shared for shared in self._older if shared.calls]
