"""What ranks hold: vLLM plans and allocates the caches of all ranks here, and the plans move their bytes.

vLLM does not run pipeline stages or context parallelism on CPU, so this is the planner's proof. The oracle is written
from vLLM's definitions: which layers and heads a rank has, and the slot of a token (`slot`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as Folder
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import vllm.distributed.parallel_state as parallel_state
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry import Blocks, plan_read
from kvferry.errors import Incompatible, InvalidField
from kvferry.geometry.model import GroupKind
from kvferry.integrations.vllm.shards import RankPlace, holding, layers_of
from kvferry.planner import Path
from tests.support.vllm_caches import CachedEngine, configuration, engine, move, places

NUM_BLOCKS, TOKENS = 40, 320
LATENT, ROPE = 24, 8


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:
    """The folder of a model without weights."""
    folder = tmp_path_factory.mktemp("models")
    common: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 64,
        "max_position_embeddings": 384,
    }
    attention = transformers.Qwen3Config(
        **common, head_dim=16, num_key_value_heads=4, architectures=["Qwen3ForCausalLM"]
    )
    latent = transformers.DeepseekV2Config(
        **common, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, architectures=["DeepseekV2ForCausalLM"]
    )
    for name, config in (("attention", attention), ("latent", latent)):
        config.save_pretrained(folder / name)
    return lambda name: folder / name


def blocks_of(of: CachedEngine, seed: int) -> dict[str, list[int]]:
    """Blocks for a request, a different choice in every group."""
    order = np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS)).tolist()
    found = {}
    for table in of.tables:
        count = 1 if table.group.kind is GroupKind.STATE else -(-TOKENS // table.entry_tokens)
        found[table.group.name], order = order[:count], order[count:]
    return found


def given(of: CachedEngine, ids: Mapping[str, list[int]]) -> dict[str, Blocks]:
    return {
        table.group.name: Blocks(ids[table.group.name], state_token=TOKENS)
        if table.group.kind is GroupKind.STATE
        else Blocks(ids[table.group.name], 0, TOKENS)
        for table in of.tables
    }


Write = Callable[[CachedEngine, Mapping[str, list[int]]], None]


def check_moves(source: CachedEngine, destination: CachedEngine, write: Write) -> None:
    """Write the same request on both sides; what the destination reads must be what it has written."""
    theirs, mine = blocks_of(source, 1), blocks_of(destination, 2)
    write(source, theirs)
    for path in Path:
        destination.poison()
        write(destination, mine)
        wanted = destination.poison()
        given_blocks = given(source, theirs), given(destination, mine)
        move(source.geometry, destination.geometry, *given_blocks, (0, TOKENS), path)
        for got, want in zip(destination.caches, wanted, strict=True):
            assert set(got) == set(want)
            for name in got:
                assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name


def names(count: int, stage: int, stages: int) -> list[str]:
    """Layers of a pipeline stage, under vLLM's names."""
    return [f"model.layers.{i}.self_attn.attn" for i in range(stage * count // stages, (stage + 1) * count // stages)]


def heads_of(place: RankPlace, total: int) -> range:
    """KV heads of a rank, as vLLM's `QKVParallelLinear` loads them."""
    if total >= place.tp_size:
        share = total // place.tp_size
        return range(place.tp * share, (place.tp + 1) * share)
    head = place.tp // (place.tp_size // total)
    return range(head, head + 1)


def write_heads(of: CachedEngine, ids: Mapping[str, list[int]]) -> None:
    """K and V of attention: a page for each head, whose bytes tell layer, head and place in the request."""
    for place, plan, caches in zip(of.places, of.planned, of.caches, strict=True):
        for table, group in zip(of.tables, plan.kv_cache_groups, strict=True):
            for name in group.layer_names:
                cache, layer = caches[name], int(name.split(".")[2])
                heads = heads_of(place, 4)
                assert len(heads) == cache.shape[1]
                for number, block in enumerate(ids[table.group.name]):
                    for local, head in enumerate(heads):
                        page = torch.arange(cache[block, local].numel()) % 101
                        page = page + 1000 * layer + 100 * head + 10 * number
                        cache[block, local] = page.view(cache[block, local].shape).to(cache.dtype)


def attention(config: VllmConfig, ranks: Sequence[RankPlace], stages: int, name: str) -> CachedEngine:
    """Qwen3 whose layers are full attention and windows by turns."""

    def specs(place: RankPlace) -> dict[str, Any]:
        fields: Any = {
            "num_kv_heads": len(heads_of(place, 4)),
            "head_size": 16,
            "dtype": torch.float32,
            "block_size": 32,
        }
        full, window = FullAttentionSpec(**fields), SlidingWindowSpec(**fields, sliding_window=TOKENS + 1)
        return {n: window if int(n.split(".")[2]) % 2 else full for n in names(4, place.pp, stages)}

    return engine(name, specs, config, ranks, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [((1, 1), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 2), (4, 2)), ((8, 1), (2, 2)), ((2, 4), (8, 1))],
    ids=lambda sizes: f"tp{sizes[0]}-pp{sizes[1]}",
)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC], ids=lambda layout: layout.name)
def test_pipeline_stages_and_tensor_ranks_are_read(
    described: Callable[[str], Folder], theirs: tuple[int, int], mine: tuple[int, int], layout: KVCacheLayout
) -> None:
    """With more ranks than KV heads, neighbours hold the same head."""
    made: list[CachedEngine] = []
    for side, (tp, pp) in (("p", theirs), ("d", mine)):
        config = configuration(
            described("attention"), layout=layout, tensor_parallel_size=tp, pipeline_parallel_size=pp
        )
        made.append(attention(config, list(places(tp=tp, pp=pp)), pp, side))
        assert [place.rank for place in made[-1].places] == list(range(config.parallel_config.world_size))
    check_moves(made[0], made[1], write_heads)


