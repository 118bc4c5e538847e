"""Groups from vLLM's specs, and the blocks that prefill publishes and decode wants, by vLLM's own block managers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry import Blocks
from kvferry.errors import InvalidField
from kvferry.geometry.model import GroupKind
from kvferry.integrations.vllm.setup import NULL_BLOCK, BlockTable, Setup, block_tables
from kvferry.planner.request_blocks import needed

HEADS: dict[str, Any] = {"num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
STATE: dict[str, Any] = {
    "shapes": ((3, 16), (4, 8, 8)),
    "dtypes": (torch.bfloat16, torch.float32),
    "mamba_type": MambaAttentionBackendEnum.MAMBA2,
}
FULL = FullAttentionSpec(block_size=32, **HEADS)
WINDOW = SlidingWindowSpec(block_size=32, sliding_window=100, **HEADS)
CHUNK = ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=96, **HEADS)
LAST_STATE = MambaSpec(block_size=2048, **STATE)
STATES = MambaSpec(block_size=32, mamba_cache_mode="align", **STATE)


def readable(tables: Sequence[BlockTable], offered: Mapping[str, Blocks], computed: int, limit: int) -> int:
    """What an engine with these tables can read."""
    return Setup.readable(cast(Setup, SimpleNamespace(tables=tables)), offered, computed, limit)


def tables(*specs: KVCacheSpec, dcp: int = 1, layers: int = 1) -> tuple[BlockTable, ...]:
    """The block tables of an engine with a group of each spec."""
    groups = []
    for index, spec in enumerate(specs):
        wrapped = isinstance(spec, UniformTypeKVCacheSpecs)
        names = list(spec.kv_cache_specs) if wrapped else [f"{index}.{layer}" for layer in range(layers)]
        groups.append(KVCacheGroupSpec(names, spec))
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=dcp))
    return block_tables(config, KVCacheConfig(num_blocks=500, kv_cache_tensors=[], kv_cache_groups=groups))


@pytest.mark.parametrize(
    ("spec", "name", "kind", "block", "window"),
    [
        (FULL, "full", GroupKind.TOKENS, 32, 0),
        (MLAAttentionSpec(block_size=64, **LATENT), "full", GroupKind.TOKENS, 64, 0),
        (MLAAttentionSpec(block_size=64, tokens_per_state=4, **LATENT), "full", GroupKind.TOKENS, 64, 0),
        (RSWASpec(block_size=32, rswa_window=64, **HEADS), "full", GroupKind.TOKENS, 32, 0),
        (SinkFullAttentionSpec(block_size=32, sink_len=32, **HEADS), "full", GroupKind.TOKENS, 32, 0),
        # Without its hybrid manager vLLM keeps all tokens.
        (FullAttentionSpec(block_size=32, sliding_window=64, **HEADS), "full", GroupKind.TOKENS, 32, 0),
        (WINDOW, "window-100", GroupKind.TOKENS, 32, 100),
        (replace(WINDOW, extra_retained_tokens=2), "window-100", GroupKind.TOKENS, 32, 102),
        (SlidingWindowMLASpec(block_size=32, sliding_window=64, **LATENT), "window-64", GroupKind.TOKENS, 32, 64),
        (CHUNK, "chunk-96", GroupKind.TOKENS, 32, 0),
        (LAST_STATE, "state-mamba2", GroupKind.STATE, 0, 0),
        (STATES, "state-mamba2", GroupKind.STATE, 0, 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else "",
)
def test_group_names_say_which_tokens_their_blocks_keep(
    spec: KVCacheSpec, name: str, kind: GroupKind, block: int, window: int
) -> None:
    [table] = tables(spec)
    group = table.group
    assert (group.name, group.kind, group.block_tokens, table.window_tokens) == (name, kind, block, window)
    assert (group.num_blocks, group.null_block) == (500, NULL_BLOCK)


def test_group_names_do_not_depend_on_order_or_sizes() -> None:
    """Prefill and decode may differ in block sizes, ranks, and the order in which vLLM found the layers."""
    prefill = tables(FULL, WINDOW, WINDOW, LAST_STATE, layers=3)
    halves = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    decode = tables(
        STATES,
        SlidingWindowSpec(block_size=64, sliding_window=100, **halves),
        FullAttentionSpec(block_size=64, **halves),
        SlidingWindowSpec(block_size=64, sliding_window=100, **halves),
    )
    assert [table.group.name for table in prefill] == ["full", "window-100", "window-100.1", "state-mamba2"]
    assert {table.group.name: table.group.kind for table in prefill} == {
        table.group.name: table.group.kind for table in decode
    }
    # The layers of a pipeline stage that has none of a group.
    assert tables(FULL, WINDOW, layers=0) == tables(FULL, WINDOW, layers=5)


def test_layers_of_one_table_may_have_specs_of_their_own() -> None:
    """DeepSeek-V3.2: the indexer's keys beside the latent. The scheduler has the first spec only."""
    latent = MLAAttentionSpec(block_size=64, **LATENT)
    indexer = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    both = {"layers.0.attn": latent, "layers.0.indexer.k_cache": indexer}
    assert tables(UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=both)) == tables(latent)
    both["layers.1.attn"] = CHUNK
    with pytest.raises(InvalidField, match="layers that keep the same tokens"):
        tables(UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=both))


