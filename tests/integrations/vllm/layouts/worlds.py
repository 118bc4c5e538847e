"""Engines with caches as vLLM allocates them, filled by vLLM's own write code, and reads between them.

Every rank has one buffer with its layers. vLLM's `create_kv_cache_views` makes the tensors, its kernels write a request
into them, `layer_planes` declares them, and a plan moves one engine's bytes into another's poisoned buffers. There they
must be what the destination's own kernels would have written, and nothing else may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry import Blocks, EngineGeometry, Group, GroupKind, Interval, RankGeometry
from kvferry.geometry.tensors import Holding
from kvferry.integrations.vllm.layouts.attention import layer_planes
from kvferry.integrations.vllm.shards import Layer
from kvferry.planner import Path
from tests.integrations.vllm.layouts.moving import move

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
LAYOUTS = tuple(layout.name for layout in KVCacheLayout)
POISON = 0xA5
TOKENS = 53
"""Ends inside a block of any size that is used here."""

Write = Callable[["Rank", str, torch.Tensor], None]
"""Writes a request into one layer of a rank: the rank, the layer's name, the slots of its tokens."""


@dataclass(frozen=True)
class Shape:
    """How an engine is built.

    Attributes:
        ranks: its TP size.
        block: tokens per block.
        layout: name of vLLM's layout.
        kernel_block: tokens per block of the kernel; 0: the same.
        padding: bytes added to each page.
    """

    ranks: int = 1
    block: int = 16
    layout: str = "LBHNC"
    kernel_block: int = 0
    padding: int = 0

    def __str__(self) -> str:
        kernel = f"/{self.kernel_block}" if self.kernel_block else ""
        padding = f"+{self.padding}" if self.padding else ""
        return f"tp{self.ranks} {self.block}{kernel}{padding} {self.layout}"


@dataclass(frozen=True)
class Model:
    """What is the same on both sides.

    Attributes:
        backend: module and class of vLLM's attention backend.
        heads: KV heads of the whole model; 0: one latent for all.
        spec: makes vLLM's spec of a layer from the block size and the heads of a rank.
        write: vLLM's code that writes into a layer.
        module: makes what vLLM has as the layer's module, from the heads of a rank.
        config: of the engine, beside what every engine has.
        tokens: tokens of the request.
        layers: names of its layers.
    """

    backend: str
    heads: int
    spec: Callable[[int, int], Any]
    write: Write
    module: Callable[[int], Any] = lambda heads: SimpleNamespace()
    config: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = TOKENS
    layers: tuple[str, ...] = LAYERS


class Rank:
    """One rank: its buffer, the tensors in it, and its planes."""

    def __init__(self, model: Model, shape: Shape, index: int, num_blocks: int) -> None:
        self.model, self.index = model, index
        self.held = share(model.heads, shape.ranks, index) if model.heads else Interval(0, 1)
        spec = model.spec(shape.block, len(self.held))
        if shape.padding:
            object.__setattr__(spec, "page_size_padded", spec.unpadded_page_size_bytes + shape.padding)
        self.spec = spec
        layout = KVCacheLayout[shape.layout]
        # As `get_kv_cache_config_from_groups` in vllm/v1/core/kv_cache_utils.py plans it.
        layers = model.layers
        block_stride = len(layers) * spec.page_size_bytes if layout.is_block_outermost else None
        strides = compute_layout_strides(
            spec, num_blocks, len(layers), layout, fixed_strides=(None, block_stride, None, None, None)
        )
        size = len(layers) * num_blocks * spec.page_size_bytes
        self.buffer = torch.zeros(size, dtype=torch.int8)
        placed = KVCacheTensor(size=size, layers=list(layers), layer_stride=strides[0], block_stride=strides[1])
        kernel_block = shape.kernel_block or None
        views = create_kv_cache_views(self.buffer, spec, num_blocks, layout, placed, kernel_block)
        self.caches = dict(zip(layers, views, strict=True))
        self.modules = {layer: model.module(len(self.held)) for layer in layers}

    @property
    def heads(self) -> slice:
        """The rank's heads of a tensor of all."""
        return slice(self.held.begin, self.held.end)

    def planes(self, group: Group) -> RankGeometry:
        """Declare the rank's caches."""
        compilation = SimpleNamespace(static_forward_context=self.modules)
        config = {"cache_config": SimpleNamespace(cache_dtype="auto"), **self.model.config}
        vllm_config = SimpleNamespace(compilation_config=compilation, **config)
        # As `shards.holding` says.
        heads = Holding(tokens_per_state=Fraction(self.spec.tokens_per_state))
        if self.model.heads:
            heads = replace(heads, units=self.held, axis_size=self.model.heads)
        found = [
            plane
            for layer, cache in self.caches.items()
            for plane in layer_planes(Layer(layer, cache, self.spec, group, heads, vllm_config, self.model.backend))
        ]
        return RankGeometry(self.index, tuple(found))