def slot(token: int, ids: list[int], block_size: int, ranks: int, rank: int, interleave: int) -> tuple[int, int] | None:
    """The block and place of a token on a context-parallel rank; None: it is on another.

    Source: vllm-project/vllm 0.32.0, ``ComputeSlotMappingKernel`` in vllm/v1/worker/block_table.py.
    """
    block, offset = divmod(token, block_size * ranks)
    if offset // interleave % ranks != rank:
        return None
    return ids[block], offset // (ranks * interleave) * interleave + offset % interleave


def latent(config: VllmConfig, ranks: Sequence[RankPlace], block: int, name: str) -> CachedEngine:
    """DeepSeek-V2, whose latent is the same on every tensor rank."""
    fields: Any = {"num_kv_heads": 1, "head_size": LATENT + ROPE, "dtype": torch.float32, "block_size": block}
    spec = MLAAttentionSpec(**fields, max_tp_shards=1)
    return engine(name, lambda _: dict.fromkeys(names(4, 0, 1), spec), config, ranks, num_blocks=NUM_BLOCKS)


def write_tokens(of: CachedEngine, ids: Mapping[str, list[int]]) -> None:
    """The latent of each token, on the ranks that have it."""
    parallel = of.config.parallel_config
    shards, [table] = parallel.decode_context_parallel_size, of.tables
    for place, caches in zip(of.places, of.caches, strict=True):
        # As vLLM numbers them: prefill context ranks first, then tensor ranks.
        rank = (place.tp * place.pcp_size + place.pcp) % shards
        for layer, cache in enumerate(caches.values()):
            block_size, interleave = cache.shape[2], parallel.cp_kv_cache_interleave_size
            for token in range(TOKENS):
                at = slot(token, ids[table.group.name], block_size, shards, rank, interleave)
                if at is not None:
                    cache[at[0], 0, at[1]] = torch.arange(LATENT + ROPE) + 1000.0 * layer + 3 * token


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"tp": 2, "dcp": 2, "interleave": 1}, {"tp": 1}),
        ({"tp": 1}, {"tp": 2, "dcp": 2, "interleave": 1}),
        ({"tp": 4, "dcp": 2, "interleave": 16}, {"tp": 2, "dcp": 2, "interleave": 1}),
        ({"tp": 2, "dcp": 2, "interleave": 16}, {"tp": 2, "dcp": 2, "interleave": 16}),
        ({"tp": 4, "dcp": 4, "interleave": 4}, {"tp": 2}),
        # Without decode context parallelism, prefill context ranks hold the same tokens.
        ({"pcp": 2, "tp": 2}, {"tp": 1}),
        ({"pcp": 2, "tp": 2, "dcp": 2, "interleave": 4}, {"tp": 2}),
        ({"pcp": 2, "tp": 2, "dcp": 4, "interleave": 4}, {"pcp": 2, "tp": 1}),
    ],
    ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()),
)
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32)], ids=lambda sizes: f"{sizes[0]}-{sizes[1]}")
def test_context_parallel_ranks_are_read(
    described: Callable[[str], Folder], theirs: dict[str, int], mine: dict[str, int], blocks: tuple[int, int]
) -> None:
    made: list[CachedEngine] = []
    for name, sizes, block in (("p", theirs, blocks[0]), ("d", mine, blocks[1])):
        config = configuration(
            described("latent"),
            tensor_parallel_size=sizes.get("tp", 1),
            prefill_context_parallel_size=sizes.get("pcp", 1),
            decode_context_parallel_size=sizes.get("dcp", 1),
            cp_kv_cache_interleave_size=sizes.get("interleave", 1),
        )
        made.append(latent(config, list(places(tp=sizes.get("tp", 1), pcp=sizes.get("pcp", 1))), block, name))
    check_moves(made[0], made[1], write_tokens)


