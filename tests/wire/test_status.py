"""Errors survive the wire, whatever they hold, and never make a header that peers drop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2

from kvferry import errors
from kvferry._wire.channel import TlsConfig
from kvferry._wire.status import (
    DETAILS_KEY,
    from_notification_error,
    from_rpc_error,
    tls_failure,
    to_notification_error,
    to_status,
)
from kvferry.errors import Incompatible, KvferryError, Mismatch
from kvferry.v1 import errors_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

ADDRESS = "node7:7423"


class Answer(grpc.RpcError):
    """A call that has ended, as a stub raises it."""

    def __init__(self, status: tuple[grpc.StatusCode, str, Any]) -> None:
        self.status = status

    def code(self) -> grpc.StatusCode:
        return self.status[0]

    def details(self) -> str:
        return self.status[1]

    def trailing_metadata(self) -> Any:
        return self.status[2]


def with_reasons(cls: type[KvferryError] = KvferryError) -> Iterator[type[KvferryError]]:
    for sub in cls.__subclasses__():
        if sub.reason and sub.__module__ == errors.__name__:
            yield sub
        yield from with_reasons(sub)


def make(cls: type[KvferryError], **values: object) -> KvferryError:
    error = cls.__new__(cls)
    KvferryError.__init__(error, "it went wrong: ä", retry_after=1.5, **values)
    if isinstance(error, Incompatible):
        error.mismatches = ()
    return error


@pytest.mark.parametrize(
    "cls", [cls for cls in with_reasons() if cls is not Incompatible], ids=lambda cls: cls.__name__
)
def test_error_survives_the_wire(cls: type[KvferryError]) -> None:
    error = make(cls, engine_id="decode", block=7)
    status = to_status(error)
    assert status[0].name == cls.code
    for back in (
        from_rpc_error(Answer(status), ADDRESS),
        from_notification_error(to_notification_error(error)),
    ):
        assert type(back) is cls
        assert back.message == error.message
        assert back.values == {"engine_id": "decode", "block": "7"}
        assert back.retry_after == 1.5


@pytest.mark.parametrize("cls", list(with_reasons()), ids=lambda cls: cls.__name__)
def test_reason_is_spelt_alike_in_details_in_json_and_in_python(cls: type[KvferryError]) -> None:
    error = make(cls)
    info = error_details_pb2.ErrorInfo()
    ((_, details),) = to_status(error)[2]
    assert isinstance(details, bytes)
    status_pb2.Status.FromString(details).details[0].Unpack(info)
    notified = json_format.MessageToDict(to_notification_error(error))["reason"]
    assert (info.reason, notified) == (cls.reason, cls.reason)


def mismatches(count: int, text: str) -> tuple[Mismatch, ...]:
    return tuple(Mismatch("format", f"plane {i}", "format", text, f"{i} {text}", f"{i}: {text}") for i in range(count))


def test_mismatches_survive_the_wire() -> None:
    sent = Incompatible(mismatches(3, "hnd"))
    back = from_rpc_error(Answer(to_status(sent)), ADDRESS)
    assert isinstance(back, Incompatible)
    assert back.mismatches == sent.mismatches


@pytest.mark.parametrize(
    "error",
    [
        Incompatible(mismatches(200, "x" * 90)),
        Incompatible(mismatches(16, "ß" * 5000)),
        errors.InvalidField("engine_id", "\x00\u4e16" * 4000, "something shorter"),
        errors.CacheDiffers("m" * 9000, retry_after=1.0, **{f"key{i}": "v" * 100 for i in range(500)}),
        errors.EngineIncomplete("lone surrogate \ud800", missing_ranks="\ud800" * 100),
    ],
    ids=lambda error: type(error).__name__,
)
def test_large_errors_fit_a_header_and_count_missing_values(error: KvferryError) -> None:
    status = to_status(error)
    _, message, metadata = status
    details = dict(metadata)[DETAILS_KEY]
    percent_encoded = sum(1 if 0x20 <= byte < 0x7F else 3 for byte in message.encode())
    assert percent_encoded + len(details) * 4 / 3 < 7500
    back = from_rpc_error(Answer(status), ADDRESS)
    assert type(back) is type(error)
    # A refusal has a number of its own.
    if len(error.values) > len(back.values) and not isinstance(error, Incompatible):
        assert back.values["truncated"] == str(len(error.values) - len(back.values) + 1)


def test_shortened_refusal_keeps_the_number_of_differing_fields() -> None:
    back = from_rpc_error(Answer(to_status(Incompatible(mismatches(200, "x" * 90)))), ADDRESS)
    assert isinstance(back, Incompatible)
    assert back.values["mismatches"] == "200"
    assert 0 < len(back.mismatches) < 16
    assert all(mismatch.message and mismatch.destination for mismatch in back.mismatches)
    assert f"and {200 - len(back.mismatches)} more" in back.message


@pytest.mark.parametrize(
    ("code", "cls", "retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unreachable, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Unreachable, True),
        (grpc.StatusCode.CANCELLED, errors.Unreachable, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.LimitReached, False),
        (grpc.StatusCode.UNIMPLEMENTED, errors.NotImplementedHere, False),
        (grpc.StatusCode.INTERNAL, errors.InternalError, False),
        (grpc.StatusCode.UNKNOWN, KvferryError, False),
    ],
)
def test_errors_of_grpc_itself_become_typed_errors(
    code: grpc.StatusCode, cls: type[KvferryError], retryable: bool
) -> None:
    for metadata in ((), ((DETAILS_KEY, b"\xff\xff"),)):
        back = from_rpc_error(Answer((code, "text", metadata)), ADDRESS)
        assert type(back) is cls
        assert back.retryable is retryable
        assert ADDRESS in back.message


def test_a_reason_of_a_later_version_keeps_its_code_and_its_retry() -> None:
    message = pb.NotificationError(code=14, reason=errors_pb2.ErrorReason.ValueType(999), message="later")
    message.retry_after.FromMilliseconds(250)
    back = from_notification_error(message)
    assert isinstance(back, errors.Unavailable)
    assert back.retry_after == 0.25


def test_error_without_a_reason_is_not_sent() -> None:
    with pytest.raises(TypeError, match="never crosses the wire"):
        to_status(errors.Closed("closed"))


CLOSED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7611: Socket closed"
UNTRUSTED = "failed to connect to all addresses; last error: CERTIFICATE_VERIFY_FAILED: self-signed certificate"


@pytest.mark.parametrize("tls", [None, TlsConfig()], ids=["plain", "tls"])
def test_connection_closed_at_once_names_tls_only_without_earlier_answers(
    tls: TlsConfig | None,
) -> None:
    assert "TLS settings are likely to differ" in tls_failure(CLOSED, "10.0.0.1:7611", tls)
    later = tls_failure(CLOSED, "10.0.0.1:7611", tls, answered=True)
    assert "likely to be restarting behind a proxy" in later
    # A certificate that changed since is named all the same.
    changed = tls_failure(UNTRUSTED, "10.0.0.1:7611", TlsConfig(), answered=True)
    assert "does not trust the node server's certificate" in changed


@pytest.mark.parametrize("text", ["Socket closed", "Delayed close due to in-progress write (Wrap failed)"])
def test_too_large_certificate_is_named_for_every_way_of_closing(tmp_path: Path, text: str) -> None:
    cert = tmp_path / "large.pem"
    cert.write_text(f"-----BEGIN CERTIFICATE-----\n{'A' * 12_000}\n-----END CERTIFICATE-----\n")
    assert "has 9000 bytes of certificates" in tls_failure(text, "10.0.0.1:7611", TlsConfig(cert=cert, key=cert))
