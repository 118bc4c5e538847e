"""Node servers that a client talks to: its own, and the homes that references name, as far as it may dial them.

A reference comes through routers and HTTP clients; a client that dialled whatever it named could be turned against any
host it can reach. So homes must be covered by the allow-list, or by TLS, where only a certificate of the configured
authority is talked to.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from fnmatch import fnmatchcase

from kvferry._control.connection import Control
from kvferry._wire.channel import Dial, TlsConfig, connect, is_loopback
from kvferry._wire.token import EngineToken
from kvferry.errors import Closed, HomeNotAllowed


class Homes:
    """Control connections by address. Thread-safe.

    Args:
        own: address of the client's own node server.
        tls: credentials for every TCP connection; they cover every home.
        allowed: shell patterns of ``host:port`` that may be dialled without TLS, beside loopback.
        dial: makes the channels.
    """

    def __init__(self, own: str, tls: TlsConfig | None, allowed: Sequence[str], dial: Dial = connect) -> None:
        self.own = Control(own, tls, dial)
        self._tls = tls
        self._dial = dial
        self._allowed = (own, *allowed)
        self._lock = threading.Lock()
        self._controls: dict[str, Control] = {own: self.own}
        self._closed = False

    def known_as(self, advertise: str) -> None:
        """The own node server is what others call by this address."""
        with self._lock:
            self._controls.setdefault(advertise, self.own)

    def get(self, address: str) -> Control:
        """The node server of this address; raises `HomeNotAllowed`, `Closed`."""
        with self._lock:
            control = self._controls.get(address)
            if self._closed:
                raise Closed("the client is closed")
            if control is None:
                allowed = self._tls is not None or is_loopback(address)
                if not allowed and not any(fnmatchcase(address, pattern) for pattern in self._allowed):
                    message = f"home {address!r} is neither in this client's allowed_homes nor covered by TLS"
                    raise HomeNotAllowed(message, home=address)
                control = self._controls[address] = Control(address, self._tls, self._dial)
            return control

    def home_of(self, token: EngineToken) -> Control:
        """The home of an engine of ours, which its scheduler names and nobody from outside."""
        with self._lock:
            return self._controls.setdefault(token.home, Control(token.home, self._tls, self._dial))

    def close(self) -> None:
        """Close all connections; none is made any more."""
        with self._lock:
            self._closed = True
            controls = set(self._controls.values())
        for control in controls:
            control.close()
