"""vLLM's CPU pages, as its own cache-write kernel makes them: the oracle of `formats.vllm_cpu` and `vllm_mla`.

The kernel writes a request's K and V on all ranks of both engines, each its own heads into its own blocks. The source's
pages, moved by the plan, must be the destination's pages, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from kvferry import Blocks, EngineGeometry, Group, Interval, RankGeometry, plan_read
from kvferry.errors import Incompatible
from kvferry.geometry import formats
from kvferry.geometry.tensors import Holding
from kvferry.planner import Path
from tests.integrations.vllm.layouts.moving import move

LAYERS = ("layers.0", "layers.1")
NUM_BLOCKS = 12
POISON = 0xA5


@dataclass(frozen=True)
class Engine:
    """One engine: the heads of its ranks and their caches by layer."""

    heads: Sequence[Interval]
    caches: list[dict[str, torch.Tensor]]
    geometry: EngineGeometry
    blocks: list[int]


def request(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """K and V of every layer, ``[tokens, heads, dim]``."""
    random = torch.Generator().manual_seed(tokens)
    return {
        layer: (
            torch.randn(tokens, heads, dim, generator=random).to(dtype),
            torch.randn(tokens, heads, dim, generator=random).to(dtype),
        )
        for layer in LAYERS
    }


def engine(
    name: str, heads: Sequence[Interval], axis: int, dim: int, block: int, dtype: torch.dtype, blocks: list[int]
) -> Engine:
    """An engine of so many ranks, its caches empty."""
    group = Group("full", block_tokens=block, num_blocks=NUM_BLOCKS)
    caches = [
        {layer: torch.zeros(NUM_BLOCKS, len(held), block, 2 * dim, dtype=dtype) for layer in LAYERS} for held in heads
    ]
    isa = _get_attn_isa(dtype, block, dim)
    ranks = tuple(
        RankGeometry(rank, formats.vllm_cpu(cache, group, isa, Holding(units=held, axis_size=axis)))
        for rank, (held, cache) in enumerate(zip(heads, caches, strict=True))
    )
    return Engine(heads, caches, EngineGeometry(name, (group,), ranks), blocks)


def write(of: Engine, values: dict[str, tuple[torch.Tensor, torch.Tensor]], block: int, dim: int) -> None:
    """What vLLM does with the K and V of a step on every rank."""
    tokens = next(iter(values.values()))[0].shape[0]
    slots = torch.tensor([of.blocks[t // block] * block + t % block for t in range(tokens)], dtype=torch.int64)
    for held, caches in zip(of.heads, of.caches, strict=True):
        for layer, (key, value) in values.items():
            cache = caches[layer]
            pages = cache.view(NUM_BLOCKS, len(held), 2 * block, dim)
            key_cache, value_cache = pages.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                key[:, held.begin : held.end].contiguous(),
                value[:, held.begin : held.end].contiguous(),
                key_cache,
                value_cache,
                slots,
                _get_attn_isa(cache.dtype, block, dim),
            )


def poisoned(caches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """What the kernel wrote, set aside; the caches themselves are filled with poison."""
    wanted = [{layer: cache.clone() for layer, cache in of.items()} for of in caches]
    for of in caches:
        for cache in of.values():
            cache.view(torch.uint8).fill_(POISON)
    return wanted


def shares(axis: int, ranks: int) -> list[Interval]:
    """vLLM's heads by rank: even shares, or one head each where there are more ranks than heads."""
    if ranks > axis:
        return [Interval(rank * axis // ranks, rank * axis // ranks + 1) for rank in range(ranks)]
    return [Interval(rank * axis // ranks, (rank + 1) * axis // ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("axis", "source_tp", "destination_tp"),
    [(4, 1, 1), (4, 2, 1), (4, 1, 2), (6, 3, 2), (6, 2, 3), (2, 4, 1), (2, 1, 4), (1, 2, 1)],
    ids=["1-1", "2-1", "1-2", "3-2", "2-3", "replicas-1", "1-replicas", "one head on two ranks"],
)
@pytest.mark.parametrize(
    ("dtype", "dim", "block"),
    [
        (torch.bfloat16, 64, 32),
        (torch.float32, 64, 32),
        (torch.float16, 128, 64),
        (torch.bfloat16, 80, 32),
    ],
    ids=["bfloat16", "float32", "float16 blocks of 64", "head of 80"],
)
@pytest.mark.parametrize("path", Path)
def test_heads_move_between_ranks_as_the_kernel_wrote_them(
    axis: int, source_tp: int, destination_tp: int, dtype: torch.dtype, dim: int, block: int, path: Path
) -> None:
    tokens = 3 * block + 5
    values = request(tokens, axis, dim, dtype)
    source = engine("p", shares(axis, source_tp), axis, dim, block, dtype, [7, 2, 3, 11])
    destination = engine("d", shares(axis, destination_tp), axis, dim, block, dtype, [1, 9, 4, 0])
    for each in (source, destination):
        write(each, values, block, dim)
    wanted = poisoned(destination.caches)
    move(source.geometry, destination.geometry, Blocks(source.blocks), Blocks(destination.blocks), (0, tokens), path)
    untouched = [block_id for block_id in range(NUM_BLOCKS) if block_id not in destination.blocks]
    for got, want in zip(destination.caches, wanted, strict=True):
        for layer in LAYERS:
            bytes_got = got[layer].view(torch.uint8).view(NUM_BLOCKS, -1, 2, block, dim * dtype.itemsize)
            bytes_want = want[layer].view(torch.uint8).view(NUM_BLOCKS, -1, 2, block, dim * dtype.itemsize)
            assert (bytes_got[untouched] == POISON).all()
            # Whole pages move, also the last one: K's order inside the page is the kernel's own, and V is read with K.
            assert torch.equal(bytes_got[destination.blocks], bytes_want[destination.blocks])


def test_the_kernel_really_permutes_the_keys() -> None:
    """Else nothing above would have been shown."""
    values = request(32, 1, 64, torch.float32)
    only = engine("p", shares(1, 1), 1, 64, 32, torch.float32, [3])
    write(only, values, 32, 64)
    page = only.caches[0][LAYERS[0]][3, 0].reshape(2, 32, 64)
    key, value = values[LAYERS[0]]
    assert not torch.equal(page[0], key[:, 0])
    assert torch.equal(page[0].reshape(64, 32).T, key[:, 0])
    assert torch.equal(page[1], value[:, 0])


def test_different_block_size_is_refused_with_the_reason() -> None:
    source = engine("p", shares(2, 1), 2, 64, 32, torch.float32, [1])
    destination = engine("d", shares(2, 1), 2, 64, 64, torch.float32, [1])
    with pytest.raises(Incompatible, match="cannot be cut to fit"):
        plan_read(source.geometry, destination.geometry, 0)


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize(("theirs", "mine"), [(16, 16), (16, 32), (48, 32)])
def test_latent_caches_move_between_any_block_sizes(theirs: int, mine: int, path: Path) -> None:
    latent, rope, tokens = 512, 64, 3 * 48 - 7
    random = torch.Generator().manual_seed(1)
    content = torch.randn(tokens, latent, generator=random).to(torch.bfloat16)
    positions = torch.randn(tokens, rope, generator=random).to(torch.bfloat16)
    sides = []
    for name, block, seed in (("p", theirs, 1), ("d", mine, 2)):
        ids = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: -(-tokens // block)].tolist()
        cache = torch.zeros(NUM_BLOCKS, block, latent + rope, dtype=torch.bfloat16)
        slots = torch.tensor([ids[t // block] * block + t % block for t in range(tokens)], dtype=torch.int64)
        write_latent = CPUMLAImpl.do_kv_cache_update
        write_latent(None, content, positions[:, None], cache[:, None], slots, "auto", torch.tensor(1.0))
        group = Group("full", block_tokens=block, num_blocks=NUM_BLOCKS)
        planes = formats.vllm_mla({"layers.0": cache}, group, latent)
        sides.append((cache, EngineGeometry(name, (group,), (RankGeometry(0, planes),)), ids))
    (_, source, source_ids), (cache, destination, ids) = sides
    wanted = cache.clone()
    cache.zero_()
    move(source, destination, Blocks(source_ids), Blocks(ids), (0, tokens), path)
    assert torch.equal(cache, wanted)
