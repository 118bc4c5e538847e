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


def computed_as_another(prefill: Node, tokens: list[int], asked: dict[str, Any] | None = None) -> Any:
    """Prefill a prompt with the cache of another one: decode continues that one only if it reads this cache.

    Args:
        prefill: the engine, which takes each token for its neighbour meanwhile.
        tokens: the prompt.
        asked: what it is asked; None: to prefill the prompt, as `offered` does.

    Returns:
        What comes out for decode, and the other prompt. Decode computes the last token itself, so both end alike.
    """
    prefill.call("exchange_tokens")
    [answer] = prefill.generate(asked or request(tokens, 1, PREFILL))
    prefill.call("exchange_tokens")
    return answer["params"], [*(token ^ 1 for token in tokens[:-1]), tokens[-1]]


def alone(engine: Node, prompts: list[list[int]]) -> list[list[int]]:
    """What an engine says without anybody's help."""
    return [answer["tokens"] for answer in engine.generate(*(request(tokens) for tokens in prompts))]


def said(answers: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of some answers."""
    return [answer["tokens"] for answer in answers]
