"""Converts vLLM's configuration to kvferry's description of the engine, which is equal in all of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform

from kvferry import EngineSpec
from kvferry.engine import Tails
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import GroupKind
from kvferry.integrations.identity import cache_identity
from kvferry.integrations.vllm.groups import BlockTable, block_tables, readable, readable_later
from kvferry.integrations.vllm.settings import ConnectorSettings, check_supported


@dataclass(frozen=True, slots=True)
class Setup:
    """Describes a vLLM engine for kvferry."""

    spec: EngineSpec
    settings: ConnectorSettings
    caches_prefixes: bool  # whether vLLM keeps the blocks of requests for others with the same prefix
    tables: tuple[BlockTable, ...]
    recomputed: int  # tokens at the end of a prompt that decode computes itself
    rewritten: int
    """Tokens at the end of the computed ones whose cache vLLM may write again in later steps: a drafter of several
    modules reads tokens that the model has not seen."""
    tails: Tails
    """How to treat the memory behind the last token read. If kernels need cleared blocks, vLLM clears the blocks that
    it allocates, except those that a connector fills."""
    serves: bool  # whether other engines read from this engine
    reads: bool  # whether this engine reads from others
    drains: bool  # whether vLLM finishes its work before it ends (``--shutdown-timeout``)
    depth: int | None
    """Steps that vLLM has under way at once; None: steps run together with other data-parallel ranks."""
    names_inputs: bool
    """Whether images and other inputs have names that are equal at another engine: hashes of their content, or the
    client's own. vLLM numbers inputs if it caches neither prefixes nor processed inputs."""
    hash_algorithm: str  # vLLM's name of the hash of its prefix cache

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Setup:
        """Convert vLLM's configuration; raises `InvalidField` for settings that this connector does not support."""
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
            raise InvalidField("platform", current_platform.device_name, "cpu, cuda or rocm")
        check_supported(vllm_config, current_platform.device_type)
        settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        role = settings.role_of(transfer.kv_role)
        tables = block_tables(vllm_config, kv_cache_config)
        groups = tuple(table.group for table in tables)
        model, cache = vllm_config.model_config, vllm_config.cache_config
        identity = cache_identity(model.model, model, model.hf_config.to_dict(), cache.cache_dtype)
        ahead = vllm_config.num_prefill_lookahead_tokens
        return cls(
            spec=EngineSpec(transfer.engine_id, groups, parallel.world_size, identity),
            settings=settings,
            caches_prefixes=bool(cache.enable_prefix_caching),
            tables=tables,
            # A drafter of several modules reads so many tokens ahead: decode must not take these from prefill.
            recomputed=max(1, ahead - 1),
            rewritten=max(0, ahead - 1),
            tails=Tails.ZERO if kv_cache_config.needs_kv_cache_zeroing else Tails.KEEP,
            serves=role != "decode",
            reads=role != "prefill",
            drains=bool(vllm_config.shutdown_timeout),
            depth=vllm_config.max_concurrent_batches if parallel.data_parallel_size == 1 else None,
            names_inputs=_names_inputs(vllm_config),
            hash_algorithm=cache.prefix_caching_hash_algo,
        )

    @property
    def sums(self) -> bool:
        """Whether integrity mode is on."""
        return self.settings.integrity.mode != "off"

    @property
    def has_states(self) -> bool:
        """Whether a group holds recurrent states, which are valid at one token only."""
        return any(table.group.kind is GroupKind.STATE for table in self.tables)

    @property
    def drafts_states(self) -> bool:
        """Whether a state has blocks for drafts, one of which may hold the accepted state."""
        return any(table.draft_blocks > 0 for table in self.tables)

    @property
    def withheld(self) -> int:
        """Tokens at the end of a prompt that prefill must not compute.

        Decode computes the last token again. If prefill had computed it, a state would be one token too far, and vLLM
        would have freed the block of a window that only this token still needs.
        """
        forgets = any(table.forgets for table in self.tables)
        return self.recomputed if forgets or self.recomputed > 1 else 0

    def published(self, block_ids: tuple[list[int], ...], tokens: int) -> dict[str, Blocks]:
        """Convert vLLM's block ids of a request to the blocks of `tokens` tokens that a source publishes, by group.
        Raises `InvalidField`: vLLM has freed a needed block."""
        return {table.group.name: table.published(block_ids[table.index], tokens) for table in self.tables}

    def wanted(self, block_ids: tuple[list[int], ...], tokens: tuple[int, int]) -> dict[str, Blocks]:
        """Convert vLLM's block ids of a request to the blocks that a destination reads into, by group, for the tokens
        ``[a, b)``; ``a`` is the first token of a block."""
        return {table.group.name: table.wanted(block_ids[table.index], tokens) for table in self.tables}

    def readable(
        self, offered: Mapping[str, Blocks], computed: int, prompt: int, *, complete: bool = True
    ) -> int | None:
        """Return the end of the readable tokens of a publication for a prompt of `prompt` tokens; None: unknown until
        the publication is complete. See `groups.readable` and `groups.readable_later`."""
        limit = prompt - self.recomputed
        if not complete:
            return readable_later(self.tables, offered, limit)
        return readable(self.tables, offered, computed, limit)


def _names_inputs(vllm_config: Any) -> bool:
    # vllm/renderers/base.py, `_process_mm_uuids` (0.32.0).
    inputs = vllm_config.model_config.multimodal_config
    return inputs is None or bool(vllm_config.cache_config.enable_prefix_caching or inputs.mm_processor_cache_gb > 0)