class World:
    """An engine of one group, and a request that its kernels have written."""

    def __init__(self, name: str, model: Model, shape: Shape) -> None:
        self.model, self.shape = model, shape
        needed = -(-model.tokens // shape.block)
        num_blocks = needed + 3
        random = np.random.default_rng([len(name), *str(shape).encode()])
        # Block 0 is vLLM's null block.
        self.ids: list[int] = (1 + random.permutation(num_blocks - 1)[:needed]).tolist()
        self.group = Group("full", GroupKind.TOKENS, shape.block, num_blocks, 0)
        self.ranks = [Rank(model, shape, index, num_blocks) for index in range(shape.ranks)]
        self.geometry = EngineGeometry(name, (self.group,), tuple(rank.planes(self.group) for rank in self.ranks))
        self.written = [self._write(rank, 0) for rank in self.ranks]

    @cached_property
    def touched(self) -> list[torch.Tensor]:
        """Which bytes of each rank's buffer the kernels write: those that do not keep what was there before."""
        return [self._write(rank, -1) == content for rank, content in zip(self.ranks, self.written, strict=True)]

    def _write(self, rank: Rank, before: int) -> torch.Tensor:
        """A rank's buffer after its kernels wrote the request into it, all bytes being `before`."""
        rank.buffer.fill_(before)
        for layer in rank.model.layers:
            rank.model.write(rank, layer, self.slots(rank))
        return rank.buffer.clone()

    def slots(self, rank: Rank) -> torch.Tensor:
        """The slots of the request's tokens, in blocks of the kernel."""
        block = self.shape.block
        tokens = range(self.model.tokens)
        return torch.tensor([self.ids[token // block] * block + token % block for token in tokens], dtype=torch.int64)

    def blocks(self, begin: int = 0) -> Blocks:
        """The request's blocks from a token on."""
        return Blocks(self.ids[begin // self.shape.block :], begin)

    def fill(self) -> None:
        """Make every buffer what its kernels wrote."""
        for rank, content in zip(self.ranks, self.written, strict=True):
            rank.buffer.copy_(content)

    def poison(self) -> None:
        """Make every byte of every buffer the same."""
        for rank in self.ranks:
            rank.buffer.view(torch.uint8).fill_(POISON)


def share(axis: int, ranks: int, index: int) -> Interval:
    """vLLM's heads by rank: even shares, or one head each where there are more ranks than heads."""
    begin = index * axis // ranks
    return Interval(begin, begin + max(1, axis // ranks))


def check_read(
    source: World, destination: World, begin: int = 0, path: Path = Path.DIRECT, whole: bool = False
) -> None:
    """Move the request from one engine to the other and compare every byte.

    Args:
        begin: the first token to read, the first of a destination's block.
        whole: pages move whole: in a block that the request does not fill, bytes past its end are not compared.
    """
    touched = destination.touched
    source.fill()
    destination.poison()
    tokens = source.model.tokens
    mine, theirs = destination.blocks(begin), source.blocks()
    move(source.geometry, destination.geometry, theirs, mine, (begin, tokens), path)
    block, ids = destination.shape.block, destination.ids
    outside = [slot for slot in range(destination.group.num_blocks) if slot not in ids[begin // block :]]
    ragged = ids[-1:] if whole and tokens % block else []
    for rank_, content, written in zip(destination.ranks, destination.written, touched, strict=True):
        expected = torch.where(written, content, torch.full_like(content, POISON - 256))
        expected[_bytes_of(rank_, outside)] = POISON - 256
        compared = torch.ones_like(written)
        compared[_bytes_of(rank_, ragged)] = written[_bytes_of(rank_, ragged)]
        wrong = (rank_.buffer != expected) & compared
        assert not wrong.any(), f"rank {rank_.index}: {int(wrong.sum())} of {wrong.numel()} bytes are wrong"
        assert written.any()


def _bytes_of(rank: Rank, blocks: Sequence[int]) -> torch.Tensor:
    """Which bytes of a rank's buffer belong to some blocks."""
    marked = rank.buffer.clone()
    rank.buffer.zero_()
    for cache in rank.caches.values():
        pages = cache.shape[0] // _blocks(rank, cache)
        for block in blocks:
            cache[block * pages : (block + 1) * pages].view(torch.int8).fill_(1)
    found = rank.buffer == 1
    rank.buffer.copy_(marked)
    return found


def _blocks(rank: Rank, cache: torch.Tensor) -> int:
    states: int = rank.spec.num_states
    return int(cache.shape[0]) * int(cache.shape[2]) // states
