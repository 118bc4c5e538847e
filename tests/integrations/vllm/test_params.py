"""Parameters of requests, from routers and from any client that reaches the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import router_reference
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.engine import ReadEnd
from kvferry.errors import BadReference
from kvferry.integrations.vllm.loads import log_failure
from kvferry.integrations.vllm.requests import (
    PUBLISH_AS,
    REFERENCE,
    TRACEPARENT,
    publish_reference,
    read_reference,
    traceparent_of,
)
from kvferry.v1 import kv_transfer_pb2 as pb


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({REFERENCE: "routers"}, "routers"),
        ({REFERENCE: "canonical"}, ""),
        ({REFERENCE: "not one"}, ""),
        ({REFERENCE: 17}, ""),
        ({REFERENCE: "routers", "do_remote_prefill": True}, ""),
        ({REFERENCE: "canonical", "do_remote_prefill": True, PUBLISH_AS: "routers"}, "routers"),
        ({}, ""),
    ],
    ids=["routers", "forwarded", "nonsense", "number", "is-read", "next-turn", "none"],
)
def test_request_is_published_under_the_reference_of_its_router(params: dict[str, Any], expected: str) -> None:
    routers = router_reference("127.0.0.1:1", "prefill")
    named = {"routers": routers, "canonical": "kvf1.AAAA"}
    given = {name: named.get(value, value) if isinstance(value, str) else value for name, value in params.items()}
    request = SimpleNamespace(kv_transfer_params={"do_remote_decode": True, **given})
    assert publish_reference(request) == named.get(expected, "")


@pytest.mark.parametrize("value", [17, 1.5, True, ["kvf1.AAAA"], {"kvf1": "AAAA"}], ids=repr)
def test_reference_that_is_not_a_string_is_bad(value: object) -> None:
    """Clients send what they like. An error in the engine's loop would end the engine."""
    request = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True, REFERENCE: value})
    with pytest.raises(BadReference):
        parse_reference(read_reference(request))


def test_malformed_traceparent_is_dropped() -> None:
    for value in (17, ["00"], "x" * 1_000_000, "00-\n"):
        assert traceparent_of(SimpleNamespace(kv_transfer_params={TRACEPARENT: value})) == ""


def test_names_from_clients_stay_within_their_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """A client may choose the name of its request, and make a reference."""
    reference = format_reference(
        pb.Reference(home="home:1\nERROR", engine_id="prefill\nERROR forged", router_key="key\nERROR", key=bytes(16))
    )
    end = ReadEnd("cmpl-r\nERROR", "", BadReference("no"), True, 0, 0)
    log_failure(end, reference, "decode", aborted=False)
    [record] = caplog.records
    assert "forged" in record.getMessage()
    assert len(record.getMessage().splitlines()) == 1
