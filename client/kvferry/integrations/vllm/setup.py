"""Converts vLLM's configuration to kvferry's description of the engine, which is equal in all of its processes; and
vLLM's KV-cache groups with the block ids of their block tables to kvferry's groups and blocks.

A group's name says which tokens its block table keeps, such as ``full`` or ``window-1024``; of several such groups the
second is called ``full.1``, in vLLM's order. Neither block sizes, nor the tensor-parallel size, nor the layers of a
pipeline stage are in the name, because both engines of a read, and all processes of one, must use the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry import EngineSpec
from kvferry.engine import Tails
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import Group, GroupKind
from kvferry.integrations.identity import cache_identity
from kvferry.integrations.vllm.settings import ConnectorSettings, check_supported

NULL_BLOCK = 0
"""The null block: the first block of vLLM's block pool."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """vLLM's list of a request's blocks in one group."""

    index: int  # number of the group in vLLM's configuration
    group: Group
    entry_tokens: int  # tokens per entry of the table, also in tables of states
    chunk_tokens: int = 0  # the chunk size of chunked local attention; else 0
    window_tokens: int = 0
    """The size of a sliding window; else 0. To kvferry such a group is one of tokens, whose tables begin late: the
    planner would read a window from its first token on, but vLLM takes each full block that was read into for its
    prefix cache, also the block in which the window begins. So whole blocks are read."""
    draft_blocks: int = 0  # blocks of a state for drafts, behind its own block

    @property
    def forgets(self) -> bool:
        """Whether vLLM frees, or overwrites, blocks that the next token does not need."""
        return self.chunk_tokens > 0 or self.window_tokens > 0 or self.group.kind is GroupKind.STATE

    def first_needed(self, end: int) -> int:
        """Return where the block begins that has the first token that a token at position `end` attends to."""
        if self.chunk_tokens:
            return end // self.chunk_tokens * self.chunk_tokens
        if self.window_tokens:
            return max(0, end - self.window_tokens + 1) // self.entry_tokens * self.entry_tokens
        return 0

    def published(self, ids: Sequence[int], tokens: int) -> Blocks:
        """Return the blocks of the first `tokens` tokens, as a source publishes them. Raises `InvalidField`: vLLM has
        freed a needed state."""
        if self.group.kind is GroupKind.STATE:
            state = self._state(ids, tokens)
            if not state:
                raise InvalidField(f"state of group {self.group.name!r}", list(ids), f"a block of the one at {tokens}")
            return Blocks(state, state_token=tokens)
        ids = ids[: -(-tokens // self.entry_tokens)]
        absent = [index for index, block in enumerate(ids) if block == NULL_BLOCK]
        if not self.forgets:
            # R-SWA frees blocks in the middle of generated tokens: only the blocks before them are published.
            end = min(tokens, absent[0] * self.entry_tokens) if absent else tokens
            return Blocks(ids[: -(-end // self.entry_tokens)], 0, end)
        first = absent[-1] + 1 if absent else 0
        begin = first * self.entry_tokens
        return Blocks(ids[first:], begin, max(tokens, begin))

    def early(self, ids: Sequence[int], begin: int, tokens: int) -> Blocks:
        """Return the full blocks from `begin` on of a prompt whose first `tokens` tokens are computed: these blocks
        will not change. No blocks of a group that `forgets`, because windows move and states are overwritten."""
        first = begin // self.entry_tokens
        found = [] if self.forgets else list(ids[first : tokens // self.entry_tokens])
        if NULL_BLOCK in found:
            found = found[: found.index(NULL_BLOCK)]
        return Blocks(found, begin, begin + len(found) * self.entry_tokens)

    def rest(self, published: Blocks, begin: int) -> Blocks:
        """Return the blocks of a finished request from the token `begin` on."""
        if self.forgets or not begin:
            return published
        end = max(begin, begin if published.end_token is None else published.end_token)
        return Blocks(published.ids[begin // self.entry_tokens :], begin, end)

    def wanted(self, ids: Sequence[int], tokens: tuple[int, int]) -> Blocks:
        """Return the blocks that a destination reads into, for vLLM's block ids and the tokens to read, ``[a, b)``;
        ``a`` is the first token of a block."""
        begin, end = tokens
        if self.group.kind is GroupKind.STATE:
            return Blocks(self._state(ids, end), state_token=end)
        begin = max(begin, self.first_needed(end))
        return Blocks(ids[begin // self.entry_tokens : -(-end // self.entry_tokens)], begin, end)

    def _state(self, ids: Sequence[int], tokens: int) -> list[int]:
        """Return the block of the state after `tokens` tokens; empty if vLLM has none.

        The index follows from the position in all of vLLM's cache modes: with ``none`` there is one entry, with
        ``align`` and ``all`` an entry for each block of tokens. Blocks of drafts stand behind these entries.
        """
        index = (tokens - 1) // self.entry_tokens
        return [block for block in ids[index : index + 1] if block != NULL_BLOCK]


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
        """Tokens at the end of a prompt that prefill must not compute, because decode computes the last one again. If
        prefill had computed it, a state would be one token too far, and vLLM would have freed the block of a window
        that only this token still needs."""
        forgets = any(table.forgets for table in self.tables)
        return self.recomputed if forgets or self.recomputed > 1 else 0

    def published(self, block_ids: tuple[list[int], ...], tokens: int) -> dict[str, Blocks]:
        """Return `BlockTable.published` of all groups."""
        return {table.group.name: table.published(block_ids[table.index], tokens) for table in self.tables}

    def wanted(self, block_ids: tuple[list[int], ...], tokens: tuple[int, int]) -> dict[str, Blocks]:
        """Return `BlockTable.wanted` of all groups."""
        return {table.group.name: table.wanted(block_ids[table.index], tokens) for table in self.tables}

    def readable(self, offered: Mapping[str, Blocks], computed: int, limit: int) -> int:
        """Return the end of the readable tokens of a complete publication with the `offered` blocks, for an engine that
        has `computed` tokens and can use `limit`; 0 if there are none, for example because a state includes more."""
        known = [(table, offered[table.group.name]) for table in self.tables if table.group.name in offered]
        ends = [_end(table, blocks) for table, blocks in known]
        end = min([*ends, limit])
        for table, blocks in known:
            if table.group.kind is GroupKind.STATE:
                lacking = blocks.state_token != end
            else:
                lacking = max(computed, table.first_needed(end)) < min(blocks.first_token, end)
            if lacking:
                return 0
        return max(0, end) if ends else 0

    def foreseeable(self, offered: Mapping[str, Blocks]) -> bool:
        """Whether all tokens of a publication will be readable when its source has computed the prompt; if not, that is
        unknown until the publication is complete. `offered` are its first blocks.

        Sources publish windows and states at the end. A window's blocks fit only if blocks of both sides have equally
        many tokens, and then the other groups' blocks have, too.
        """
        if not any(table.chunk_tokens or table.window_tokens for table in self.tables):
            return True
        listed = ((table, offered.get(table.group.name)) for table in self.tables)
        counted = [(table, blocks) for table, blocks in listed if blocks is not None and len(blocks.ids)]
        return bool(counted) and all(
            _end(table, blocks) - blocks.first_token == len(blocks.ids) * table.entry_tokens
            for table, blocks in counted
        )


def _names_inputs(vllm_config: Any) -> bool:
    # vllm/renderers/base.py, `_process_mm_uuids` (0.32.0).
    inputs = vllm_config.model_config.multimodal_config
    return inputs is None or bool(vllm_config.cache_config.enable_prefix_caching or inputs.mm_processor_cache_gb > 0)


def block_tables(vllm_config: Any, kv_cache_config: Any) -> tuple[BlockTable, ...]:
    """Return the block tables of the groups that are transferred; raises `InvalidField` for unsupported groups."""
    for group in kv_cache_config.kv_cache_groups:
        if group.host_resident:
            raise InvalidField("KV-cache group", "HiSparse", "blocks on the device: these are in host memory")
    found: list[BlockTable] = []
    seen: Counter[str] = Counter()
    for index in kv_cache_config.transfer_group_ids:
        listed = kv_cache_config.kv_cache_groups[index]
        # The scheduler has only the first spec.
        spec = listed.kv_cache_spec
        first = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        kept = _kept(first)
        for other in (layer_spec(listed, name) for name in listed.layer_names):
            if _kept(other) != kept:
                raise InvalidField(f"KV-cache group {index}", type(other).__name__, "layers that keep the same tokens")
        name = f"{kept}.{seen[kept]}" if seen[kept] else kept
        seen[kept] += 1
        found.append(_table(index, name, first, vllm_config, kv_cache_config.num_blocks))
    return tuple(found)


def layer_spec(listed: Any, name: str) -> Any:
    """Return the spec of a layer of a group."""
    spec = listed.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _end(table: BlockTable, blocks: Blocks) -> int:
    if table.group.kind is GroupKind.STATE:
        return blocks.state_token
    return blocks.first_token if blocks.end_token is None else blocks.end_token


def _kept(spec: Any) -> str:
    """Return the name of the tokens that a spec's block table keeps, with the size of the window or chunk. Raises
    `InvalidField`: the table holds neither the KV cache of tokens nor states."""
    if isinstance(spec, MambaSpec):
        return f"state-{spec.mamba_type.name.lower()}"
    if isinstance(spec, SlidingWindowSpec):
        return f"window-{spec.sliding_window}"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"chunk-{spec.attention_chunk_size}"
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, HiddenStateCacheSpec):
        return "full"
    name = type(spec).__name__
    raise InvalidField("KV-cache spec", name, "one whose block table holds the KV cache of tokens, or states")


def _table(index: int, name: str, spec: Any, vllm_config: Any, num_blocks: int) -> BlockTable:
    kind = GroupKind.STATE if isinstance(spec, MambaSpec) else GroupKind.TOKENS
    entry = int(spec.block_size) * token_shards(spec, vllm_config)
    chunk = int(spec.attention_chunk_size) if isinstance(spec, ChunkedLocalAttentionSpec) else 0
    window = int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else 0
    # Drafters of several modules may compute tokens behind the window again.
    window += getattr(spec, "extra_retained_tokens", 0) if window else 0
    if chunk % entry:
        # Otherwise a chunk begins inside a block, and some formats' pages cannot be divided there.
        raise InvalidField("attention_chunk_size", chunk, f"a multiple of {entry}, the tokens of a block")
    block_tokens = 0 if kind is GroupKind.STATE else entry
    group = Group(name, kind, block_tokens, num_blocks, null_block=NULL_BLOCK, pool="device")
    return BlockTable(index, group, entry, chunk, window, getattr(spec, "num_speculative_blocks", 0))


def token_shards(spec: Any, vllm_config: Any) -> int:
    """Return the number of ranks that divide a layer's tokens: those of decode context parallelism, or 1."""
    return int(vllm_config.parallel_config.decode_context_parallel_size) if spec.dcp_sharded else 1