@pytest.mark.parametrize(
    ("tp", "pcp", "pp", "dcp"), [(4, 1, 2, 2), (2, 2, 2, 2), (2, 2, 1, 4), (3, 1, 2, 1), (4, 2, 1, 8)]
)
def test_ranks_are_numbered_as_vllm_does(monkeypatch: pytest.MonkeyPatch, tp: int, pcp: int, pp: int, dcp: int) -> None:
    """vLLM's own code makes the groups of every rank; it is only kept from connecting them."""
    world = tp * pcp * pp
    for rank in range(world):

        def group(ranks: list[list[int]], *arguments: Any, group_name: str, rank: int = rank, **named: Any) -> Any:
            [own] = [of for of in ranks if rank in of]
            return SimpleNamespace(rank_in_group=own.index(rank), world_size=len(own), ranks=own)

        with monkeypatch.context() as patched:
            patched.setattr(torch.distributed, "is_initialized", lambda: True)
            patched.setattr(torch.distributed, "get_world_size", lambda: world)
            patched.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            patched.setattr(parallel_state, "init_model_parallel_group", group)
            patched.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0, device_group=None))
            for name in ("_TP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_ETP", "_EPLB", "_ENGRAM_DP"):
                patched.setattr(parallel_state, name, None, raising=False)
            config = VllmConfig()
            with set_current_vllm_config(config):
                parallel_state.initialize_model_parallel(tp, pp, pcp, dcp, backend="gloo")
            place = RankPlace.of_process()
            assert place.rank == rank
            assert place.token_rank(dcp) == parallel_state.get_dcp_group().rank_in_group


