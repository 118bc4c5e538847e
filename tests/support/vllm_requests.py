"""What tests ask of engines of a real vLLM, and of their home."""

from __future__ import annotations

from typing import Any

import grpc

from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import PREFILL, Node, request


def ready(engine: Node) -> Node:
    """Wait until an engine serves; it may have done so before."""
    if not engine.is_ready:
        engine.ready()
    return engine


def pinned(home: NodeServerProcess) -> int:
    """Publications of engines that live, which are not released."""
    with grpc.insecure_channel(home.address) as channel:
        answer = IntrospectionStub(channel).ListEngines(ipb.ListEnginesRequest(), timeout=5)
    return sum(engine.publications for engine in answer.engines if engine.state == ipb.ENGINE_STATE_READY)


def offered(prefill: Node, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Prefill the prompts; what comes out for decode."""
    answers = prefill.generate(*(request(tokens, 1, PREFILL) for tokens in prompts))
    return [answer["params"] for answer in answers]


def alone(engine: Node, prompts: list[list[int]]) -> list[list[int]]:
    """What an engine says without anybody's help."""
    return [answer["tokens"] for answer in engine.generate(*(request(tokens) for tokens in prompts))]


def said(answers: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of some answers."""
    return [answer["tokens"] for answer in answers]
