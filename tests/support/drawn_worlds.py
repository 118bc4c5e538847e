"""Pairs of engines that can be read, and requests: everything issue 3 lists, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from hypothesis import strategies as st

from kvferry.geometry import Blocks, Group, GroupKind, Interval, TokenShard
from tests.support.geometries import ALL_TOKENS, Engine, Held, Layout, Rank, Tensor, shard

Draw = Callable[..., int]


@dataclass(frozen=True)
class World:
    """Two engines, and a request of `length` tokens."""

    source: Engine
    destination: Engine
    source_blocks: dict[str, Blocks]
    destination_blocks: dict[str, Blocks]
    length: int
    tokens: tuple[int, int] | None
    striping: bool
    readers: tuple[int, ...]
    """Destination ranks to check."""


@dataclass(frozen=True)
class Part:
    """One group of a model, with what must hold of any engine's version of it."""

    name: str
    kind: GroupKind
    tensors: tuple[Tensor, ...]
    multiple: int
    """Block sizes are multiples of this many tokens per token shard."""
    window: int = 0
    order: str = ""
    """Order of the axes where the format fixes it."""


def _tensor_group(name: str, layers: int, kinds: list[tuple[str, int, int]], **fields: object) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(f"{name}.{layer}", component, name, axis, size, **fields)  # type: ignore[arg-type]
        for layer in range(layers)
        for component, axis, size in kinds
    )


@st.composite
def parts(draw: st.DrawFn, name: str) -> Part:
    """One group: attention, MLA, indexer, window, compressed, opaque pages, state."""
    what = draw(
        st.sampled_from(["gqa", "gqa", "fp8", "mla", "indexer", "window", "compressed", "granule", "opaque", "state"])
    )
    layers = draw(st.integers(1, 3))
    heads = draw(st.integers(1, 8))
    size = draw(st.sampled_from([1, 3, 4]))
    if what == "state":
        tensors = tuple(
            Tensor(f"{name}.{layer}", component, name, axis, width, state_rows=rows)
            for layer in range(layers)
            for component, axis, width, rows in (("conv_x", heads * 2, 2, 3), ("conv_b", 2, 2, 3), ("ssm", heads, 7, 1))
        )
        return Part(name, GroupKind.STATE, tensors, 1)
    if what == "window":
        granule = draw(st.sampled_from([1, 1, 2, 4]))
        made = _tensor_group(name, layers, [("key", heads, size), ("value", heads, size)], granule=granule)
        return Part(name, GroupKind.WINDOW, made, granule, draw(st.integers(1, 40)))
    if what == "fp8":
        kinds = [("key", heads, size), ("value", heads, size), ("key_scale", heads, 1), ("value_scale", 1, 2)]
        return Part(name, GroupKind.TOKENS, _tensor_group(name, layers, kinds), 1)
    if what == "mla":
        return Part(name, GroupKind.TOKENS, _tensor_group(name, layers, [("latent", 1, 6), ("rope", 1, 2)]), 1)
    if what == "indexer":
        latent = _tensor_group(name, layers, [("latent", 1, 5)])
        index = tuple(
            Tensor(f"{name}.{layer}", "index", name, 1, 3, granule=2, tokens_per_state=Fraction(2))
            for layer in range(layers)
        )
        return Part(name, GroupKind.TOKENS, latent + index, 4)
    if what == "compressed":
        per_state = draw(st.sampled_from([Fraction(4), Fraction(2), Fraction(3, 2), Fraction(1, 2)]))
        kinds = [("key", heads, size)]
        made = _tensor_group(name, layers, kinds, tokens_per_state=per_state)
        return Part(name, GroupKind.TOKENS, made, per_state.numerator)
    granule = draw(st.sampled_from([2, 4]))
    divide = what == "granule"
    kinds = [("key", heads, size), ("value", heads, size)] if divide else [("kv", heads, size)]
    made = _tensor_group(name, layers, kinds, granule=granule, divide=divide)
    return Part(
        name, GroupKind.TOKENS, made, granule, order="BPUT" if divide else draw(st.sampled_from(["BPUT", "BPTU"]))
    )