def test_heads_that_a_drafter_may_have_are_not_guessed(described: Callable[[str], Folder]) -> None:
    """One head on each of eight ranks: of the target's four heads, or of the drafter's eight."""
    config = configuration(described("attention"), tensor_parallel_size=8)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
    assert str(holding(spec, "model.layers.3.self_attn.attn", config, RankPlace(5, tp_size=8)).units) == "[2, 3)"
    drafter = SimpleNamespace(get_total_num_kv_heads=lambda: 8)
    both: Any = SimpleNamespace(
        parallel_config=config.parallel_config,
        model_config=config.model_config,
        speculative_config=SimpleNamespace(draft_model_config=drafter),
    )
    with pytest.raises(InvalidField, match=r"KV heads of model\.layers\.3"):
        holding(spec, "model.layers.3.self_attn.attn", both, RankPlace(5, tp_size=8))
    assert str(holding(spec, "draft_model.layers.3.attn", both, RankPlace(5, tp_size=8)).units) == "[5, 6)"
    # More than one head on each rank can only be shares.
    assert (
        str(
            holding(
                FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32),
                "x",
                both,
                RankPlace(5, tp_size=8),
            ).units
        )
        == "[10, 12)"
    )


def test_layers_that_prefill_lacks_are_named(described: Callable[[str], Folder]) -> None:
    """Decode with a draft model of its own, of which prefill knows nothing."""
    config = configuration(described("attention"))
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=16, dtype=torch.float32)
    plain = engine("p", lambda _: dict.fromkeys(names(4, 0, 1), spec), config, [RankPlace()], num_blocks=NUM_BLOCKS)
    layers = dict.fromkeys([*names(4, 0, 1), "draft_model.model.layers.0.self_attn.attn"], spec)
    drafting = engine("d", lambda _: layers, config, [RankPlace()], num_blocks=NUM_BLOCKS)
    with pytest.raises(
        Incompatible, match=r"draft_model\.model\.layers\.0\.self_attn\.attn/key: units .* no such plane"
    ):
        plan_read(plain.geometry, drafting.geometry, 0)
    # The other way round it is fine: decode reads what it has.
    plan_read(drafting.geometry, plain.geometry, 0)


def test_a_layer_that_shares_the_cache_of_another_is_moved_with_it(described: Callable[[str], Folder]) -> None:
    """vLLM hands over its tensor under both names, and lists one of them in the groups."""
    config = configuration(described("attention"))
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=16, dtype=torch.float32)
    own = names(4, 0, 1)
    found = engine("p", lambda _: dict.fromkeys(own, spec), config, [RankPlace()], num_blocks=NUM_BLOCKS)
    [caches] = found.caches
    shared = {**caches, "model.layers.9.self_attn.attn": caches[own[-1]]}
    layers = layers_of(config, found.planned[0], found.tables, shared, RankPlace())
    assert sorted(layer.name for layer in layers) == sorted(own)


def test_states_beside_attention_in_one_allocation_are_read(described: Callable[[str], Folder]) -> None:
    """Groups lie over each other in vLLM's memory, and a block belongs to one of them at a time."""
    config = configuration(described("attention"))
    fields: Any = {"num_kv_heads": 4, "head_size": 16, "dtype": torch.float32, "block_size": 32}
    full = FullAttentionSpec(**fields)
    state = MambaSpec(
        block_size=2048,
        shapes=((3, 128), (4, 16, 16)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        page_size_padded=full.page_size_bytes,
    )
    mixed = {
        f"model.layers.{i}.{'self_attn.attn' if i % 2 else 'linear_attn'}": full if i % 2 else state for i in range(4)
    }
    sides = [engine(side, lambda _: mixed, config, [RankPlace()], num_blocks=NUM_BLOCKS) for side in ("p", "d")]
    assert [table.group.name for table in sides[0].tables] == ["state-gdn_attn", "full"]

    def write(of: CachedEngine, ids: Mapping[str, list[int]]) -> None:
        for table, group in zip(of.tables, of.planned[0].kv_cache_groups, strict=True):
            for layer, name in enumerate(group.layer_names):
                for number, block in enumerate(ids[table.group.name]):
                    page = of.caches[0][name][block].view(torch.uint8)
                    content = torch.arange(page.numel()) * 7 + 31 * layer + 13 * number
                    page.copy_((content % 251).to(torch.uint8).view(page.shape))

    check_moves(sides[0], sides[1], write)