def test_blocks_of_decode_context_parallel_ranks_hold_more_tokens() -> None:
    full, state = tables(FULL, STATES, dcp=4)
    assert (full.group.block_tokens, full.entry_tokens) == (128, 128)
    # States are on every rank.
    assert state.entry_tokens == 32


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (CircularBufferSpec(block_size=8, **LATENT), "CircularBufferSpec"),
        (CrossAttentionSpec(block_size=32, **HEADS), "CrossAttentionSpec"),
        (HiddenStateCacheSpec(block_size=32, **LATENT), "HiddenStateCacheSpec"),
        (HiSparseHotSpec(block_size=32, page_size=1, blocks_per_request=1), "HiSparseHotSpec"),
        (ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=80, **HEADS), "attention_chunk_size"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else "",
)
def test_unsupported_specs_are_refused_by_name(spec: KVCacheSpec, reason: str) -> None:
    with pytest.raises(InvalidField, match=reason):
        tables(spec)


class Engine:
    """One group of an engine: vLLM's block manager, driven as vLLM's scheduler does."""

    def __init__(self, spec: KVCacheSpec) -> None:
        [self.table] = tables(spec)
        self.pool = BlockPool(num_gpu_blocks=500, enable_caching=False, hash_block_size=spec.block_size)
        self.pool.get_new_blocks(7)
        self.manager = get_manager_for_kv_cache_spec(
            spec,
            max_in_flight_tokens=64,
            max_model_len=2048,
            block_pool=self.pool,
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=spec.block_size,
        )

    def ids(self) -> list[int]:
        return [block.block_id for block in self.manager.req_to_blocks["r"]]

    def compute(self, prompt: int, tokens: int, chunk: int = 50) -> list[int]:
        """Compute a request's tokens in chunks of a prompt, then one by one; the block ids when it ends."""
        done = 0
        while done < tokens:
            step = min(chunk, prompt - done) if done < prompt else 1
            self.manager.remove_skipped_blocks("r", done, num_prompt_tokens=prompt)
            total = done + step
            self.manager.get_num_blocks_to_allocate("r", total, [], done, done, total)
            self.manager.allocate_new_blocks("r", total, total)
            self.manager.num_cached_block.setdefault("r", 0)
            done = total
        self.manager.remove_skipped_blocks("r", done, num_prompt_tokens=prompt)
        return self.ids()

    def make_room(self, tokens: int) -> list[int]:
        """Give out the blocks to read so many tokens into."""
        self.manager.add_local_computed_blocks("r", [], 0, tokens)
        self.manager.allocate_external_computed_blocks("r", 0, tokens)
        return self.ids()


