"""Addresses, credentials and channels: the one place where gRPC option strings stand, for servers and for
clients.

An address is ``unix:/absolute/path`` or ``host:port`` (``[::1]:port``). A UNIX socket never uses TLS: the
mode of its directory says who may connect.

`connect` makes the synchronous channel that engine processes use, `connect_async` the one for event loops. A
process that has used `grpc.aio` must not fork afterwards: a child that uses it hangs or crashes. After
synchronous use it may.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from kvferry.errors import InvalidField

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""The largest message either side takes. Longer lists are paged; a limit is what keeps a peer from filling
our memory."""

MAX_SOCKET_PATH = 107
"""Bytes of a UNIX socket's path (``sun_path`` of Linux, less its end)."""

MAX_CONCURRENT_STREAMS = 16_384
"""Calls and streams of one connection at once: above what the guard of a server lets one peer have."""

MAX_PENDING = 4096
"""Calls of one method that gRPC holds for a server that is behind; it answers CANCELLED to more. Larger than the bursts
of a fleet, and no larger: a flood of calls that are reset at once fills it, whoever sends it, and a renewal waits
behind (4 s; with 16,384 it is 20 s, and leases are lost)."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished (power, network) closes nothing. Pings find it in 15 s, while calls or streams are
    # open; a channel without any stays silent, because idle costs nothing.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A Watch may be silent for hours: by default gRPC would stop pinging after two pings without data between
    # them.
    ("grpc.http2.max_pings_without_data", 0),
    # Node servers restart in a second or two, and engines wait for them: gRPC's own 1 s, growing to 2
    # minutes, is far too long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name, how long one attempt to connect may take. Default 20 s: a host that swallows packets
    # would look like a slow answer instead of an unreachable server.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Node servers are inside one network; an engine's http_proxy is meant for something else, and would see
    # the traffic.
    ("grpc.enable_http_proxy", 0),
    # No retry policy by service config, although it works: it knows neither RetryInfo nor our reasons, so it
    # would repeat what the server said to come back for later. `kvferry._control.connection.retrying` does it. Its
    # `timeout` fires early, so timeouts are per call.
)
"""Options of every channel."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without this a second server on the same port takes every other connection, silently.
    ("grpc.so_reuseport", 0),
    # A Watch is the liveness of its process, so a host that vanished must be noticed: after 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # How often clients may ping without being cut off ("too many pings"): below the 10 s of our own clients,
    # and lenient to the libraries of others. The spelling `min_recv_ping_interval_without_data_ms` is ignored
    # by gRPC.
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    # Calls that gRPC has taken and we have not yet. Beyond the first it drops calls at random, anybody's, as CANCELLED;
    # beyond the second all of them (1,000 and 3,000 by default). Our own limits refuse by peer, and say what to do.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    # Streams of one connection. A client keeps what is more to itself until others end.
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    # From the connection to the first HTTP/2 settings, TLS included: 120 s by default, for which a silent peer keeps a
    # file descriptor.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # A connection without a call ends; its client connects again when it has something to say. An engine's Watch keeps
    # its own.
    ("grpc.max_connection_idle_ms", 120_000),
)
"""Options of every server."""

ONE_QUEUE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.server.max_pending_requests", 1024),
    ("grpc.server.max_pending_requests_hard_limit", 1024),
)
"""In place of those above where grpcio (up to 1.82) takes the calls of all methods one after another: with more a flood
holds up every method, for 20 s and longer instead of 4 s."""

MAX_CONNECTIONS = "grpc.max_allowed_incoming_connections"
"""The option of a listener for how many connections it keeps; it closes what comes beyond."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files of PEM for TLS, read when a channel or server is made.

    A client needs `ca` to know the server by (without: the system's authorities), and `cert` with `key` where
    the server asks for one. A server needs `cert` and `key`; with `ca` it accepts only clients with a
    certificate of that authority (mTLS).
    """

    ca: Path | None = None
    """Certificates of the authorities that the other side must be signed by."""
    cert: Path | None = None
    """Our certificate chain."""
    key: Path | None = None
    """The private key of `cert`."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            missing, given = ("tls_key", "tls_cert") if self.key is None else ("tls_cert", "tls_key")
            raise InvalidField(missing, None, f"a file, because {given} is given")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: a UNIX socket's path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """Whether it is a UNIX socket."""
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, field: str = "address") -> Address:
    """Take an address apart.

    Args:
        text: ``unix:/path`` or ``host:port``.
        field: what to call it in the error.

    Raises:
        InvalidField: it is neither.
    """
    expected = "unix:/absolute/path or host:port"
    if text.startswith("unix:"):
        # unix:///path is the URI form of the same.
        path = text.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise InvalidField(field, text, expected)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise InvalidField(
                field, text, f"a path of at most {MAX_SOCKET_PATH} bytes, which is all a UNIX socket can have"
            )
        return Address(path=path)
    if "://" in text:
        raise InvalidField(field, text, f"{expected}, without {text.partition('://')[0]}://")
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    # "dns:host", "http://host" and bare IPv6 addresses all show as a host with a colon or a slash in it.
    if not colon or not host or "/" in host or (":" in host and not bracketed):
        raise InvalidField(field, text, expected)
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise InvalidField(field, text, f"{expected}, with a port from 0 to 65535")
    return Address(host=host, port=int(port))


def is_loopback(address: str) -> bool:
    """Whether nothing that is sent to an address leaves the host. Of names only ``localhost`` is known to be."""
    try:
        parsed = parse_address(address)
    except InvalidField:
        return False
    try:
        return parsed.is_unix or parsed.host == "localhost" or ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        return False


Dial: TypeAlias = Callable[[str, TlsConfig | None], grpc.Channel]
"""Makes a synchronous channel to an address, as `connect` does."""


def connect(address: str, tls: TlsConfig | None = None) -> grpc.Channel:
    """A synchronous channel; it connects with its first call, and again by itself whenever the connection is
    lost.

    Args:
        address: ``unix:/path`` or ``host:port``.
        tls: credentials for TCP; None: no TLS. UNIX sockets ignore it.

    Raises:
        InvalidField: the address, or a file of `tls`.
    """
    parsed = parse_address(address)
    if tls is None or parsed.is_unix:
        return grpc.insecure_channel(str(parsed), options=CHANNEL_OPTIONS)
    return grpc.secure_channel(str(parsed), _client_credentials(tls), options=CHANNEL_OPTIONS)


def connect_async(address: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    """Like `connect`, for the running event loop, to which the channel then belongs."""
    parsed = parse_address(address)
    if tls is None or parsed.is_unix:
        return grpc.aio.insecure_channel(str(parsed), options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(str(parsed), _client_credentials(tls), options=CHANNEL_OPTIONS)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials of a listener; clients must show a certificate if `tls.ca` is given.

    Raises:
        InvalidField: no certificate, or a file that cannot be read.
    """
    if tls.cert is None or tls.key is None:
        raise InvalidField("tls_cert", None, "a certificate for the server")
    pair = (_read("tls_key", tls.key), _read("tls_cert", tls.cert))
    ca = _read("tls_ca", tls.ca) if tls.ca is not None else None
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def _client_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_read("tls_ca", tls.ca) if tls.ca is not None else None,
        private_key=_read("tls_key", tls.key) if tls.key is not None else None,
        certificate_chain=_read("tls_cert", tls.cert) if tls.cert is not None else None,
    )


def _read(field: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidField(field, str(path), f"a readable file ({error.strerror})") from None
    if b"-----BEGIN" not in content:
        raise InvalidField(field, str(path), "a PEM file")
    return content
