"""Converts a `KvferryError` to a gRPC status and back. Pure, and used by both sides.

An error is sent as one status code, a message for people, and a `google.rpc.Status` in the trailing metadata. The
status has an `ErrorInfo` (domain ``kvferry``, the reason, every dynamic value), and a `RetryInfo` if repeating the call
makes sense. Results of notifications carry the same in a `NotificationError`.

Trailing metadata is a header. Peers drop a response whose headers exceed 8 KiB, and the caller would not see the error.
So long texts are cut and end in ``…(+N characters)``, and the value ``truncated`` counts the values that were left out.

A server that rejects a caller's TLS settings closes the connection without a reason. The message then names the
settings of three places: ``tls.ca`` is `TlsConfig.ca` of a client and of the vLLM connector, ``--tls-ca`` the flag of
`kvferry` and kvferryd.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvferry._clock import from_duration, to_duration
from kvferry._wire.channel import MAX_CLIENT_CHAIN_BYTES, TlsConfig, chain_bytes
from kvferry.errors import (
    InternalError,
    InvalidInput,
    KvferryError,
    LimitReached,
    MessageTooLarge,
    NotFound,
    NotImplementedHere,
    Refused,
    Unavailable,
    Unreachable,
    from_reason,
)
from kvferry.v1 import errors_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

DOMAIN = "kvferry"
DETAILS_KEY = "grpc-status-details-bin"
"""The key under which gRPC's libraries of all languages expect a `google.rpc.Status`."""

# The message is sent twice, once percent-encoded (three bytes for each byte that is not printable ASCII), and the
# details as base64 if the other side does not accept binary headers: 3 · 512 + 4/3 · (512 + 3584) is below 7 KiB.
MESSAGE_BYTES = 512
VALUE_BYTES = 384
VALUES_BYTES = 3072

NOTIFICATION_ERROR_BYTES = 3840
"""Most bytes of the error of one notification in an answer."""

LONGEST_RETRY = 60.0
"""Most seconds that a peer may ask a caller to wait before it repeats a call."""

NAMED_RANKS = 4
"""Most ranks that a text names for each reason; the others are counted."""

TOO_LARGE = "larger than max"
"""Part of gRPC's text for a message over the size limit of either side, which has no status code of its own."""

_REASONS: dict[int, str] = {number: name for name, number in errors_pb2.ErrorReason.items() if number}

# The classes of errors whose reason this version does not know.
_BY_CODE: dict[str, type[KvferryError]] = {
    "INVALID_ARGUMENT": InvalidInput,
    **dict.fromkeys(("FAILED_PRECONDITION", "PERMISSION_DENIED", "ALREADY_EXISTS", "ABORTED"), Refused),
    "NOT_FOUND": NotFound,
    "UNAVAILABLE": Unavailable,
    "RESOURCE_EXHAUSTED": LimitReached,
    "UNIMPLEMENTED": NotImplementedHere,
    "INTERNAL": InternalError,
}

# Also if a server accepts a connection and closes it before it has sent anything.
_NEVER_CONNECTED = "failed to connect"
# "Wrap failed": the connection was closed while gRPC was writing.
_CLOSED = re.compile(r"Socket closed|Connection reset|Broken pipe|Wrap failed")
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ?([^:]*)")

_NOT_TRUSTED = (
    "TLS settings differ: the caller does not trust the node server's certificate ({}). The caller's tls.ca (--tls-ca) "
    "has to hold the authority that signed --tls-cert of kvferryd there (not given: the system's authorities count). "
    "Where a certificate has expired, put new files in place, which kvferryd reads by itself"
)
_OTHER_NAME = (
    "TLS settings differ: the node server's certificate is for other names than this address. Use an address that it "
    "is for (--advertise of kvferryd there is what references say), or give kvferryd a --tls-cert that has this one as "
    "subjectAltName"
)
_NOT_TLS = (
    "TLS settings differ: it does not speak TLS, and the caller does. Start kvferryd there with --tls-cert and "
    "--tls-key, or leave out the caller's tls (--tls-ca, --tls-cert, --tls-key)"
)
_CHAIN_TOO_LARGE = (
    "it closed the connection. The caller's tls.cert (--tls-cert), {}, has {} bytes of certificates without the PEM "
    f"encoding, and gRPC's servers take at most {MAX_CLIENT_CHAIN_BYTES} from a client. Give the caller a certificate "
    "with fewer names"
)
_REJECTED = (
    "it closed the connection of a caller {}. TLS settings are likely to differ: kvferryd with --tls-cert needs the "
    "caller's tls.ca (--tls-ca), and with --tls-ca of its own the caller's tls.cert and tls.key (--tls-cert, "
    "--tls-key), signed by an authority in --tls-ca of kvferryd and not expired (openssl x509 -noout -issuer -enddate "
    "-in FILE). A node server with as many connections as its --max-connections closes further ones, too"
)
_CLOSED_AGAIN = (
    "it closes connections at once, and has answered before: kvferryd there is likely to be restarting behind a proxy. "
    "If it lasts, look whether kvferryd runs, has as many connections as its --max-connections, or has other TLS "
    "settings since"
)


