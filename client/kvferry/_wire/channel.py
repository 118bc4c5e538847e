"""Addresses, credentials and channels. All option strings of gRPC are here, for servers and clients.

An address is ``unix:/absolute/path`` or ``host:port`` (``[::1]:port``). A UNIX socket never uses TLS; the permissions
of its directory control who may connect.

`connect` makes the synchronous channel that engine processes use; `connect_async` makes one for event loops. A process
that has used `grpc.aio` must not fork: a child that uses it too hangs or crashes. Synchronous channels have no such
limit.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio

from kvferry.errors import InvalidField

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Bytes of the largest message that either side accepts: a peer cannot fill the other side's memory."""

MAX_NOTIFY_BYTES = 1024 * 1024
"""Bytes of the largest NotifyRequest: less, because a node server acts on notifications on its event loop."""

MAX_SOCKET_PATH = 107
"""Most bytes of a UNIX socket's path: ``sun_path`` of Linux without its final NUL."""

MAX_CONCURRENT_STREAMS = 16_384
"""Most simultaneous calls and streams of one connection: more than the guard of a server allows one peer."""

MAX_PENDING = 4096
"""Most calls of one method that gRPC queues for a busy server; gRPC answers CANCELLED to further calls. The limit is
little above the bursts of a fleet: any peer can fill the queue with calls that it resets at once, and renewals wait
behind them (4 s; with 16,384 calls 20 s, and leases are lost)."""

_BOTH_SIDES: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished (power, network) or is stopped closes no connection. Pings detect the loss within 15 s while
    # calls or streams are open: a Watch shows that its process is alive. Without `ping_timeout_ms`, gRPC waits a minute
    # for a process whose host still acknowledges what it is sent.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A Watch may be silent for hours. By default gRPC stops pinging after two pings without data between them.
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_SIDES,
    # A channel without calls sends no pings, so that idle clients cost nothing.
    ("grpc.keepalive_permit_without_calls", 0),
    # Node servers restart in a second or two, and engines wait for them. The defaults are 1 s, growing to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name, this is the timeout of one attempt to connect, by default 20 s: a host that drops packets would
    # look like a slow answer instead of an unreachable server.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Node servers are inside one network. The proxy in an engine's http_proxy is for others, and would see the traffic.
    ("grpc.enable_http_proxy", 0),
    # There is no service config: its retry policy knows neither RetryInfo nor kvferry's reasons and would repeat calls
    # too early (`kvferry._control.backoff` repeats them), and its `timeout` fires early: timeouts are set per call.
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_SIDES,
    # Otherwise a second server on the same port would silently get every other connection.
    ("grpc.so_reuseport", 0),
    # Otherwise gRPC takes in megabytes of each request that waits to be read, where it now takes 64 KiB.
    ("grpc.http2.bdp_probe", 0),
    # Clients that ping more often are disconnected ("too many pings"). kvferry's clients ping every 10 s; other
    # libraries may ping more often. gRPC ignores the spelling `min_recv_ping_interval_without_data_ms`.
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    # Limits for calls that gRPC has received and the server has not taken yet. Beyond the first limit, gRPC cancels
    # random calls of any peer; beyond the second, all calls (1,000 and 3,000 by default). The server's own limits count
    # by peer, and their errors say what to do.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    # A client holds further streams back until others end.
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    # From the connection to the first HTTP/2 settings, TLS included. With the default of 120 s, a silent peer would
    # occupy a file descriptor that long.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # A connection without calls is closed; its client connects again for its next call. A Watch is a call.
    ("grpc.max_connection_idle_ms", 120_000),
)

MAX_CLIENT_CHAIN_BYTES = 8400
"""Bytes of the certificates, in DER, that a client may show to a gRPC server. At the end of the handshake, gRPC's
server sends two session tickets, each with the client's certificates, through a buffer of 17 KiB; if the tickets do not
fit, the server closes the connection (measured with grpcio 1.85: 8,446 bytes pass, 8,495 do not). No channel option
changes the buffer. A server's certificates may have 100 kB."""

