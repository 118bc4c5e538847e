"""The node servers that a client connects to: its own, and the homes in references, if it may.

References come from routers and HTTP clients. If a client connected to any home in a reference, anybody could direct it
at any host it can reach. So a home must be in the allow-list, or TLS must be configured: then the home must have a
certificate of the configured authority.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from kvferry._control.connection import Control
from kvferry._wire.channel import Dial, TlsConfig, connect, is_loopback
from kvferry._wire.token import EngineToken
from kvferry.errors import Closed, HomeNotAllowed
from kvferry.stats import CallStats


class Homes:
    """Connections to node servers, by address. Thread-safe.

    Args:
        own: address of the client's own node server.
        tls: credentials for all TCP connections; with them every home is allowed.
        allowed: shell patterns of ``host:port`` that are allowed without TLS, beside loopback addresses.
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
        """Record the address by which others know the client's own node server."""
        with self._lock:
            self._controls.setdefault(advertise, self.own)

    def get(self, address: str) -> Control:
        """Return the connection to the node server at this address.

        Raises:
            HomeNotAllowed: this client may not connect to it.
            Closed: the client is closed.
        """
        with self._lock:
            control = self._controls.get(address)
            if self._closed:
                raise Closed("the client is closed")
            if control is None:
                allowed = self._tls is not None or is_loopback(address)
                if not allowed and not any(fnmatchcase(address, pattern) for pattern in self._allowed):
                    problem = (
                        "is neither in this client's allowed_homes nor covered by TLS; add it there if you know it"
                    )
                    raise HomeNotAllowed(f"home {address!r} {problem}", home=address)
                control = self._controls[address] = Control(address, self._tls, self._dial)
            return control

    def home_of(self, token: EngineToken) -> Control:
        """Return the connection to the home of this client's own engine. The address comes from the engine's scheduler,
        so that it need not be allowed."""
        with self._lock:
            return self._controls.setdefault(token.home, Control(token.home, self._tls, self._dial))

    def stats(self) -> CallStats:
        """Count the calls to all of them."""
        with self._lock:
            controls = set(self._controls.values())
        each = [control.stats() for control in controls]
        failed: Counter[str] = Counter()
        for one in each:
            failed.update(one.failed)
        return CallStats(
            calls=sum(one.calls for one in each),
            failed=dict(failed),
            retried=sum(one.retried for one in each),
            homes=sum(one.calls > 0 for one in each),
            unreachable=sum(one.unreachable for one in each),
            unreachable_seconds=max(one.unreachable_seconds for one in each),
        )

    def close(self) -> None:
        """Close all connections, and make no new ones."""
        with self._lock:
            self._closed = True
            controls = set(self._controls.values())
        for control in controls:
            control.close()
