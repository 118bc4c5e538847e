"""A node server, as it is seen from here: its name, its port, TLS, health, version, and the time of a call.

Its clock is not compared with this host's: nothing in kvferry does that.
"""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

BAD_ADDRESS = Kind(
    "peer-address-wrong", Level.PROBLEM, "Nothing was tried.", "Give unix:/path or host:port, and PEM files."
)
NAME_UNKNOWN = Kind(
    "peer-name-unknown",
    Level.PROBLEM,
    "References that name this host lead nowhere from here.",
    "Correct the name, or the DNS of this host or container (/etc/resolv.conf); --advertise of kvferryd may be an IP "
    "address.",
)
REFUSED = Kind(
    "peer-refused",
    Level.PROBLEM,
    "The host answers, and nothing listens at this port or socket.",
    "Start kvferryd there, or correct the port. A kvferryd that listens on loopback alone is not reached from "
    "elsewhere: --listen 0.0.0.0:7423.",
)
SILENT = Kind(
    "peer-silent",
    Level.PROBLEM,
    "Nothing comes back: usually a firewall or a network policy that drops packets, or a host that is down.",
    "Open the port of kvferryd between the nodes, and the ports of UCX, which are any: reads need both.",
)
TLS = Kind(
    "peer-tls", Level.PROBLEM, "The connection was made, and TLS failed.", "See the settings that the line above names."
)
NO_ANSWER = Kind(
    "peer-no-answer",
    Level.PROBLEM,
    "Something accepts connections there and does not answer as a node server.",
    "Check that it is kvferryd, and look at its log.",
)
NOT_SERVING = Kind(
    "peer-not-serving",
    Level.PROBLEM,
    "It takes no new work: it is draining, or starting.",
    "Wait until it has restarted, or look at its log.",
)
FORBIDDEN = Kind(
    "peer-forbids",
    Level.PROBLEM,
    "This caller's identity may not ask it.",
    "Use a certificate whose role may, or have its policy changed.",
)
DIFFERS = Kind(
    "peer-version-differs",
    Level.PROBLEM,
    "It refuses engines and readers of this release, and they refuse it.",
    "Upgrade the older of the two; docs/operations.md says in which order.",
)
VERSION = Kind("peer-version", Level.OK)
ECHO = Kind(
    "peer-answers",
    Level.OK,
    "A request's control takes two such calls at its reader. The speed of reads from its engines is not measured: that "
    "takes an engine on both sides.",
)
KINDS = (BAD_ADDRESS, NAME_UNKNOWN, REFUSED, SILENT, TLS, NO_ANSWER, NOT_SERVING, FORBIDDEN, DIFFERS, VERSION, ECHO)

ECHOES = 21
_SAID = 300
"""Most characters of what a peer says of itself: it may be anything."""
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
"""HealthCheckResponse with status SERVING. By hand, because its module comes with kvferryd's packages only."""


def check(host: Host) -> list[Finding]:
    """Try to reach a node server step by step; the first step that fails is the finding."""
    from pathlib import Path

    from kvferry._wire.channel import TlsConfig, connect, parse_address
    from kvferry.errors import InvalidInput

    try:
        address = parse_address(host.peer)
        tls = TlsConfig(**{field: Path(path) for field, path in host.tls.items()}) if host.tls else None
        channel = connect(host.peer, tls)
    except InvalidInput as error:
        return [BAD_ADDRESS.found(error.message)]
    with channel:
        unreachable = _unreachable(address.path, address.host, address.port, host.timeout)
        return [unreachable] if unreachable is not None else _ask(channel, host, tls)


def _unreachable(path: str, name: str, port: int, timeout: float) -> Finding | None:
    """Resolve the name and connect to each of its addresses; None if one accepts."""
    if path:
        targets: list[tuple[Any, Any]] = [(socket.AF_UNIX, path)]
    else:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return NAME_UNKNOWN.found(f"{name}: {error.strerror or error}")
        except UnicodeError:
            return NAME_UNKNOWN.found(f"{name}: a part of the name is empty, or longer than 63 characters")
        targets = [(family, place) for family, _, _, _, place in found]
    problems = []
    silent = True
    for family, place in targets:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.settimeout(timeout)
            try:
                trial.connect(place)
            except OSError as error:
                silent = silent and not isinstance(error, (ConnectionRefusedError, FileNotFoundError, PermissionError))
                reason = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else error.strerror
                problems.append(f"{path or place[0]}: {reason}")
            else:
                return None
    return (SILENT if silent else REFUSED).found("; ".join(problems))


def _ask(channel: Any, host: Host, tls: Any) -> list[Finding]:
    import grpc

    from kvferry._wire.tls_failure import tls_failure

    health = channel.unary_unary(_HEALTH)
    times: list[float] = []
    try:
        answer = health(b"", timeout=host.timeout)
        # The first call has the connection to make. Of a slow peer fewer are enough.
        while answer == _SERVING and len(times) < ECHOES and sum(times) <= host.timeout:
            started = time.monotonic()
            answer = health(b"", timeout=host.timeout)
            times.append(time.monotonic() - started)
    except grpc.RpcError as error:
        return [_failed(error, host, tls_failure(error.details() or "", host.peer, tls))]
    if answer != _SERVING:
        return [NOT_SERVING.found(f"its health service answers {_health_name(answer)}")]
    how = "over TLS" if tls is not None and not host.peer.startswith("unix:") else "without TLS"
    median, longest = statistics.median(times) * 1000, max(times) * 1000
    echo = ECHO.found(
        f"it serves; a call takes {median:.2f} ms {how} (median of {len(times)}, the longest {longest:.2f} ms)"
    )
    return [echo, _version(channel, host)]


def _version(channel: Any, host: Host) -> Finding:
    import grpc

    from kvferry._wire.version import OURS, Version, check_together
    from kvferry.errors import ContractDiffers
    from kvferry.v1 import introspection_pb2
    from kvferry.v1.introspection_pb2_grpc import IntrospectionStub

    stub: Any = IntrospectionStub(channel)
    try:
        told = stub.GetServerInfo(introspection_pb2.GetServerInfoRequest(), timeout=host.timeout)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return DIFFERS.found(
                "its version is not known: it does not have GetServerInfo, which every release since 0.2.0 has"
            )
        return _failed(error, host, "")
    theirs = Version(told.contract_revision, told.oldest_revision, told.version[:_SAID])
    try:
        check_together(theirs, f"kvferryd at {host.peer}", OURS, "this kvferry")
    except ContractDiffers as error:
        return DIFFERS.found(error.message)
    uptime = told.uptime.seconds / 3600
    return VERSION.found(
        f"kvferryd {theirs.release} (this is {OURS.release}) works with this kvferry, up for {uptime:,.1f} h, "
        f"advertises {told.advertise[:_SAID]}" + ("; it is draining" if told.draining else "")
    )


def _failed(error: Any, host: Host, tls_text: str) -> Finding:
    import grpc

    if tls_text:
        return TLS.found(tls_text)
    code = error.code()
    said = f"{code.name}: {' '.join((error.details() or '').split())[:_SAID]}"
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return FORBIDDEN.found(said)
    return NO_ANSWER.found(said)


def _health_name(answer: bytes) -> str:
    names = {b"": "UNKNOWN", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}
    return names.get(answer) or answer[:_SAID].hex()
