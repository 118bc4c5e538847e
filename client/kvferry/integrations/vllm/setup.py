"""Converts vLLM's configuration to kvferry's description of the engine. The result is equal in all of its processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvferry import _arguments as arguments
from kvferry._engine_spec import EngineSpec
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import Group, GroupKind, Interval
from kvferry.geometry.tensors import Holding, Tensor
from kvferry.integrations.vllm.layouts import Layer

NULL_BLOCK = 0
"""The null block: the first block of vLLM's block pool."""

POOL = "device"


@dataclass(frozen=True, slots=True)
class Setup:
    """Describes a vLLM engine for kvferry.

    Attributes:
        spec: the engine. The names of its groups are their indices in vLLM's configuration.
        address: address of the node server.
        allowed_homes: see `Client`.
        read_timeout: seconds until a read fails.
        fail_requests: a request whose read fails is failed too; if False, it is computed here.
        serves, reads: whether other engines read from it, and whether it reads from others.
        self_check: whether each rank checks its planes against what vLLM writes before it serves.
    """

    spec: EngineSpec
    address: str
    allowed_homes: tuple[str, ...]
    read_timeout: float
    fail_requests: bool
    serves: bool
    reads: bool
    self_check: bool

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Setup:
        """Convert vLLM's configuration; raises `InvalidField` for settings that this connector does not support."""
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if not current_platform.is_cpu():
            raise InvalidField("platform", current_platform.device_name, "cpu: other layouts have not been checked")
        for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                raise InvalidField(name, getattr(parallel, name), "1")
        extra = transfer.kv_connector_extra_config
        address = extra.get("address") or os.environ.get("KVFERRY_ADDRESS", "")
        if not address:
            raise InvalidField(
                "address", "", "the node server's address, in kv_connector_extra_config or KVFERRY_ADDRESS"
            )
        allowed_homes = arguments.texts("allowed_homes", extra.get("allowed_homes", ()))
        read_timeout = arguments.seconds("read_timeout", extra.get("read_timeout", 120.0))
        groups = tuple(_group(index, group, kv_cache_config) for index, group in _transferred(kv_cache_config))
        spec = EngineSpec(transfer.engine_id, groups, parallel.world_size, _identity(vllm_config))
        return cls(
            spec=spec,
            address=address,
            allowed_homes=allowed_homes,
            read_timeout=read_timeout,
            fail_requests=transfer.kv_load_failure_policy == "fail",
            serves=transfer.is_kv_producer,
            reads=transfer.is_kv_consumer,
            self_check=arguments.flag("self_check", extra.get("self_check", True)),
        )

    def published(self, block_ids: tuple[list[int], ...], tokens: int) -> dict[str, Blocks]:
        """Convert vLLM's block ids of a request to the blocks that a source publishes, by group.

        Args:
            block_ids: ids by group.
            tokens: number of tokens to publish.
        """
        found = {}
        for group in self.spec.groups:
            ids = block_ids[int(group.name)]
            # Blocks that have left a window are null blocks, and always at the front.
            gone = next((place for place, block in enumerate(ids) if block != NULL_BLOCK), len(ids))
            last = -(-tokens // group.block_tokens)
            found[group.name] = Blocks(
                ids[gone:last], gone * group.block_tokens, max(tokens, gone * group.block_tokens)
            )
        return found

    def wanted(self, block_ids: tuple[list[int], ...], tokens: tuple[int, int]) -> dict[str, Blocks]:
        """Convert vLLM's block ids of a request to the blocks that a destination reads into, by group.

        Args:
            block_ids: ids by group.
            tokens: the tokens to read, ``[a, b)``; ``a`` is the first token of a block.
        """
        begin, end = tokens
        found = {}
        for group in self.spec.groups:
            first, last = begin // group.block_tokens, -(-end // group.block_tokens)
            found[group.name] = Blocks(block_ids[int(group.name)][first:last], begin, end)
        return found


def layers_of(
    vllm_config: Any, kv_cache_config: Any, setup: Setup, kv_caches: Mapping[str, Tensor], tp_rank: int
) -> list[Layer]:
    """Return the layers of a rank, ordered by group."""
    groups = {group.name: group for group in setup.spec.groups}
    heads = _heads(vllm_config, tp_rank)
    return [
        Layer(name, kv_caches[name], listed.kv_cache_spec, groups[str(index)], heads, vllm_config)
        for index, listed in _transferred(kv_cache_config)
        for name in listed.layer_names
        if name in kv_caches
    ]


def _heads(vllm_config: Any, tp_rank: int) -> Holding:
    """Return the KV heads of a rank: its share, or one that other ranks share if there are fewer heads than ranks."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if heads >= ranks:
        share = heads // ranks
        return Holding(units=Interval(tp_rank * share, (tp_rank + 1) * share), axis_size=heads)
    head = tp_rank * heads // ranks
    return Holding(units=Interval(head, head + 1), axis_size=heads)


def _transferred(kv_cache_config: Any) -> list[tuple[int, Any]]:
    return [(index, kv_cache_config.kv_cache_groups[index]) for index in kv_cache_config.transfer_group_ids]


def _group(index: int, listed: Any, kv_cache_config: Any) -> Group:
    spec, name = listed.kv_cache_spec, f"{index}"
    if isinstance(spec, SlidingWindowSpec):
        kind, window = GroupKind.WINDOW, spec.sliding_window
    elif isinstance(spec, FullAttentionSpec):
        kind, window = GroupKind.TOKENS, 0
    else:
        raise InvalidField(f"KV-cache group {index}", type(spec).__name__, "full attention, latent or sliding-window")
    return Group(name, kind, spec.block_size, kv_cache_config.num_blocks, NULL_BLOCK, window, POOL)


def _identity(vllm_config: Any) -> dict[str, str]:
    """Return the identity of the cache's contents. It has the model's name and configuration, not its path, which may
    differ between hosts."""
    model = vllm_config.model_config
    described = {key: value for key, value in model.hf_config.to_dict().items() if not key.startswith("_")}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "model": Path(str(model.model)).name,
        "revision": str(model.revision or ""),
        "config": digest[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization or ""),
    }