def to_status(error: KvferryError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Convert an error to the arguments of a server's ``abort``: code, message, trailing metadata. Raises TypeError for
    a client's own error, which has no reason."""
    if not error.reason:
        raise TypeError(f"{type(error).__name__} never crosses the wire")
    code = grpc.StatusCode[error.code]
    message = _cut(error.message, MESSAGE_BYTES)
    status = status_pb2.Status(code=code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_bounded(error.values))
    status.details.add().Pack(info)
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo(retry_delay=to_duration(error.retry_after))
        status.details.add().Pack(retry)
    return code, message, ((DETAILS_KEY, status.SerializeToString()),)


def from_rpc_error(
    error: grpc.RpcError, address: str, tls: TlsConfig | None = None, *, answered: bool = False
) -> KvferryError:
    """Convert the error of a call to a node server.

    An error with kvferry's `ErrorInfo` is rebuilt as the server raised it. Errors of gRPC itself become `Unreachable`,
    `MessageTooLarge`, or the class for their code. `Unreachable` is also DEADLINE_EXCEEDED, because every call of
    kvferry is idempotent, and a caller does the same without an answer as without a connection; and CANCELLED, which
    comes from a server that stops, or that a hostile peer floods with resets (a caller that has cancelled its call does
    not convert the error). `tls` are the channel's credentials: if they are the cause, the message names the settings
    to look at. `answered`: the server has answered this caller before, so the settings were right then.
    """
    found = error_of_peer(error)
    if found is not None:
        return found
    name, text = _code_of(error), _text_of(error)
    if name == "UNAVAILABLE":
        problem = tls_failure(text, address, tls, answered=answered) or f"{text}. Is kvferryd running there?"
        return Unreachable(f"{address} cannot be reached: {problem}", address=address)
    if name == "CANCELLED":
        return Unreachable(f"{address} cancelled the call: {text}. Is it stopping, or overloaded?", address=address)
    if name == "DEADLINE_EXCEEDED":
        problem = "did not answer in time. Is it overloaded, or does a firewall drop its packets?"
        return Unreachable(f"{address} {problem}", address=address)
    if name == "UNIMPLEMENTED":
        problem = f"does not offer this call: {text}. Is it another version, or no node server of kvferry at all?"
        return NotImplementedHere(f"{address} {problem}", what=text)
    if name == "RESOURCE_EXHAUSTED" and TOO_LARGE in text:
        return MessageTooLarge(f"{address}: {text}", address=address)
    return _rebuilt("", name, f"{address} answered {name}: {text}", {"address": address})


def tls_failure(text: str, address: str, tls: TlsConfig | None, *, answered: bool = False) -> str:
    """Return the problem of the TLS settings, with the settings to look at; empty if TLS did not fail.

    `text` is gRPC's text for a call that ended with UNAVAILABLE. `answered`: the node server has answered this caller
    before, so a connection that is closed without a reason does not point to TLS.
    """
    if address.startswith("unix:"):
        return ""
    untrusted, cut = _UNTRUSTED.search(text), _CLOSED.search(text) is not None
    closed = cut and _NEVER_CONNECTED in text
    if answered and closed and not untrusted:
        return _CLOSED_AGAIN
    if tls is None:
        return _REJECTED.format("without TLS") if closed else ""
    if untrusted:
        return _NOT_TRUSTED.format(untrusted[1])
    if "Hostname Verification" in text or "is not in peer certificate" in text:
        return _OTHER_NAME
    if "WRONG_VERSION_NUMBER" in text:
        return _NOT_TLS
    if (cut or "andshake" in text) and (size := _shown_bytes(tls)) > MAX_CLIENT_CHAIN_BYTES:
        return _CHAIN_TOO_LARGE.format(tls.cert, size)
    if closed or "andshake" in text:
        return _REJECTED.format("that has no certificate to show" if tls.cert is None else "with a certificate")
    return ""


def _shown_bytes(tls: TlsConfig) -> int:
    try:
        return 0 if tls.cert is None else chain_bytes(tls.cert.read_bytes())
    except OSError:
        return 0


def error_of_peer(error: grpc.RpcError) -> KvferryError | None:
    """Return the error with which a node server ended a call; None if gRPC or another program ended the call."""
    metadata = cast(grpc.Call, error).trailing_metadata() if hasattr(error, "trailing_metadata") else None
    details = (value for key, value in metadata or () if key == DETAILS_KEY and isinstance(value, bytes))
    found: error_details_pb2.ErrorInfo | None = None
    retry_after: float | None = None
    try:
        status = status_pb2.Status.FromString(next(details, b""))
        for detail in status.details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                found = info
            elif detail.Unpack(retry):
                retry_after = _pause(retry.retry_delay)
    except DecodeError:
        # The details are damaged, or not from kvferry: the code decides.
        return None
    if found is None:
        return None
    reason, message = found.reason, status.message or _text_of(error)
    return _rebuilt(reason, _code_of(error), message, found.metadata, retry_after)


def _code_of(error: grpc.RpcError) -> str:
    code: grpc.StatusCode | None = cast(grpc.Call, error).code() if hasattr(error, "code") else None
    return code.name if code is not None else "UNKNOWN"


def _text_of(error: grpc.RpcError) -> str:
    return (cast(grpc.Call, error).details() if hasattr(error, "details") else None) or str(error)


def to_notification_error(error: KvferryError) -> pb.NotificationError:
    """Convert an error to the result of a notification."""
    return pb.NotificationError(
        code=grpc.StatusCode[error.code].value[0],
        reason=reason_number(error.reason),
        message=_cut(error.message, MESSAGE_BYTES),
        metadata=_bounded(error.values),
        retry_after=to_duration(error.retry_after) if error.retry_after is not None else None,
    )


def from_notification_error(message: pb.NotificationError) -> KvferryError:
    """Convert the result of a notification to an error."""
    name = next((code.name for code in grpc.StatusCode if code.value[0] == message.code), "UNKNOWN")
    retry_after = _pause(message.retry_after) if message.HasField("retry_after") else None
    return _rebuilt(reason_name(message.reason), name, message.message, message.metadata, retry_after)


def _pause(delay: Duration) -> float:
    return min(max(0.0, from_duration(delay)), LONGEST_RETRY)


def _rebuilt(
    reason: str, code: str, message: str, values: Mapping[str, str], retry_after: float | None = None
) -> KvferryError:
    """Return the error of this reason; of a reason that is unknown here, the error of the code."""
    found = from_reason(reason, message, values, retry_after)
    return found if found is not None else _BY_CODE.get(code, KvferryError).rebuilt(message, values, retry_after)


def _cut(text: str, limit: int) -> str:
    """Cut a text to at most `limit` bytes of UTF-8."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    note = "…(+{} characters)"
    kept = encoded[: limit - len(note.encode()) - 8].decode(errors="ignore")
    return kept + note.format(len(text) - len(kept))


def _bounded(values: Mapping[str, str]) -> dict[str, str]:
    """Return the first values that fit into a header; a family (``mismatch.3.…``) as a whole or not at all."""
    families: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        families.setdefault(key.rpartition(".")[0] or key, {})[key] = _cut(value, VALUE_BYTES)
    kept: dict[str, str] = {}
    room = VALUES_BYTES
    for family in families.values():
        # Eight bytes of framing for each entry of the map.
        size = sum(len(key.encode()) + len(value.encode()) + 8 for key, value in family.items())
        if size > room:
            break
        kept.update(family)
        room -= size
    if len(kept) < len(values):
        kept["truncated"] = str(len(values) - len(kept))
    return kept


def reason_number(reason: str) -> errors_pb2.ErrorReason.ValueType:
    """Return the `kvferry.v1.ErrorReason` of a name; 0 for an empty name."""
    return errors_pb2.ErrorReason.Value(reason) if reason else errors_pb2.ERROR_REASON_UNSPECIFIED


def reason_name(number: int) -> str:
    """Return the name of a `kvferry.v1.ErrorReason`; empty for 0 and for unknown numbers."""
    return _REASONS.get(number, "")


def failures_of(reports: Iterable[pb.RankReport]) -> str:
    """Return why the ranks of a read failed, as ``TRANSFER_FAILED (ranks 1, 3), DATA_LOSS (rank 2)``; empty if no rank
    failed. A cancelled rank has not failed."""
    ranks: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        if report.outcome not in (pb.RANK_OUTCOME_DONE, pb.RANK_OUTCOME_CANCELLED):
            expired = report.outcome == pb.RANK_OUTCOME_EXPIRED
            name = reason_name(report.reason) or ("lease expired" if expired else "no reason given")
            ranks.setdefault(name, []).append(report.rank)
    return ", ".join(f"{name} ({_ranks(of)})" for name, of in ranks.items())


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:NAMED_RANKS]))
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"
