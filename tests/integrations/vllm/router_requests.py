"""What routers and sidecars ask prefill and decode, by the projects' public code of August and September 2026."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NULLS = {f"remote_{name}": None for name in ("engine_id", "block_ids", "host", "port")}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Router:
    """What a router does between the client and the two servers.

    Attributes:
        name: of the project.
        asks: the ``kv_transfer_params`` that it sends to prefill.
        limits: fields of the request that it sets for prefill.
        adds: what it adds to the answer's ``kv_transfer_params`` before it forwards them to decode.
    """

    name: str
    asks: dict[str, Any]
    limits: dict[str, Any] = field(default_factory=lambda: {"max_tokens": 1, "stream": False})
    adds: dict[str, Any] = field(default_factory=dict)


ROUTERS = [
    Router("vllm-router", {**ASKED, **NULLS}),
    Router("vllm-toy-proxy", {**ASKED, **NULLS}, {"max_tokens": 1, "min_tokens": 1, "stream": False}),
    Router("llm-d-sidecar-nixlv2", {**ASKED, **NULLS}, {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}),
    Router("llm-d-coordinator-nixl", {**ASKED, **NULLS}, adds={"do_remote_decode": False, "do_remote_prefill": True}),
    Router("production-stack", {**ASKED, **NULLS}, adds={"remote_host": "10.0.0.7"}),
    Router("aibrix", {**ASKED, **NULLS}, adds={"remote_host": "10.0.0.7"}),
    Router("dynamo", {**ASKED, **NULLS}, {"max_tokens": 1, "min_tokens": 1}),
    Router("without-nulls", ASKED),
    # The fields of other modes, all of which are unknown here.
    Router("unknown-fields", {**ASKED, **NULLS, "tp_size": 8, "transfer_id": "x", "remote_dp_rank": 3, "notify": [1]}),
]


HINTED = "10.0.0.7:7777"
"""The address by which the hints below name an engine. Nothing listens there."""


DYNAMO_TIER = {"router_capabilities": ["router_hint"], "control_advertise_host": "10.0.0.7", "control_ports": [7777]}
"""The tier in the configuration of a worker's connector, because of which Dynamo hints at this worker: docs/vllm.md."""


def dynamo_hint(address: str = HINTED) -> dict[str, Any]:
    """The hint that Dynamo's router makes for a request (ai-dynamo 1.6.1, as its own tests have it)."""
    payload = {"source_control_endpoint": f"tcp://{address}", "block_hashes": [11, 22]}
    action = {"action_id": "a1", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "msg-123", "actions": [action]}


def llm_d_hint(host: str = "10.0.0.7", port: int = 7777) -> dict[str, Any]:
    """What llm-d's sidecar makes of the header ``x-kv-cache-source-host-port: 10.0.0.7:8000`` (`p2pSourceParams` in
    pkg/sidecar/proxy/connector_p2p.go): the host, and the port of its own ``--p2p-connector-port``."""
    return {"kv_request_id": "0b0c9c1c-4a8e-4d2f-9f0e-2f3c0a4b5d6e", "remote_host": host, "remote_port": port}
