"""A node server as seen from this host: name, port, TLS, health, version, and the time of a call, but not its clock."""

from __future__ import annotations

import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

from kvferry._doctor.check import Finding, Host, finding

if TYPE_CHECKING:
    from kvferry._wire.channel import Address

ECHOES = 21
_SAID = 300  # Most characters of a text from a peer, which may send anything
HEALTH = "/grpc.health.v1.Health/Check"
STATUSES = {b"": "UNKNOWN", b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}
"""The status of each HealthCheckResponse. Decoded by hand, because only kvferryd's packages have its module."""


def check(host: Host) -> list[Finding]:
    """Reach a node server step by step; the first step that fails is the last finding."""
    import grpc

    from kvferry._wire.channel import TlsConfig, connect, parse_address
    from kvferry._wire.status import tls_failure
    from kvferry.errors import InvalidInput

    try:
        address = parse_address(host.peer)
        tls = TlsConfig(**host.tls) if host.tls else None
        channel = connect(host.peer, tls)
    except InvalidInput as error:
        return [finding("peer-address-wrong", error.message)]
    with channel:
        if unreachable := _unreachable(address, host.timeout):
            return [unreachable]
        findings: list[Finding] = []
        try:
            # If the second step raises, the finding of the first is kept.
            for step in (_echo, _version):
                findings.append(step(channel, host))
                if findings[-1].level != "ok":
                    break
        except grpc.RpcError as error:
            if found := tls_failure(error.details() or "", host.peer, tls):
                return [*findings, finding("peer-tls", found)]
            forbids = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            said = f"{error.code().name}: {' '.join((error.details() or '').split())[:_SAID]}"
            findings.append(finding("peer-forbids" if forbids else "peer-no-answer", said))
        return findings


def _unreachable(address: Address, timeout: float) -> Finding | None:
    """Resolve the name and connect to each of its addresses. None: an address accepts."""
    targets: list[tuple[Any, Any]] = [(socket.AF_UNIX, address.path)]
    if not address.path:
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            too_long = "a part of the name is empty, or longer than 63 characters"
            said = too_long if isinstance(error, UnicodeError) else error.strerror or error
            return finding("peer-name-unknown", f"{address.host}: {said}")
        targets = [(family, place) for family, _, _, _, place in found]
    problems, silent = [], True
    for family, place in targets:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.settimeout(timeout)
            try:
                trial.connect(place)
                return None
            except OSError as error:
                silent = silent and not isinstance(error, (ConnectionRefusedError, FileNotFoundError, PermissionError))
                reason = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else error.strerror
                problems.append(f"{address.path or place[0]}: {reason}")
    return finding("peer-silent" if silent else "peer-refused", "; ".join(problems))


def _echo(channel: Any, host: Host) -> Finding:
    """Ask repeatedly for the peer's health. Raises `grpc.RpcError`."""
    health = channel.unary_unary(HEALTH)
    # The first call also makes the connection. A slow peer gets fewer calls.
    answer: bytes = health(b"", timeout=host.timeout)
    times: list[float] = []
    while (status := STATUSES.get(answer)) == "SERVING" and len(times) < ECHOES and sum(times) <= host.timeout:
        started = time.monotonic()
        answer = health(b"", timeout=host.timeout)
        times.append(time.monotonic() - started)
    if status != "SERVING":
        return finding("peer-not-serving", f"its health service answers {status or answer[:_SAID].hex()}")
    how = "over TLS" if host.tls and not host.peer.startswith("unix:") else "without TLS"
    median, longest = statistics.median(times) * 1000, max(times) * 1000
    said = f"it serves; a call takes {median:.2f} ms {how} (median of {len(times)}, the longest {longest:.2f} ms)"
    return finding("peer-answers", said)


def _version(channel: Any, host: Host) -> Finding:
    """Ask for the peer's version. Raises `grpc.RpcError`."""
    import grpc

    from kvferry._wire.version import OURS, Version, check_together
    from kvferry.errors import ContractDiffers
    from kvferry.v1.introspection_pb2 import GetServerInfoRequest
    from kvferry.v1.introspection_pb2_grpc import IntrospectionStub

    try:
        answer: Any = IntrospectionStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=host.timeout)
        theirs = Version(answer.contract_revision, answer.oldest_revision, answer.version[:_SAID])
        check_together(theirs, f"kvferryd at {host.peer}", OURS, "this kvferry")
    except ContractDiffers as error:
        return finding("peer-version-differs", error.message)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        said = "its version is not known: it does not have GetServerInfo, which every release since 0.2.0 has"
        return finding("peer-version-differs", said)
    return finding(
        "peer-version",
        f"kvferryd {theirs.release} (this is {OURS.release}) works with this kvferry, up for "
        f"{answer.uptime.seconds / 3600:,.1f} h, advertises {answer.advertise[:_SAID]}"
        f"{'; it is draining' if answer.draining else ''}",
    )