MAX_CONNECTIONS = "grpc.max_allowed_incoming_connections"
"""Option for the most connections of a listener, which closes further connections."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files for TLS. The files are read when a channel or server is made, and again when they have changed.

    A client uses `ca` to verify the server (None: the system's authorities), and `cert` with `key` if the server asks
    for a client certificate. A server needs `cert` and `key`; with `ca` it accepts only clients with a certificate of
    that authority (mTLS). One of `cert` and `key` alone is an `InvalidField`.

    Attributes:
        ca: certificates of the authorities that must have signed the peer's certificate.
        cert, key: this side's certificate chain, and its private key.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        for name, path in (("tls_ca", self.ca), ("tls_cert", self.cert), ("tls_key", self.key)):
            if "\n" in str(path) or "-----BEGIN" in str(path):
                # Perhaps the key itself: the error of opening such a file would show the key as the name.
                raise InvalidField(name, Path, "the name of a file, not what is in it")
        if (self.cert is None) != (self.key is None):
            missing, given = ("tls_key", "tls_cert") if self.key is None else ("tls_cert", "tls_key")
            raise InvalidField(missing, None, f"a file, because {given} is given")


@dataclass(frozen=True, slots=True, repr=False)
class TlsContent:
    """The contents of a `TlsConfig`'s files at one time. Has no repr, because `key` is a private key."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


@dataclass(frozen=True, slots=True)
class Address:
    """A UNIX socket's path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, field: str = "address") -> Address:
    """Parse ``unix:/path`` or ``host:port``. Equal hosts and ports give equal results, whatever their spelling. Raises
    `InvalidField`, with this name of the field, for a text of neither form."""
    expected = "unix:/absolute/path or host:port"
    if "\0" in text:
        # No path and no host has one, and the system's functions raise ValueError for it.
        raise InvalidField(field, text, expected)
    if text.startswith("unix:"):
        # unix:///path is the URI form of the same.
        path = text.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise InvalidField(field, text, expected)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise InvalidField(field, text, f"a path of at most {MAX_SOCKET_PATH} bytes, the limit of UNIX sockets")
        return Address(path=path)
    if "://" in text:
        raise InvalidField(field, text, f"{expected}, without {text.partition('://')[0]}://")
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    # In "dns:host", "http://host" and bare IPv6 addresses, the host contains a colon or a slash.
    if not colon or not host or "/" in host or (":" in host and not bracketed):
        raise InvalidField(field, text, expected)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise InvalidField(field, text, f"{expected}, with a port from 0 to 65535")
    try:
        host = str(ipaddress.ip_address(host))
    except ValueError:
        host = host.lower()
    return Address(host=host, port=int(port))


def same_address(one: Address, other: Address) -> bool:
    """Whether two addresses are the same; ``localhost`` is every loopback address of its port."""
    local = one.port == other.port and "localhost" in (one.host, other.host)
    return one == other or (local and is_loopback(str(one)) and is_loopback(str(other)))


def is_loopback(address: str) -> bool:
    """Return whether an address is on this host: a UNIX socket, ``localhost``, or a loopback IP address."""
    try:
        parsed = parse_address(address)
        return parsed.is_unix or parsed.host == "localhost" or ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        # No address, or another name.
        return False


Channel = TypeVar("Channel")

Dial: TypeAlias = "Callable[[str, TlsContent | None], grpc.Channel]"
"""A function that makes a synchronous channel to an address, as `connect` does."""


def connect(address: str, tls: TlsConfig | TlsContent | None = None) -> grpc.Channel:
    """Make a synchronous channel, which connects with its first call, and again whenever the connection is lost. `tls`
    is ignored for UNIX sockets; None: no TLS. Raises `InvalidField` for a malformed address or unusable files."""
    return _channel(address, tls, grpc.insecure_channel, grpc.secure_channel)


def connect_async(address: str, tls: TlsConfig | TlsContent | None = None) -> grpc.aio.Channel:
    """Make a channel that belongs to the running event loop; see `connect`."""
    return _channel(address, tls, grpc.aio.insecure_channel, grpc.aio.secure_channel)


def _channel(
    address: str, tls: TlsConfig | TlsContent | None, insecure: Callable[..., Channel], secure: Callable[..., Channel]
) -> Channel:
    # Unwrapped: OpenTelemetry's instrumentation of gRPC, which an engine may have turned on for all channels, returns
    # streams without `cancel`, by which a Watch or a Handshake ends. kvferry's calls name their traces themselves.
    insecure, secure = unwrap(insecure), unwrap(secure)
    parsed = parse_address(address)
    if tls is None or parsed.is_unix:
        return insecure(str(parsed), options=CHANNEL_OPTIONS)
    content = read_tls(tls) if isinstance(tls, TlsConfig) else tls
    credentials = grpc.ssl_channel_credentials(content.ca, content.key, content.cert)
    return secure(str(parsed), credentials, options=CHANNEL_OPTIONS)


def server_certificates(content: TlsContent) -> grpc.ServerCertificateConfiguration:
    """Return a listener's certificate, and the authorities of the clients that it accepts, as gRPC takes them. Raises
    `InvalidField`: the certificate is missing."""
    if content.cert is None or content.key is None:
        raise InvalidField("tls_cert", None, "a certificate for the server")
    return grpc.ssl_server_certificate_configuration([(content.key, content.cert)], root_certificates=content.ca)


def read_tls(tls: TlsConfig) -> TlsContent:
    """Read the files of a `TlsConfig`. Raises `InvalidField`, by setting: a file cannot be read or is not PEM, a
    certificate is damaged, the key is not the certificate's, or files change at this moment."""
    content = TlsContent(_read("tls_ca", tls.ca), _read("tls_cert", tls.cert), _read("tls_key", tls.key))
    # This context only checks the files: gRPC does not before the first connection, and its errors then say little.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # gRPC decides about key sizes and digests.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    if content.ca is not None:
        try:
            context.load_verify_locations(cadata=_text(content.ca))
        except ssl.SSLError:
            expected = "certificates of authorities in PEM, all of them whole"
            raise InvalidField("tls_ca", str(tls.ca), expected) from None
    if tls.cert is not None and tls.key is not None and content.cert is not None:
        try:
            # Without this, OpenSSL asks for a password in the terminal.
            context.load_cert_chain(tls.cert, tls.key, password=b"")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise _bad_pair(tls, content.cert, error) from None
        # OpenSSL has read the files again: they must be those that were read above.
        if (content.cert, content.key) != (_read("tls_cert", tls.cert), _read("tls_key", tls.key)):
            raise InvalidField("tls_cert", str(tls.cert), "a file that nobody is writing to")
    return content


