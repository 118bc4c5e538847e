"""The connector's setup for an engine with one group, and requests of such an engine."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from kvferry import Client, EngineSession, EngineSpec, Group
from kvferry.engine import Tails
from kvferry.integrations.vllm.requests import REFERENCE
from kvferry.integrations.vllm.settings import ConnectorSettings
from kvferry.integrations.vllm.setup import BlockTable, Setup
from kvferry.testing import Fabric

RANKS, BLOCKS, TOKENS = 2, 8, 4
GROUP = Group("0", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0)


def setup_of(
    fabric: Fabric,
    spec: EngineSpec,
    *,
    serves: bool,
    reads: bool = True,
    caches_prefixes: bool = False,
    prompt_check: str = "compare",
    directory: str = "",
) -> Setup:
    """Return the setup that the connector would make from vLLM's configuration."""
    return Setup(
        spec=spec,
        settings=ConnectorSettings(
            fabric.address,
            read_timeout=20.0,
            prompt_check=prompt_check,
            directory=directory,
        ),
        caches_prefixes=caches_prefixes,
        tables=(BlockTable(0, GROUP, TOKENS),),
        recomputed=1,
        rewritten=0,
        tails=Tails.KEEP,
        serves=serves,
        reads=reads,
        drains=False,
        depth=1,
        names_inputs=True,
        hash_algorithm="sha256",
    )


def to_read(reference: str, tokens: int, request_id: str = "reader") -> Any:
    """A request of so many tokens, 0 and so on, that reads a publication."""
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params={"do_remote_prefill": True, REFERENCE: reference},
        num_computed_tokens=0,
        num_tokens=tokens,
        abort_immediately=False,
        **of_text(range(tokens)),
    )


def of_text(token_ids: Iterable[int]) -> dict[str, Any]:
    """What vLLM's request says of a prompt of these tokens."""
    prompt = {"prompt_token_ids": list(token_ids), "prompt_embeds": None, "mm_features": [], "lora_request": None}
    return {**prompt, "kv_hints": None, "resumable": False}


def prefill(client: Client, engine_id: str = "prefill") -> EngineSession:
    """An engine that publishes."""
    memory = {"l": torch.zeros((BLOCKS, TOKENS, 16), dtype=torch.uint8)}
    return client.register_cache(EngineSpec(engine_id, (GROUP,)), tensors=memory).session
