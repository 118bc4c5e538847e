"""The reader behind `kvferry fetch`: whatever the source's geometry, its tensors are the model's, tokens first."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import HealthCheck, assume, given, settings

from kvferry._cli.whole_cache import ELEMENT_BYTES, WholeCache
from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind, RankGeometry
from kvferry.planner import diff, plan_read
from tests.support.drawn_worlds import World, worlds
from tests.support.examples import SAME, examples
from tests.support.simulated_memories import JUNK, POISON, Bytes, Memory, execute, source_memories, wanted

BASE = 1 << 40
"""Address of the reader's memory: above all ranks of the source."""


@settings(
    max_examples=examples(100),
    derandomize=SAME,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(world=worlds())
def test_whole_cache_reads_any_engine_as_the_model_has_it(world: World) -> None:
    source, memories, model = source_memories(world.source, world.source_blocks, world.length)
    cache = WholeCache(source, world.length)
    rank = RankGeometry(0, tuple(cache.planes(BASE)))
    reader = EngineGeometry("reader", cache.groups, (rank,), source.identity, partial=True)
    # Tokens that cannot be cut apart cannot be read from ranks that split them.
    assume(not diff(source, reader))
    first = min(
        (mine.first_token for name, mine in world.destination_blocks.items() if not _is_state(source.group(name))),
        default=0,
    )
    memory = Memory.filled(BASE, cache.size, POISON)
    mine = cache.blocks(world.source_blocks, first)
    execute(plan_read(source, reader, 0).expand(world.source_blocks, mine, None), memories, memory)
    found = {tensor.plane.name: tensor for tensor in cache.tensors(world.source_blocks, first, BASE)}
    assert set(found) == {name for name in model if len(_expected(world, source, model, name, first))}
    for name, tensor in found.items():
        expected = _expected(world, source, model, name, first)
        assert memory.at(tensor.address, tensor.size).tobytes() == expected.tobytes(), name
        assert tensor.shape[:-1] == expected.shape[: len(tensor.shape) - 1], name
        assert prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype] == tensor.size


def test_whole_cache_has_no_blocks_for_tokens_that_it_has_no_room_for() -> None:
    """A home may say that the blocks of an answer hold any number of tokens."""
    source = EngineGeometry("source", (Group("full", block_tokens=16, num_blocks=8),), ())
    blocks = WholeCache(source, 40).blocks({"full": Blocks([1], end_token=(1 << 40) - 1)}, 20)
    assert (blocks["full"].ids.tolist(), blocks["full"].end_token) == ([1, 2], (1 << 40) - 1)


def _is_state(group: Group) -> bool:
    return group.kind is GroupKind.STATE


def _expected(world: World, source: EngineGeometry, model: dict[str, Bytes], name: str, first: int) -> Bytes:
    """The model's tensor, ``[states, units, bytes]``, of the tokens that are wanted; pieces of several states are
    ``[pieces, units, states, bytes]``, or as the format has them."""
    plane = next(plane for _, plane in source.planes() if plane.name == name)
    values, granule = model[name], plane.token_granule
    group = source.group(plane.group)
    begin, end = 0, values.shape[1]
    if not _is_state(group):
        size = group.block_tokens
        mine = Blocks(range(first // size, -(-world.length // size)), first, max(first, world.length))
        # The reader has no null block.
        own = Group("own", group.kind, size, 1 << 20, window_tokens=group.window_tokens)
        ask = wanted(own, world.source_blocks[group.name], mine, group, None)
        assert ask is not None
        begin, end = int(ask.begin // plane.tokens_per_state), -int(-ask.end // plane.tokens_per_state)
        if ask.begin >= ask.end:
            return values[:0]
    pieces = range(begin // granule, -(-end // granule))
    padded = np.full((values.shape[0], pieces.stop * granule, values.shape[2]), JUNK, np.uint8)
    padded[:, : min(values.shape[1], pieces.stop * granule)] = values[:, : pieces.stop * granule]
    cut = padded[:, pieces.start * granule :].reshape(values.shape[0], len(pieces), granule, values.shape[2])
    if granule == 1:
        return cut[:, :, 0].transpose(1, 0, 2)
    tokens_first = not plane.units_divide and plane.unit_stride == plane.state_bytes
    return cut.transpose((1, 2, 0, 3) if tokens_first else (1, 0, 2, 3))
