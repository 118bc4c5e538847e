"""The settings of a node server: each is defined once, in `NodeConfig`, with its help text. `loading` reads them from
flags, the environment and a file."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

from kvferry._directory.directory import checked_labels
from kvferry._directory.opening import open_directory
from kvferry._wire.channel import Address, TlsConfig, parse_address
from kvferry.errors import InvalidField
from kvferry_server.domain.times import Times
from kvferry_server.node.limits import MIN_HOME_MEMORY
from kvferry_server.node.memory import home_memory, memory_limit

ENV_PREFIX = "KVFERRYD_"
"""Not the prefix of clients: a certificate that is meant for a client must not be shown as a server's."""

SHORTER = (("ttl", "final"), ("max_ttl", "final"), ("hold", "final"), ("engine_ttl", "retire"))
"""Pairs of durations: the first has no effect beyond the second."""

GROUPS = {"listen": "addresses", "tls_cert": "security", "directory": "directory", "ttl": "times", "drain": "operation"}
"""Headings of the flags, by the first setting below each."""

_TIMES = Times()
File: TypeAlias = Annotated[Path | None, BeforeValidator(lambda value: None if value == "" else value)]
LOWER = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)


class NodeConfig(BaseModel):
    """All settings of a node server: the text below each is its help, where a text in its type stands for its value.
    Durations are in seconds. Wrong settings are a `pydantic.ValidationError`, for which `load` and `configure` raise
    `BadConfig`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    listen: Annotated[str, "HOST:PORT"] = "127.0.0.1:7423"
    """TCP address for engines and node servers of other hosts. Port 0: a free port. Empty: no TCP."""
    unix: Annotated[str, "PATH"] = "/run/kvferry/node.sock"
    """UNIX socket for engines of this host. Users who may enter its directory may connect. Empty: none."""
    advertise: Annotated[str, "HOST[:PORT]"] = ""
    """The address at which other nodes reach this server; it goes into references. Without a port: the port of
    `listen`. Empty: the TCP address, else the UNIX socket."""
    admin: Annotated[str, "HOST:PORT"] = "127.0.0.1:7424"
    """TCP address for metrics, health and a page for people, over HTTP without TLS. Port 0: a free port. Empty:
    none. If the default is in use, there is none either."""
    tls_cert: File = None
    """PEM file with this server's certificate chain. Turns on TLS for TCP."""
    tls_key: File = None
    """PEM file with the certificate's private key."""
    tls_ca: File = None
    """PEM file with certificate authorities: clients must show a certificate of one of them (mTLS)."""
    policy: File = None
    """TOML file with the roles of identities in client certificates. Identities that it does not name may do nothing.
    Needs tls_ca. Empty: every certificate may do all but administer."""
    insecure: bool = False
    """Allow listening beyond loopback without TLS. Only for networks that nobody else can reach."""
    anonymous_tls: bool = False
    """Allow listening beyond loopback with TLS but without client certificates (no tls_ca)."""
    admin_insecure: bool = False
    """Allow `admin` beyond loopback. Whoever can connect there sees the names of engines, requests and hosts, and
    can change nothing."""
    relay_homes: Annotated[str, "PATTERNS"] = ""
    """Homes that this server may relay to, as shell patterns of host:port, separated by commas. Empty: any home
    with tls_ca or `insecure`, otherwise only homes on this host."""
    directory: Annotated[str, "URL"] = ""
    """etcd in which to list this server and its engines, so that readers find them:
    etcd://HOST:PORT[,HOST:PORT]/PREFIX, etcds:// for TLS (docs/deployment.md). Empty: none."""
    directory_ttl: float = Field(15.0, ge=2, le=3600)
    """How long the directory keeps what this server does not renew. It renews after a third of that."""
    directory_labels: Annotated[str, "NAME=VALUE,..."] = ""
    """Labels of this server's engines in the directory: role=prefill,rack=a7."""
    ttl: float = _TIMES.ttl
    """How long a lease lasts from its acceptance or renewal. Readers renew it after a third of that."""
    max_ttl: float = _TIMES.max_ttl
    """The longest that a lease may last without a renewal."""
    engine_ttl: float = _TIMES.engine_ttl
    """From the loss of an engine's Watch until the engine counts as dead."""
    hold: float = _TIMES.hold
    """How long a publication without a reader is held."""
    final: float = _TIMES.final
    """From publication until its blocks are released in any case. No lease extends past it."""
    max_wait: float = _TIMES.max_wait
    """The longest that a reader may wait for a publication that has not arrived."""
    retire: float = _TIMES.retire
    """How long messages of a replaced incarnation of an engine are recognised and refused."""
    drain: float = Field(5.0, ge=0, le=3600)
    """How long a stopping server waits for live leases and for calls in progress."""
    max_calls: int = Field(1024, ge=1, le=1_000_000)
    """Calls that may run at once over TCP, and as many over the UNIX socket. Further ones are refused with a retry
    delay. Over TCP a host gets a further call only while it has fewer than are free."""
    max_streams: int = Field(8192, ge=1, le=1_000_000)
    """Streams (Watch), and calls that wait as streams do (ReadBlocks), that may be open at once, limited in the
    same way as max_calls."""
    max_connections: int = Field(4096, ge=8, le=1_000_000)
    """TCP connections, and as many over the UNIX socket. Fewer if the process may not open so many files. When
    three quarters of the TCP connections are in use, the host with the most loses its newest."""
    memory: ByteSize = ByteSize(0)
    """Memory for what the home keeps of engines and their requests: 512MiB, or bytes. Engines and hosts share it.
    The process takes up to 384 MiB more. 0: half of what its cgroup or host has, at most 1 GiB."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LOWER, "LEVEL"] = "info"
    """Level from which messages are logged, to stderr."""
    log_format: Annotated[Literal["text", "json"], LOWER, "FORMAT"] = "text"
    """How messages are logged: lines of text with key=value, or an object of JSON each."""
    trace_endpoint: Annotated[str, "URL"] = ""
    """URL of an OpenTelemetry collector (OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces) that gets a span for
    each call that belongs to a trace. Empty: no traces."""

    @model_validator(mode="after")
    def _fits_together(self) -> NodeConfig:
        # Each property raises an InvalidField that names its setting.
        if 0 < self.memory < MIN_HOME_MEMORY:
            raise InvalidField("memory", int(self.memory), f"at least {MIN_HOME_MEMORY >> 20}MiB, or 0")
        _ = (self.times, self.tls, self.listen_address, self.unix_path, self.admin_address, self.labels)
        for name, limit in SHORTER:
            given, most = getattr(self, name), getattr(self, limit)
            # A default that is longer than a given limit just never takes effect.
            if name in self.model_fields_set and given > most:
                raise InvalidField(name, given, f"at most {limit}, {most:g} s, which ends it in any case")
        if self.directory and not open_directory(self.directory).publishes:
            raise InvalidField("directory", self.directory, "etcd:// or etcds://: files are written by others")
        if self.tls is not None and self.tls.cert is None:
            raise InvalidField("tls_ca", str(self.tls_ca), "tls_cert and tls_key beside it")
        if self.policy is not None and self.tls_ca is None:
            expected = "a file, because policy is given: only client certificates have identities"
            raise InvalidField("tls_ca", None, expected)
        if self.trace_endpoint and not _is_endpoint(self.trace_endpoint):
            expected = "http://host[:port]/path, without a password and a query: OTEL_EXPORTER_OTLP_HEADERS takes keys"
            raise InvalidField("trace_endpoint", shown(self.trace_endpoint), expected)
        if not self.listen and not self.unix:
            raise InvalidField("listen", "", "a TCP address, unless unix has a path: both are empty")
        self._check_exposure()
        unix = None if self.unix_path is None else Address(path=str(self.unix_path))
        advertised(self.advertise, self.listen_address, unix)
        return self

    def _check_exposure(self) -> None:
        """Raise `InvalidField` if every host can connect, and no setting allows that."""
        address, admin = self.listen_address, self.admin_address
        if admin is not None and not self.admin_insecure and not is_on_loopback(admin):
            expected = (
                "an address on loopback: whoever can connect sees the names of engines, requests and hosts. If that is "
                "meant, allow it with --admin-insecure"
            )
            raise InvalidField("admin", str(admin), expected)
        if address is None or self.insecure or self.tls_ca is not None or is_on_loopback(address):
            return
        if self.tls is None:
            expected = (
                "an address on loopback, or TLS (--tls-cert, --tls-key, --tls-ca): otherwise everyone who can connect "
                "could read and end every request. If only engines can reach this network, allow that with --insecure"
            )
            raise InvalidField("listen", str(address), expected)
        if not self.anonymous_tls:
            expected = (
                f"a file (--tls-ca): without it, {address} is encrypted but serves everyone who can connect. If only "
                "engines can reach it, allow that with --anonymous-tls"
            )
            raise InvalidField("tls_ca", None, expected)

    @property
    def times(self) -> Times:
        return Times(**{field.name: getattr(self, field.name) for field in fields(Times)})

    @property
    def home_memory(self) -> int:
        return int(self.memory) or home_memory(memory_limit())

    @property
    def relay_patterns(self) -> tuple[str, ...]:
        return tuple(pattern.strip() for pattern in self.relay_homes.split(",") if pattern.strip())

    @property
    def labels(self) -> dict[str, str]:
        """Raises `InvalidField`."""
        pairs = [pair.partition("=") for pair in self.directory_labels.split(",") if pair.strip()]
        if not all(name.strip() and equals for name, equals, _ in pairs):
            raise InvalidField("directory_labels", self.directory_labels, "NAME=VALUE, separated by commas")
        try:
            return checked_labels({name.strip(): value.strip() for name, _, value in pairs})
        except InvalidField as error:
            raise InvalidField("directory_labels", self.directory_labels, error.values["expected"]) from None

    @property
    def tls(self) -> TlsConfig | None:
        """None: no TLS. Raises `InvalidField` if a file is missing."""
        if self.tls_cert is None and self.tls_key is None and self.tls_ca is None:
            return None
        return TlsConfig(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)

    @property
    def listen_address(self) -> Address | None:
        """None: no TCP. Raises `InvalidField`."""
        return _tcp_address("listen", self.listen, "host:port; set a UNIX socket with unix")

    @property
    def admin_address(self) -> Address | None:
        """None: no admin listener. Raises `InvalidField`."""
        return _tcp_address("admin", self.admin, "host:port")

    @property
    def unix_path(self) -> Path | None:
        """None: no UNIX socket. Raises `InvalidField`."""
        if not self.unix:
            return None
        path = Path(self.unix.removeprefix("unix:")).absolute()
        return Path(parse_address(f"unix:{path}", "unix").path)


def advertised(wanted: str, listening: Address | None, unix: Address | None) -> str:
    """Return the address to put into references: `wanted`, with the real port if it is ``host`` alone; else the TCP
    address `listening`, else the socket `unix`. Raises `InvalidField` if other hosts could not connect to it."""
    if wanted:
        # A host without a port, perhaps an IPv6 address in brackets, gets the port of the listener.
        has_port = ":" in wanted and not wanted.endswith("]")
        address = parse_address(wanted if has_port else f"{wanted}:0", "advertise")
        port = address.port or (listening.port if listening is not None else 0)
        if not address.is_unix and port == 0 and listening is None:
            raise InvalidField("advertise", wanted, "host:port, because this server listens on no TCP port")
        return str(Address(address.path, address.host, port))
    if listening is not None:
        wildcard = False
        with contextlib.suppress(ValueError):
            wildcard = ipaddress.ip_address(listening.host).is_unspecified
        if wildcard:
            expected = f"the host at which other nodes reach this one: they cannot connect to {listening}"
            raise InvalidField("advertise", "", expected)
        return str(listening)
    # `NodeConfig` refuses settings with neither.
    return str(unix)


def is_on_loopback(address: Address) -> bool:
    """Whether all addresses of the host are loopback; False for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _tcp_address(name: str, value: str, expected: str) -> Address | None:
    if not value:
        return None
    address = parse_address(value, name)
    if address.is_unix:
        raise InvalidField(name, value, expected)
    return address


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    # OpenTelemetry logs the query, in which collectors take their keys, with each attempt that fails.
    plain = "@" not in parts.netloc and "?" not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain


def shown(value: object) -> object:
    """Return a value as messages show it: without a URL's password and query, or a key in place of its file's name."""
    if "-----BEGIN" in str(value):
        return "-----BEGIN..."
    if not isinstance(value, str) or "//" not in value:
        return value
    return re.sub(r"\?.*", "?...", re.sub("//.*@", "//...@", value), flags=re.DOTALL)