@st.composite
def layouts(draw: st.DrawFn, part: Part) -> Layout:
    """Any order, nesting and padding that the tensors' granules allow."""
    if not all(tensor.divide for tensor in part.tensors):
        # Heads first, an undivided page is one granule; tokens first, it may be several.
        pages = 0 if part.order == "BPUT" else 1
        return Layout(part.order, draw(st.sampled_from([0, 1])), pages=pages, pad={"B": draw(st.sampled_from([0, 5]))})
    uncut = any(tensor.granule > 1 for tensor in part.tensors)
    return Layout(
        draw(
            st.sampled_from(["BPUT", "BPTU", "BPUT", "PBUT", "UBPT", "BUPT", "TUPB"] if not uncut else ["BPUT", "UPBT"])
        ),
        draw(st.sampled_from([0, 1, 2, 4] if not uncut else [0, 1, 2])),
        cross_layer=draw(st.booleans()),
        pages=draw(st.sampled_from([1, 1, 2, 3])),
        pad={axis: draw(st.sampled_from([0, 0, 0, 5])) for axis in ("BPUT" if not uncut else "BPU")},
    )


@st.composite
def unit_shards(draw: st.DrawFn, axis: int, size: int) -> list[Interval]:
    """Units of each of `size` ranks; together they hold the whole axis."""
    how = draw(st.sampled_from(["even", "even", "whole", "any"]))
    if how == "whole":
        return [Interval(0, axis)] * size
    if how == "even":
        return [shard(rank, size, axis) for rank in range(size)]
    cuts = sorted(draw(st.sets(st.integers(1, axis), max_size=size - 1)) - {axis}) if size > 1 else []
    edges = [0, *cuts, axis]
    found = [Interval(a, b) for a, b in pairwise(edges)]
    while len(found) < size:
        begin = draw(st.integers(0, axis - 1))
        found.append(Interval(begin, draw(st.integers(begin + 1, axis))))
    return draw(st.permutations(found))


class Side(NamedTuple):
    """How one engine divides a model."""

    tp: int
    stages: int
    context: int
    interleave: int


@st.composite
def sides(draw: st.DrawFn, striding: int) -> Side:
    """Tensor, pipeline and decode context parallel sizes; `striding` tokens stay together."""
    context = draw(st.sampled_from([1, 1, 1, 2, 3]))
    tp = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16]))
    if context > 1:
        tp = context * max(1, min(tp, 4))
    stages = draw(st.sampled_from([1, 1, 2]))
    return Side(tp, stages, context, draw(st.sampled_from([1, 2, 3])) * striding)


