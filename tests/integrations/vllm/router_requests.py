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
