"""Pairs of geometries that fit a message, are consistent, and ask for as much work or memory as they can."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvferry.v1 import geometry_pb2 as pb

MANY = 9_000
MAX_RANKS = 4096
"""Most ranks in a PlanRead."""

Pair = tuple[pb.EngineGeometry, pb.EngineGeometry]


def group(name: str = "full", tokens: int = 16, blocks: int = 100, kind: int = pb.GROUP_KIND_TOKENS) -> pb.Group:
    window = 1 if kind == pb.GROUP_KIND_WINDOW else 0
    return pb.Group(name=name, kind=kind, block_tokens=tokens, num_blocks=blocks, window_tokens=window)  # type: ignore[arg-type]


def plane(
    layer: str = "l",
    *,
    units: tuple[int, int] = (0, 8),
    axis: int = 8,
    states: int = 16,
    blocks: int = 100,
    of: str = "full",
    state_bytes: int = 2,
    base: int = 1 << 20,
    tokens_first: bool = False,
    pages: int = 1,
    shard: tuple[int, int, int] = (0, 1, 1),
    padding: int = 0,
) -> pb.Plane:
    """A plane of these units and states. With `tokens_first` the units of a token are contiguous; with `padding` no two
    cells are."""
    held, page = units[1] - units[0], states // pages
    cell = state_bytes + padding
    unit_stride, token_stride = (cell, held * cell) if tokens_first else (page * cell, cell)
    page_stride = held * page * cell
    return pb.Plane(
        layer=layer,
        component="k",
        group=of,
        format="f",
        memory_kind=pb.MEMORY_KIND_DRAM,
        base=base,
        num_blocks=blocks,
        block_stride=pages * page_stride,
        page_tokens=page,
        page_stride=page_stride if pages > 1 else 0,
        block_states=states,
        unit_stride=unit_stride if held > 1 else 0,
        token_stride=token_stride if page > 1 else 0,
        state_bytes=state_bytes,
        axis_size=axis,
        unit_begin=units[0],
        unit_end=units[1],
        token_shard=pb.TokenShard(index=shard[0], count=shard[1], interleave=shard[2]) if shard[1] > 1 else None,
        token_granule=1,
        units_divide=True,
    )


def engine(groups: Iterable[pb.Group], *ranks: Iterable[pb.Plane]) -> pb.EngineGeometry:
    made = [pb.RankGeometry(rank=index, planes=planes) for index, planes in enumerate(ranks)]
    return pb.EngineGeometry(engine_id="hostile", groups=groups, ranks=made)


def one(made: pb.Plane, tokens: int = 16, blocks: int = 100) -> pb.EngineGeometry:
    return engine([group(tokens=tokens, blocks=blocks)], [made])


def _endless_axis() -> Pair:
    return one(plane(units=(0, 1 << 40), axis=1 << 40)), one(plane(units=(0, 1 << 40), axis=1 << 40))


def _one_unit_of_an_endless_axis() -> Pair:
    return one(plane(units=(0, 1 << 40), axis=1 << 40)), one(plane(units=(5, 6), axis=1 << 40))


def _axis_beyond_64_bits() -> Pair:
    whole = plane(units=(0, 1), axis=1, states=1)
    whole.unit_end, whole.axis_size = 2**64 - 1, 2**64 - 1
    return one(whole, tokens=1), one(whole, tokens=1)


def _axis_at_the_limit() -> Pair:
    whole = plane(units=(0, 2**62), axis=2**63 - 1, state_bytes=1, states=1, blocks=1)
    return one(whole, tokens=1, blocks=1), one(whole, tokens=1, blocks=1)


def _many_planes() -> Pair:
    made = [plane(f"{n}", tokens_first=True, base=n << 20) for n in range(MANY // 2)]
    return engine([group()], made), engine([group()], [plane(f"{n}", base=n << 20) for n in range(MANY // 2)])


def _many_scattered_cells() -> Pair:
    sizes = {"units": (0, 256), "axis": 256, "states": 4096, "padding": 1}
    made = [plane(f"{n}", base=n << 40, **sizes) for n in range(1, 1000)]  # type: ignore[arg-type]
    return engine([group(tokens=4096)], made), engine([group(tokens=4096)], made)


def _many_replicas() -> Pair:
    ranks = [[plane(base=n << 20)] for n in range(MAX_RANKS)]
    return engine([group()], *ranks), one(plane())


def _many_readers() -> Pair:
    ranks = [[plane(base=n << 20)] for n in range(MAX_RANKS)]
    return one(plane()), engine([group()], *ranks)


def _ranks_that_hold_a_unit_each() -> Pair:
    ranks = [[plane(units=(n, n + 1), axis=MANY)] for n in range(MANY)]
    return engine([group()], *ranks), one(plane(units=(0, MANY), axis=MANY))


def _ranks_that_hold_ever_more() -> Pair:
    ranks = [[plane(units=(0, n + 1), axis=5_000)] for n in range(5_000)]
    return engine([group()], *ranks), engine([group()], *reversed(ranks))


def _blocks_of_one_into_blocks_of_many() -> Pair:
    many = 1 << 20
    return one(plane(states=1, units=(0, 1), axis=1, blocks=1000), 1, 1000), one(
        plane(states=many, units=(0, 1), axis=1), many
    )


def _blocks_of_many_into_blocks_of_one() -> Pair:
    return tuple(reversed(_blocks_of_one_into_blocks_of_many()))  # type: ignore[return-value]


def _scattered_blocks_of_many() -> Pair:
    many = 1 << 20
    given = {"units": (0, 1), "axis": 1, "padding": 3}
    source = plane(states=1, blocks=1000, **given)  # type: ignore[arg-type]
    return one(source, 1, 1000), one(plane(states=many, **given), many)  # type: ignore[arg-type]


def _block_sizes_without_common_divisor() -> Pair:
    sizes = (1 << 20) - 1, (1 << 20) - 3
    return one(plane(states=sizes[0], units=(0, 1), axis=1), sizes[0]), one(
        plane(states=sizes[1], units=(0, 1), axis=1, padding=1), sizes[1]
    )


def _endless_token_shards() -> Pair:
    count = 1 << 18
    source = [[plane(shard=(0, count // n, n), states=1 * n, units=(0, 1), axis=1)] for n in (1, 2, 4, 8, 16)]
    destination = plane(shard=(0, count, 1), states=1, units=(0, 1), axis=1)
    return engine([group(tokens=count)], *source), engine([group(tokens=count)], [destination])


def _token_shards_that_hardly_meet() -> Pair:
    tokens = 720720
    counts = [n for n in range(2, 2000) if tokens % n == 0]
    ranks = [[plane(shard=(1, tokens // n, 1), states=n, units=(0, 1), axis=1)] for n in counts]
    wanted = [[plane(shard=(0, tokens // n, 1), states=n, units=(0, 1), axis=1)] for n in counts]
    return engine([group(tokens=tokens)], *ranks), engine([group(tokens=tokens)], *wanted)


def _endless_blocks() -> Pair:
    most = 2**31 - 1
    # Too long for staging memory, so that they are read directly.
    sizes = {"units": (0, 64), "axis": 64, "blocks": most, "state_bytes": 1, "padding": 1 << 17}
    made = [plane(f"{n}", base=1 << 20, **sizes) for n in range(30)]  # type: ignore[arg-type]
    return engine([group(blocks=most)], made), engine([group(blocks=most)], made)


def _a_group_for_each_plane() -> Pair:
    names = [f"group {n}" for n in range(MANY)]
    sides = (
        engine([group(name) for name in names], [plane(name, of=name, base=n << 20) for n, name in enumerate(names)]),
        engine(
            [group(name) for name in names],
            [plane(name, of=name, base=n << 20, tokens_first=True) for n, name in enumerate(names)],
        ),
    )
    return sides


def _a_page_for_each_token() -> Pair:
    many = 1 << 18
    made = plane(states=many, pages=many, units=(0, 4), axis=4)
    return one(made, many), one(plane(states=many, units=(0, 4), axis=4, tokens_first=True), many)


def _addresses_at_the_limit() -> Pair:
    last = plane(base=2**63 - 30_000)
    return one(last), one(last)


def _states_of_strange_many_tokens() -> Pair:
    made = plane(states=2**20, units=(0, 1), axis=1)
    made.tokens_per_state_num, made.tokens_per_state_den = 2**20, 2**20 - 1
    return one(made, 2**20), one(made, 2**20)


def _strides_that_alias() -> Pair:
    made = plane()
    made.unit_stride = made.token_stride
    return one(made), one(made)


CASES: dict[str, Callable[[], Pair]] = {
    make.__name__.strip("_").replace("_", " "): make
    for make in (
        _endless_axis,
        _one_unit_of_an_endless_axis,
        _axis_beyond_64_bits,
        _axis_at_the_limit,
        _many_planes,
        _many_scattered_cells,
        _many_replicas,
        _many_readers,
        _ranks_that_hold_a_unit_each,
        _ranks_that_hold_ever_more,
        _blocks_of_one_into_blocks_of_many,
        _blocks_of_many_into_blocks_of_one,
        _scattered_blocks_of_many,
        _block_sizes_without_common_divisor,
        _endless_token_shards,
        _token_shards_that_hardly_meet,
        _endless_blocks,
        _a_group_for_each_plane,
        _a_page_for_each_token,
        _addresses_at_the_limit,
        _states_of_strange_many_tokens,
        _strides_that_alias,
    )
}
