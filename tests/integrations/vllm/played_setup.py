"""What the connector makes of vLLM's configuration of an engine with one group, and requests of such an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry import EngineSpec, Group
from kvferry.engine import Tails
from kvferry.integrations.vllm.groups import BlockTable
from kvferry.integrations.vllm.params import REFERENCE
from kvferry.integrations.vllm.settings import ConnectorSettings
from kvferry.integrations.vllm.setup import Setup
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
    max_waiting: int = 256,
) -> Setup:
    """What the connector would make of vLLM's configuration."""
    return Setup(
        spec=spec,
        settings=ConnectorSettings(fabric.address, read_timeout=20.0, max_waiting=max_waiting),
        caches_prefixes=caches_prefixes,
        tables=(BlockTable(0, GROUP, TOKENS),),
        recomputed=1,
        rewritten=0,
        tails=Tails.KEEP,
        serves=serves,
        reads=reads,
        drains=False,
        depth=1,
    )


def to_read(reference: str, tokens: int, request_id: str = "reader") -> Any:
    """A request of so many tokens that reads a publication."""
    params = {"do_remote_prefill": True, REFERENCE: reference}
    return SimpleNamespace(request_id=request_id, kv_transfer_params=params, num_computed_tokens=0, num_tokens=tokens)
