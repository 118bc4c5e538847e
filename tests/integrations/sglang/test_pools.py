"""SGLang's own pools, written and read by their own methods, and moved as kvferry plans it: between them, and from
vLLM's caches. Each descriptor is a plain copy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvferry import Blocks, EngineGeometry, RankGeometry
from kvferry.errors import InvalidField, KvferryError
from kvferry.geometry import shard
from kvferry.geometry.formats import vllm_attention, vllm_cpu, vllm_mla
from kvferry.geometry.model import Group
from kvferry.geometry.tensors import Holding
from kvferry.integrations.sglang.pools import Pools, describe_pools
from kvferry.integrations.sglang.settings import LAYER_NAMES
from kvferry.planner import Path as ReadPath
from kvferry.planner import plan_read
from tests.support import vllm_caches

HEADS, DIM, LAYERS, SLOTS = 4, 8, 2, 256
LATENT, ROPE = 16, 8
TOKENS = 75
"""Of the request; no block size divides it."""

MakePool = Callable[[int, int], Any]


def mha(heads: int, page: int) -> Any:
    return MHATokenToKVPool(SLOTS, page, torch.float32, heads, DIM, LAYERS, "cpu", False)


def mla(heads: int, page: int) -> Any:
    return MLATokenToKVPool(SLOTS, page, torch.float32, LATENT, ROPE, LAYERS, "cpu", False)


def swa(heads: int, page: int) -> Any:
    return SWAKVPool(
        size=SLOTS,
        size_swa=SLOTS // 2,
        page_size=page,
        dtype=torch.float32,
        head_num=heads,
        head_dim=DIM,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
    )


class World:
    """An engine of SGLang as far as its memory.

    Args:
        make: makes the pool of a rank, from its heads and its page size.
        tp: its tensor-parallel size.
        page: tokens of a page.
    """

    def __init__(self, make: MakePool, tp: int, page: int) -> None:
        self.page = page
        self.held = [shard(rank, tp, HEADS) for rank in range(tp)]
        self.pools = [make(len(held), page) for held in self.held]
        self.described: list[Pools] = [
            describe_pools(pool, shard(rank, tp, HEADS), HEADS, 32, LAYER_NAMES) for rank, pool in enumerate(self.pools)
        ]
        ranks = tuple(RankGeometry(rank, described.planes) for rank, described in enumerate(self.described))
        self.geometry = EngineGeometry(f"tp{tp}", self.described[0].groups, ranks)

    def slots(self, pages: list[int], tokens: range) -> torch.Tensor:
        """Where SGLang keeps tokens of a request that has these pages; the first page holds `tokens.start`."""
        first = tokens.start // self.page
        return torch.tensor([pages[token // self.page - first] * self.page + token % self.page for token in tokens])


def values(layer: int, tokens: range, heads: range, which: int) -> torch.Tensor:
    """What the model has, ``[tokens, heads, DIM]``: each number tells its place."""
    token, head, at = torch.meshgrid(
        torch.tensor(list(tokens)), torch.tensor(list(heads)), torch.arange(DIM), indexing="ij"
    )
    return (((layer * 2 + which) * 100 + token) * 100 + head * 10 + at).float()


def write(world: World, pages: list[int], tokens: range, layer: int = 0) -> None:
    """Write as SGLang does."""
    for pool, held in zip(world.pools, world.held, strict=True):
        heads = range(held.begin, held.end)
        attention = SimpleNamespace(layer_id=layer, k_scale=None, v_scale=None)
        keys, numbers = values(layer, tokens, heads, 0), values(layer, tokens, heads, 1)
        pool.set_kv_buffer(attention, world.slots(pages, tokens), keys, numbers)


def check(world: World, pages: list[int], tokens: range, layer: int = 0) -> None:
    """Compare what SGLang reads with what the model has."""
    for pool, held in zip(world.pools, world.held, strict=True):
        slots, heads = world.slots(pages, tokens), range(held.begin, held.end)
        assert torch.equal(pool.get_key_buffer(layer)[slots], values(layer, tokens, heads, 0))
        assert torch.equal(pool.get_value_buffer(layer)[slots], values(layer, tokens, heads, 1))


THEIRS, MINE = [3, 7, 4, 12, 5], [6, 2, 9, 16, 11]
"""Pages of the request, of 16 tokens. SGLang gives out 1 to 16."""


@pytest.mark.parametrize(("sources", "destinations"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 1)])
def test_heads_move_between_ranks(sources: int, destinations: int) -> None:
    source, destination = World(mha, sources, 16), World(mha, destinations, 16)
    for layer in range(LAYERS):
        write(source, THEIRS, range(TOKENS), layer)
    blocks = {"full": Blocks(THEIRS, 0, TOKENS)}, {"full": Blocks(MINE)}
    vllm_caches.move(source.geometry, destination.geometry, *blocks, (0, TOKENS), ReadPath.DIRECT)
    for layer in range(LAYERS):
        check(destination, MINE, range(TOKENS), layer)


@pytest.mark.parametrize("path", list(ReadPath))
def test_pages_of_other_sizes_are_cut(path: ReadPath) -> None:
    source, destination = World(mha, 2, 16), World(mha, 1, 8)
    write(source, THEIRS, range(TOKENS))
    mine = [3, 1, 8, 4, 20, 7, 9, 12, 2, 14]
    blocks = {"full": Blocks(THEIRS, 0, TOKENS)}, {"full": Blocks(mine)}
    vllm_caches.move(source.geometry, destination.geometry, *blocks, (0, TOKENS), path)
    check(destination, mine, range(TOKENS))


def test_latents_move_to_every_rank() -> None:
    source, destination = World(mla, 1, 16), World(mla, 2, 16)
    (pool,) = source.pools
    wanted = torch.arange(TOKENS * (LATENT + ROPE)).float().reshape(TOKENS, 1, LATENT + ROPE)
    for layer in range(LAYERS):
        pool.kv_buffer[layer][source.slots(THEIRS, range(TOKENS))] = wanted + layer
    blocks = {"full": Blocks(THEIRS, 0, TOKENS)}, {"full": Blocks(MINE)}
    vllm_caches.move(source.geometry, destination.geometry, *blocks, (0, TOKENS), ReadPath.DIRECT)
    for rank in destination.pools:
        for layer in range(LAYERS):
            assert torch.equal(rank.kv_buffer[layer][destination.slots(MINE, range(TOKENS))], wanted + layer)


def test_windows_have_pages_of_their_own() -> None:
    """Full attention is layer 0, the window layer 1; of the window, pages from its first token on are there."""
    source, destination = World(swa, 2, 16), World(swa, 1, 16)
    kept = range(32, TOKENS)
    theirs, mine = [2, 5, 4], [1, 6, 3]
    windows = World.__new__(World), World.__new__(World)
    for window, world in zip(windows, (source, destination), strict=True):
        window.page, window.held = world.page, world.held
        window.pools = [pool.swa_kv_pool for pool in world.pools]
        world.pools = [pool.full_kv_pool for pool in world.pools]
    write(source, THEIRS, range(TOKENS))
    write(windows[0], theirs, kept)
    offered = {"full": Blocks(THEIRS, 0, TOKENS), "window-32": Blocks(theirs, 32, TOKENS)}
    wanted = {"full": Blocks(MINE), "window-32": Blocks(mine, 32)}
    vllm_caches.move(source.geometry, destination.geometry, offered, wanted, (0, TOKENS), ReadPath.DIRECT)
    check(destination, MINE, range(TOKENS))
    check(windows[1], mine, kept)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("tp", "page"), [(1, 16), (2, 16), (1, 32)])
def test_vllm_prefills_for_sglang(tp: int, page: int, heads_first: bool) -> None:
    """vLLM's caches as its backends for GPUs have them, of TP 2 and blocks of 32, read by ranks of SGLang."""
    group = Group("full", block_tokens=32, num_blocks=12, null_block=0)
    theirs, ranks = [5, 2, 9], []
    kept = []
    for rank in range(2):
        held, caches = range(rank * 2, rank * 2 + 2), {}
        for layer in range(LAYERS):
            if heads_first:
                cache = torch.zeros(12, len(held), 32, 2 * DIM)
            else:
                cache = torch.zeros(12, 32, len(held), 2 * DIM).transpose(1, 2)
            both = torch.cat([values(layer, range(TOKENS), held, which) for which in (0, 1)], dim=-1)
            for token in range(TOKENS):
                cache[theirs[token // 32], :, token % 32, :] = both[token]
            caches[LAYER_NAMES.format(layer)] = cache
        kept.append(caches)
        ranks.append(RankGeometry(rank, vllm_attention(caches, group, Holding(shard(rank, 2, HEADS), HEADS), DIM)))
    source = EngineGeometry("vllm", (group,), tuple(ranks))
    destination = World(mha, tp, page)
    mine = [6, 2, 7] if page == 32 else MINE
    blocks = {"full": Blocks(theirs, 0, TOKENS)}, {"full": Blocks(mine)}
    vllm_caches.move(source, destination.geometry, *blocks, (0, TOKENS), ReadPath.DIRECT)
    for layer in range(LAYERS):
        check(destination, mine, range(TOKENS), layer)


def test_vllms_latents_are_read_by_sglang() -> None:
    group = Group("full", block_tokens=32, num_blocks=12, null_block=0)
    wanted = torch.arange(TOKENS * (LATENT + ROPE)).float().reshape(TOKENS, 1, LATENT + ROPE)
    theirs, caches = [5, 2, 9], {}
    for layer in range(LAYERS):
        cache = caches[LAYER_NAMES.format(layer)] = torch.zeros(12, 1, 32, LATENT + ROPE)
        for token in range(TOKENS):
            cache[theirs[token // 32], 0, token % 32, :] = wanted[token, 0] + layer
    source = EngineGeometry("vllm", (group,), (RankGeometry(0, vllm_mla(caches, group, LATENT)),))
    destination = World(mla, 2, 16)
    blocks = {"full": Blocks(theirs, 0, TOKENS)}, {"full": Blocks(MINE)}
    vllm_caches.move(source, destination.geometry, *blocks, (0, TOKENS), ReadPath.DIRECT)
    for rank in destination.pools:
        for layer in range(LAYERS):
            assert torch.equal(rank.kv_buffer[layer][destination.slots(MINE, range(TOKENS))], wanted + layer)


def test_the_pages_of_vllm_on_cpu_are_refused_by_name() -> None:
    """vLLM's CPU kernel keeps K column-major inside a page, which cannot be divided."""
    group = Group("full", block_tokens=16, num_blocks=12, null_block=0)
    cache = torch.zeros(12, HEADS, 16, 2 * DIM)
    planes = vllm_cpu({LAYER_NAMES.format(layer): cache for layer in range(LAYERS)}, group, "vec", Holding())
    source = EngineGeometry("vllm", (group,), (RankGeometry(0, planes),))
    with pytest.raises(KvferryError, match="vllm-cpu-column-major") as refused:
        plan_read(source, World(mha, 1, 16).geometry, 0)
    assert "plain" in str(refused.value)


def test_pools_that_are_not_known_are_refused_by_name() -> None:
    class MHATokenToKVPoolOfTomorrow(MHATokenToKVPool):  # type: ignore[misc]
        pass

    pool = MHATokenToKVPoolOfTomorrow(SLOTS, 16, torch.float32, HEADS, DIM, LAYERS, "cpu", False)
    with pytest.raises(InvalidField, match="MHATokenToKVPoolOfTomorrow"):
        describe_pools(pool, shard(0, 1, HEADS), HEADS, 0, LAYER_NAMES)


def test_heads_that_do_not_fit_the_tensor_parallel_size_are_refused() -> None:
    with pytest.raises(InvalidField, match="KV heads of the rank"):
        describe_pools(mha(3, 16), shard(0, 1, HEADS), HEADS, 0, LAYER_NAMES)