def attended(spec: KVCacheSpec, position: int) -> int:
    """The first token that the one at a position sees, from what the model's layers do."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - (int(spec.sliding_window) - 1))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // int(spec.attention_chunk_size) * int(spec.attention_chunk_size)
    return 0


SPECS: dict[str, KVCacheSpec] = {
    "full": FULL,
    "window": WINDOW,
    "window of a block": replace(WINDOW, sliding_window=32),
    "chunk": CHUNK,
    "last state": LAST_STATE,
    "states of blocks": STATES,
    "R-SWA": RSWASpec(block_size=32, rswa_window=64, **HEADS),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("block", [32, 96], ids="decode's blocks of {}".format)
def test_decode_reads_all_tokens_that_its_next_token_attends_to(spec: KVCacheSpec, block: int) -> None:
    """For a prompt of every length: prefill leaves the last token out, decode computes it after reading. vLLM takes
    each full block that decode has read into for its prefix cache, so all of it is read, or nothing is."""
    mine = spec if isinstance(spec, MambaSpec) else replace(spec, block_size=block)
    for length in range(2, 230):
        prefill, decode = Engine(spec), Engine(mine)
        end = length - 1
        published = prefill.table.published(prefill.compute(end, end), end)
        name = decode.table.group.name
        first = attended(spec, end)
        begin = first // decode.table.entry_tokens * decode.table.entry_tokens
        if first < end and not isinstance(spec, MambaSpec) and begin < published.first_token:
            # Decode's block is larger, and prefill has freed what it does not attend to of it.
            assert block > 32
            assert readable([decode.table], {name: published}, 0, length - 1) == 0
            continue
        assert readable([decode.table], {name: published}, 0, length - 1) == end
        wanted = decode.table.wanted(decode.make_room(end), (0, end))
        # If the read fails, vLLM is told that its blocks are lost: every request of such a model has the null block.
        assert NULL_BLOCK not in wanted.ids.tolist()
        found = needed([decode.table.group], {name: prefill.table.group}, {name: published}, {name: wanted}, (0, end))
        if isinstance(spec, MambaSpec):
            assert found[name].source.ids.tolist() == published.ids.tolist()
            continue
        if first < end:
            assert found[name].begin == (begin if decode.table.forgets else 0)
            assert found[name].end == end
        else:
            # The first token of a chunk sees no other.
            assert name not in found


def test_tokens_that_decode_has_generated_can_be_read_for_the_next_turn() -> None:
    """R-SWA frees what is between the prompt and the window: that much can be read, and no more."""
    spec = RSWASpec(block_size=32, rswa_window=64, **HEADS)
    for generated in (1, 40, 100, 300):
        engine = Engine(spec)
        ids = engine.compute(70, 70 + generated)
        published = engine.table.published(ids, 70 + generated)
        assert NULL_BLOCK not in published.ids.tolist()
        whole = ids.index(NULL_BLOCK) * 32 if NULL_BLOCK in ids else 70 + generated
        assert published.end_token == whole
        assert readable([engine.table], {"full": published}, 0, 1000) == whole
        # The prompt's 70 tokens are in three blocks.
        assert whole == (96 if generated == 300 else 70 + generated)


def test_a_state_is_read_at_its_token_only() -> None:
    full, state = tables(FULL, STATES)
    offered = {"full": Blocks([4, 5, 6], 0, 70), "state-mamba2": Blocks([9], state_token=70)}
    assert readable([full, state], offered, 0, 70) == 70
    assert readable([full, state], offered, 0, 71) == 70
    # A shorter prompt: the state has seen more than it.
    assert readable([full, state], offered, 0, 69) == 0


def test_a_window_that_prefill_has_freed_in_part_is_not_read() -> None:
    full, window = tables(FULL, WINDOW)
    offered = {"full": Blocks(range(1, 9), 0, 250), "window-100": Blocks([20, 21, 22, 23], 128, 250)}
    assert readable([full, window], offered, 0, 250) == 250
    # The window of token 220 begins at 121.
    assert readable([full, window], offered, 0, 220) == 0
    assert readable([full, window], offered, 128, 220) == 220


def test_a_state_that_vllm_has_freed_is_not_published() -> None:
    [state] = tables(STATES)
    assert state.published([0, 0, 7, 8], 96).ids.tolist() == [7]
    for ids in ([0, 0, 0, 8], [3], []):
        with pytest.raises(InvalidField, match="state of group"):
            state.published(ids, 96)
