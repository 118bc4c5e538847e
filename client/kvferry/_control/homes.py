"""The node servers that a client connects to: its own, and allowed homes in references.

References come from routers and HTTP clients. If a client connected to any home in a reference, anybody could direct
the client at any host that it can reach. So a home must be in the allow-list or in the client's directory, or TLS must
be configured: then the home must have a certificate of the configured authority. The number of allowed addresses, such
as those of loopback, is unlimited, so only the connections used last are kept.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from kvferry._control.connection import Control
from kvferry._directory.directory import Directory
from kvferry._loop import Loop
from kvferry._wire.channel import Dial, TlsConfig, connect, is_loopback
from kvferry._wire.reference import engine_ids
from kvferry._wire.token import EngineToken
from kvferry.errors import Closed, EngineNotListed, HomeNotAllowed
from kvferry.stats import CallStats, total
from kvferry.v1 import kv_transfer_pb2 as pb

FIRST_ANSWER_TIMEOUT = 2.0
"""Seconds that a client waits for the first answer of its directory, which not all references and homes need."""

MOST = 1024
"""Connections that are kept. Reads keep a dropped connection while they use it; gRPC closes channels that nobody
has."""


class Homes:
    """Connections to node servers, by address. Thread-safe, but for `close`, which belongs to the loop.

    Args:
        tls: credentials for all TCP connections; with them every home is allowed.
        allowed: shell patterns of ``host:port`` that are allowed without TLS, beside loopback addresses.
        directory: names the homes of engines whose references name none, and lists homes that are allowed.
    """

    def __init__(
        self,
        own: str,
        loop: Loop,
        tls: TlsConfig | None,
        allowed: Sequence[str],
        dial: Dial = connect,
        directory: Directory | None = None,
    ) -> None:
        self.own = Control(own, tls, loop, dial)
        self._loop = loop
        self._tls = tls
        self._dial = dial
        self._allowed = (own, *allowed)
        self._directory = directory
        self._discovered = directory is None
        self._lock = threading.Lock()
        self._controls: dict[str, Control] = {own: self.own}
        """In the order of their last use."""
        self._dropped: weakref.WeakSet[Control] = weakref.WeakSet()
        self._past = CallStats()
        """Calls of the dropped connections."""
        self._closed = False

    def known_as(self, advertise: str) -> None:
        """Record the address by which others know the client's own node server."""
        with self._lock:
            self._controls.setdefault(advertise, self.own)

    def discover(self) -> None:
        """Begin to follow the directory, and wait for its first answer. Only the first call does this; without an
        answer it returns as well."""
        if not self._discovered and self._directory is not None:
            self._discovered = True
            self._directory.wait(FIRST_ANSWER_TIMEOUT)

    def address_of(self, reference: pb.Reference | pb.EngineReference) -> str:
        """Return the address of a reference's home: that in the reference, or else that of the engine in the directory.
        Does not wait. Raises `EngineNotListed` without either, and `DirectoryUnavailable` if the directory is needed,
        and has not answered yet."""
        if reference.home:
            return reference.home
        engine_id = reference.engine_id
        if self._directory is None:
            message = f"the reference to engine {engine_id!r} names no home, and this client has no directory"
            raise EngineNotListed(message, engine_id=engine_id, directory="")
        if isinstance(reference, pb.Reference) and reference.router_key:
            listed, names = self._directory.listed(), engine_ids(engine_id, reference.data_parallel_rank)
            engine_id = next((name for name in names if listed.find(name) is not None), names[0])
        return self._directory.resolve(engine_id, reference.incarnation).home

    def of(self, reference: pb.Reference | pb.EngineReference) -> Control:
        """Return the connection to the home of a reference. Raises as `address_of` and `get`."""
        return self.get(self.address_of(reference))

    def get(self, address: str) -> Control:
        """Return the connection to the node server at this address. Does not wait. Raises `HomeNotAllowed`, and
        `DirectoryUnavailable` if only the directory could allow the address, and has not answered yet."""
        with self._lock:
            control = self._controls.get(address)
            if self._closed:
                raise Closed("the client is closed")
            if control is None:
                allowed = self._tls is not None or is_loopback(address)
                if not allowed and not any(fnmatchcase(address, pattern) for pattern in self._allowed):
                    self._check_listed(address)
                control = Control(address, self._tls, self._loop, self._dial)
            self._controls.pop(address, None)
            self._controls[address] = control
            if len(self._controls) > MOST:
                self._drop_oldest()
            return control

    def home_of(self, token: EngineToken) -> Control:
        """Return the connection to the home of this client's own engine. Its address comes from the engine's scheduler,
        and need not be in the allow-list."""
        with self._lock:
            return self._controls.setdefault(token.home, Control(token.home, self._tls, self._loop, self._dial))

    def _drop_oldest(self) -> None:
        """Drop the connection whose last use is the earliest. Called with the lock held."""
        address = next(address for address, control in self._controls.items() if control is not self.own)
        dropped = self._controls.pop(address)
        self._dropped.add(dropped)
        # Its later calls, for reads that still use it, are not counted.
        past = _sum([self._past, dropped.stats()])
        self._past = replace(past, homes=0, unreachable=0, unreachable_seconds=0.0)

    def _check_listed(self, address: str) -> None:
        if self._directory is not None and self._directory.listed().covers(address):
            return
        where = "in this client's allowed_homes" if self._directory is None else "in this client's directory"
        message = f"home {address!r} is neither {where} nor covered by TLS; add it to allowed_homes if you know it"
        raise HomeNotAllowed(message, home=address)

    def stats(self) -> CallStats:
        with self._lock:
            controls, past = set(self._controls.values()), self._past
        each = [control.stats() for control in controls]
        return replace(_sum([past, *each]), homes=sum(one.calls > 0 for one in each))

    def close(self) -> None:
        """Close all connections, and make no new ones."""
        with self._lock:
            self._closed = True
        for control in self._all():
            control.close()

    def join(self, timeout: float) -> None:
        """Wait for the threads that read streams, after `close`."""
        until = time.monotonic() + timeout
        for thread in (each for control in self._all() for each in control.calls()):
            if isinstance(thread, threading.Thread):
                thread.join(max(0.0, until - time.monotonic()))

    def _all(self) -> set[Control]:
        with self._lock:
            return {*self._controls.values(), *self._dropped}


def _sum(each: Iterable[CallStats]) -> CallStats:
    each = tuple(each)
    longest = max((one.unreachable_seconds for one in each), default=0.0)
    return replace(total(CallStats, each), unreachable_seconds=longest)