def chain_bytes(pem: bytes) -> int:
    """Return the bytes, in DER, of the certificates in a PEM file."""
    bodies = re.findall(rb"-----BEGIN CERTIFICATE-----(.*?)-----END", pem, re.DOTALL)
    return sum(len(b"".join(body.split()).rstrip(b"=")) * 3 // 4 for body in bodies)


def tls_stamp(tls: TlsConfig) -> tuple[object, ...]:
    """Return a value that changes when a file of a `TlsConfig` is written or replaced, also through a link. Cheap."""
    stamp: list[object] = []
    for path in filter(None, (tls.ca, tls.cert, tls.key)):
        try:
            found = path.stat()
            stamp.append((found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev))
        except (OSError, ValueError):
            stamp.append(None)
    return tuple(stamp)


def _bad_pair(tls: TlsConfig, cert: bytes, error: Exception) -> InvalidField:
    if "KEY_VALUES_MISMATCH" in str(error):
        return InvalidField("tls_key", str(tls.key), f"the private key of the certificate in {tls.cert}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_text(cert))
    except ssl.SSLError:
        return InvalidField("tls_cert", str(tls.cert), "a certificate chain in PEM, whole")
    return InvalidField("tls_key", str(tls.key), "a private key in PEM, whole and without a password")


def _text(pem: bytes) -> str:
    # Certificates in PEM are ASCII; a file may hold other text beside them.
    return pem.decode("latin-1").encode("ascii", "replace").decode()


def _read(field: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        # ValueError: no file can have this name.
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidField(field, str(path), f"a readable file ({why})") from None
    if b"-----BEGIN" not in content:
        raise InvalidField(field, str(path), "a PEM file")
    return content