@st.composite
def engines(draw: st.DrawFn, engine_id: str, model: list[Part], side: Side, length: int, fixed: int) -> Engine:
    """An engine that holds the model; `fixed` block tokens for what has to agree on both sides, or 0."""
    groups, layouts_by_group = [], {}
    held: list[list[Held]] = [[] for _ in range(side.tp * side.stages)]
    pooled = draw(st.booleans()) and len(model) > 1
    for part in model:
        sharded = side.context > 1 and part.kind is not GroupKind.STATE
        token_shards = [
            TokenShard(rank % side.context, side.context, side.interleave) if sharded else ALL_TOKENS
            for rank in range(side.tp)
        ]
        block_tokens = 0
        if part.kind is not GroupKind.STATE:
            turn = part.multiple
            if sharded:
                turn = lcm(part.multiple * side.context, side.context * side.interleave)
            block_tokens = turn * draw(st.integers(1, max(1, 24 // turn)))
            if fixed and not all(tensor.divide for tensor in part.tensors):
                block_tokens = lcm(fixed, turn) if part.order == "BPTU" else block_tokens
        needed = 1 if part.kind is GroupKind.STATE else -(-length // block_tokens) + 1
        for layer_index, layer in enumerate(dict.fromkeys(tensor.layer for tensor in part.tensors)):
            stage = layer_index * side.stages // len({tensor.layer for tensor in part.tensors})
            for tensor in [tensor for tensor in part.tensors if tensor.layer == layer]:
                holders = side.tp // (side.context if sharded else 1)
                intervals = draw(unit_shards(tensor.axis, holders))
                if not tensor.divide:
                    intervals = [Interval(0, tensor.axis)] * holders
                for rank in range(side.tp):
                    units = intervals[rank // (side.context if sharded else 1)]
                    held[stage * side.tp + rank].append(Held(tensor, units, token_shards[rank]))
        layouts_by_group[part.name] = draw(layouts(part))
        groups.append(
            Group(
                part.name,
                part.kind,
                block_tokens,
                needed + draw(st.integers(1, 4)),
                window_tokens=part.window,
                pool="shared" if pooled else "",
            )
        )
    most = sum(group.num_blocks for group in groups) if pooled else 0
    groups = [
        Group(
            group.name,
            group.kind,
            group.block_tokens,
            most or group.num_blocks,
            null_block=draw(st.sampled_from([None, 0])),
            window_tokens=group.window_tokens,
            pool=group.pool,
        )
        for group in groups
    ]
    ranks = tuple(
        Rank(tuple(of), {"tp_rank": index % side.tp, "pp_rank": index // side.tp})
        for index, of in enumerate(held)
        if of
    )
    return Engine(engine_id, tuple(groups), ranks, layouts_by_group)


@st.composite
def ids_of(draw: st.DrawFn, engine: Engine, counts: dict[str, int]) -> dict[str, list[int]]:
    """Block ids: consecutive, scattered, or mixed; never the null block, unique in each pool."""
    free: dict[str, list[int]] = {}
    found = {}
    for group in engine.groups:
        pool = free.setdefault(group.pool or group.name, list(range(group.num_blocks)))
        usable = [block for block in pool if block != group.null_block]
        if draw(st.booleans()):
            usable = draw(st.permutations(usable))
        chosen = usable[: counts[group.name]]
        assert len(chosen) == counts[group.name]
        found[group.name] = chosen
        free[group.pool or group.name] = [block for block in pool if block not in chosen]
    return found


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A pair of engines and a request that the planner must manage."""
    model = [draw(parts(f"g{index}")) for index in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
    striding = lcm(*(part.multiple for part in model))
    opaque = any(not tensor.divide for part in model for tensor in part.tensors)
    if opaque or draw(st.booleans()):
        # The same token shards on both sides: turns may be finer than what stays together, but not than a state.
        torn = lcm(*(tensor.tokens_per_state.numerator for part in model for tensor in part.tensors))
        source_side = draw(sides(torn))
        other = draw(sides(torn))
        tp = other.tp * source_side.context if source_side.context > 1 else other.tp
        destination_side = Side(
            min(tp, 12 // source_side.context * source_side.context), other.stages, *source_side[2:]
        )
    else:
        source_side, destination_side = draw(sides(striding)), draw(sides(striding))
    fixed = striding * draw(st.integers(1, 3))
    length = draw(st.integers(1, 90))
    source = draw(engines("source", model, source_side, length, fixed))
    destination = draw(engines("destination", model, destination_side, length, fixed))
    # A prefix may end anywhere that no granule or state is torn apart.
    turns = [side.context * side.interleave for side in (source_side, destination_side) if side.context > 1]
    step = 1
    for part in model:
        for tensor in part.tensors:
            if tensor.granule > 1:
                step = lcm(step, (tensor.granule * tensor.tokens_per_state).numerator)
                step *= lcm(*turns)
            step = lcm(step, tensor.tokens_per_state.numerator)
    prefix = draw(st.sampled_from([0, draw(st.integers(0, length)) // step * step]))
    how = draw(st.sampled_from(["granted", "asked", "part"]))
    tokens: tuple[int, int] | None = None
    end = length
    if how == "asked":
        tokens = (0, length)
    elif how == "part":
        begin = draw(st.integers(0, length)) // step * step
        end = draw(st.integers(begin, length))
        tokens = (begin, end)
    source_blocks, source_counts, source_first = {}, {}, {}
    destination_blocks, counts, first = {}, {}, {}
    for theirs, mine in zip(source.groups, destination.groups, strict=True):
        name = theirs.name
        if theirs.kind is GroupKind.STATE:
            source_counts[name] = counts[name] = 1
            source_first[name] = first[name] = 0
            continue
        source_first[name] = 0
        if theirs.kind is GroupKind.WINDOW:
            # Only the last blocks are left.
            source_first[name] = max(0, end - theirs.window_tokens + 1) // theirs.block_tokens * theirs.block_tokens
        source_counts[name] = -(-length // theirs.block_tokens) - source_first[name] // theirs.block_tokens
        first[name] = prefix
        counts[name] = max(0, -(-length // mine.block_tokens) - prefix // mine.block_tokens)
    state_token = length
    for name, ids in draw(ids_of(source, source_counts)).items():
        source_blocks[name] = Blocks(ids, source_first[name], max(source_first[name], length), state_token)
    for name, ids in draw(ids_of(destination, counts)).items():
        destination_blocks[name] = Blocks(ids, first[name], draw(st.sampled_from([None, length])), state_token)
    everyone = list(range(len(destination.ranks)))
    readers = tuple(sorted(draw(st.sets(st.sampled_from(everyone), min_size=1, max_size=2))))
    return World(source, destination, source_blocks, destination_blocks, length, tokens, draw(st.booleans()), readers)
