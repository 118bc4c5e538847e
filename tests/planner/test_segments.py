"""The states that a lane moves, against the definition of stripes, granules and token shards, one state at a time."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import lcm
from random import Random

import numpy as np
import pytest

from kvferry.errors import InvalidField
from kvferry.geometry import (
    Blocks,
    EngineGeometry,
    Group,
    GroupKind,
    Interval,
    MemoryKind,
    Plane,
    RankGeometry,
    TokenShard,
)
from kvferry.planner import Path, PathRule, plan_read
from kvferry.planner.descriptors import MemoryPair
from kvferry.planner.lane import Lane, segments, span
from kvferry.planner.line_rule import Stripe
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.token_line import StateLayout
from tests.support.simulated_memories import copies

DRAM = MemoryPair((MemoryKind.DRAM, 0), (MemoryKind.DRAM, 0))
FULL = Group("full", block_tokens=1, num_blocks=4096)
STATE = Group("state", GroupKind.STATE, num_blocks=64)
STRIPES = (Stripe(), Stripe(0, 1, 2), Stripe(1, 2, 2), Stripe(1, 3, 4), Stripe(2, 3, 3))


def drawn(turns: Random) -> tuple[Lane, GroupRequest]:
    """A lane, and a request of any length from any token on."""
    granule, count = turns.choice((1, 1, 2, 4)), turns.choice(((1, 1), (2, 1), (2, 2), (3, 1)))
    shards = []
    same = turns.random() < 0.5
    for side in range(2):
        ranks = count[0] if same or side == 0 else turns.choice((1, 2, 3))
        interleave = count[1] if same or side == 0 else turns.choice((1, 2))
        if not same:
            interleave *= granule
        shards.append(TokenShard(turns.randrange(ranks), ranks, interleave))
    if same:
        shards[1] = shards[0]
    layouts = []
    for shard in shards:
        step = lcm(granule * shard.count, shard.count * shard.interleave)
        layouts.append(StateLayout(step * turns.randint(1, 3), shard, 4096, FULL.num_blocks))
    per_state = turns.choice((Fraction(1), Fraction(2), Fraction(1, 2), Fraction(3, 2)))
    lane = Lane(0, FULL, turns.choice((Stripe(), *STRIPES)), DRAM, layouts[0], layouts[1], granule, per_state, ())
    states = turns.choice((8, 30, 200))
    begin = turns.randint(0, int(states * per_state))
    end = turns.randint(begin + 1, begin + 1 + int(states * per_state))
    floor = turns.choice((begin, begin, max(0, begin - turns.randint(0, 20)), 0))
    blocks = []
    for layout in layouts:
        tokens = layout.block_states * per_state
        first, last = int(begin // tokens), -int(-end // tokens)
        blocks.append(NeededBlocks(np.array(turns.sample(range(4096), last - first), np.int64), first))
    return lane, GroupRequest(begin, end, begin, floor, *blocks)


def moves(lane: Lane, needed: GroupRequest) -> set[tuple[int, int, int, int]] | None:
    """For each state, its block and its index among the states held there, on both sides; None: no cut is possible."""
    per_state, granule = lane.tokens_per_state, lane.granule
    begin, end = int(needed.begin // per_state), -int(-needed.end // per_state)
    if begin * per_state < needed.floor:
        return None
    both = lcm(lane.source.block_states, lane.destination.block_states)
    parts = range(begin // both, -(-end // both))
    chosen = parts[len(parts) * lane.stripe.begin // lane.stripe.of : len(parts) * lane.stripe.end // lane.stripe.of]
    wanted = [state for state in range(begin, end) if state // both in chosen]
    if not wanted:
        return set()
    held = [list(holding(layout, wanted[-1] + 200)) for layout in (lane.source, lane.destination)]
    if lane.source.shard == lane.destination.shard:
        # Whole granules of what is held.
        places = {held[0].index(state) // granule for state in wanted if state in held[0]}
        taken = [held[0][place * granule + at] for place in places for at in range(granule)]
    else:
        taken = [granule * place + at for place in {state // granule for state in wanted} for at in range(granule)]
    if taken and min(taken) < wanted[0] and min(taken) * per_state < needed.floor:
        return None
    return {
        (
            *placed(lane.source, needed.source, held[0], state),
            *placed(lane.destination, needed.destination, held[1], state),
        )
        for state in taken
        if state in held[0] and state in held[1]
    }


def holding(layout: StateLayout, last: int) -> list[int]:
    shard = layout.shard
    return [state for state in range(last) if state // shard.interleave % shard.count == shard.index]


def placed(layout: StateLayout, blocks: NeededBlocks, held: list[int], state: int) -> tuple[int, int]:
    block, at = divmod(held.index(state), layout.held_per_block)
    return int(blocks.ids[block - blocks.first]), at


@pytest.mark.parametrize("seed", range(5))
def test_a_lane_moves_its_stripe_in_whole_granules_and_nothing_below_the_floor(seed: int) -> None:
    turns = Random(seed)
    seen = {"torn": 0, "none": 0, "short": 0, "long": 0}
    for _ in range(200):
        lane, needed = drawn(turns)
        due = moves(lane, needed)
        if due is None:
            seen["torn"] += 1
            with pytest.raises(InvalidField, match="group 'full' cannot be cut finer"):
                segments(lane, needed)
            continue
        found = segments(lane, needed)
        made = [
            (int(source), segment.cut.source + at, int(destination), segment.cut.destination + at)
            for segment in found
            for source, destination in zip(segment.source, segment.destination, strict=True)
            for at in range(segment.cut.count)
        ]
        assert sorted(made) == sorted(due), (lane, needed)
        begin, end = span(lane, needed)
        seen["none" if not due else "long" if end - begin > 2 * lane.line.period else "short"] += 1
        # A request of any length has few cuts: those of a period, and those of its two ends.
        assert len(found) <= 3 * sum(len(alike.source) for alike in lane.line.period_pieces)
    assert all(seen.values())


@pytest.mark.parametrize("seed", range(4))
def test_replicas_move_each_state_once_also_if_a_token_is_not_required(seed: int) -> None:
    turns, left_out = Random(seed), 0
    for _ in range(1500):
        lane, needed = drawn(turns)
        if needed.end - needed.begin < 2:
            continue
        needed = replace(needed, required=needed.begin + 1)
        of = turns.choice((2, 3, 4))
        stripes = [replace(lane, stripe=Stripe(index, index + 1, of)) for index in range(of)]
        try:
            begin, end = span(replace(lane, stripe=Stripe()), needed)
        except InvalidField:
            continue
        parts = [states for begin, end in (span(stripe, needed) for stripe in stripes) for states in range(begin, end)]
        assert sorted(parts) == list(range(begin, end))
        left_out += (begin, end) != span(replace(lane, stripe=Stripe()), replace(needed, floor=0))
    assert left_out


def test_segments_do_not_depend_on_the_distance_along_the_line() -> None:
    """Positions far beyond those of tokens, which stay below 2**40, are exact too."""

    def cuts(lane: Lane, needed: GroupRequest) -> list[tuple[int, int, int, list[int], list[int]]]:
        found = segments(lane, needed)
        return sorted(
            (one.cut.source, one.cut.destination, one.cut.count, one.source.tolist(), one.destination.tolist())
            for one in found
        )

    turns, torn = Random(0), 0
    for _ in range(100):
        lane, near = drawn(turns)
        states = lcm(lane.source.block_states, lane.destination.block_states) << 48
        shift = int(states * lane.tokens_per_state)
        blocks = [
            NeededBlocks(side.ids, side.first + states // layout.block_states)
            for side, layout in ((near.source, lane.source), (near.destination, lane.destination))
        ]
        far = GroupRequest(near.begin + shift, near.end + shift, near.begin + shift, near.floor + shift, *blocks)
        assert far.end < 1 << 62
        try:
            expected = cuts(lane, near)
        except InvalidField:
            torn += 1
            with pytest.raises(InvalidField):
                segments(lane, far)
            continue
        assert cuts(lane, far) == expected
    assert torn


def test_segments_are_as_many_for_a_long_request_as_for_a_short_one() -> None:
    layout = StateLayout(4, TokenShard(), 4096, 4096), StateLayout(6, TokenShard(), 4096, 4096)
    lane = Lane(0, FULL, Stripe(), DRAM, *layout, 1, Fraction(1), ())
    counts = set()
    for tokens in (24, 120, 1200):
        ids = [NeededBlocks(np.arange(tokens // block.block_states, dtype=np.int64), 0) for block in layout]
        counts.add(len(segments(lane, GroupRequest(0, tokens, 0, 0, *ids))))
    assert counts == {len(lane.line.period_pieces)}


@pytest.mark.parametrize(
    "stripe", [Stripe(), Stripe(0, 1, 2), Stripe(1, 2, 2), Stripe(0, 1, 3), Stripe(2, 3, 3)], ids=str
)
def test_the_one_block_of_a_state_falls_to_one_stripe(stripe: Stripe) -> None:
    layout = StateLayout(3, TokenShard(), 4096, 64)
    lane = Lane(0, STATE, stripe, DRAM, layout, layout, 1, Fraction(1), ())
    one = [NeededBlocks(np.array([block], np.int64), 0) for block in (5, 9)]
    found = segments(lane, GroupRequest(0, 1, 0, 0, *one))
    if stripe.end < stripe.of:
        assert found == []
        return
    (segment,) = found
    assert (segment.cut, segment.source.tolist(), segment.destination.tolist()) == (lane.whole_block, [5], [9])


def test_refused_cuts_name_those_that_are_possible() -> None:
    for shard, granule, per_state, floor, multiple in (
        (TokenShard(), 4, Fraction(1), 6, 4),
        (TokenShard(), 1, Fraction(4), 6, 4),
        (TokenShard(), 2, Fraction(4), 12, 8),
        (TokenShard(0, 3, 1), 2, Fraction(1), 3, 6),
    ):
        layout = StateLayout(24, shard, 4096, 4096)
        lane = Lane(0, FULL, Stripe(), DRAM, layout, layout, granule, per_state, ())
        ids = [NeededBlocks(np.arange(8, dtype=np.int64), 0)] * 2
        with pytest.raises(InvalidField) as caught:
            segments(lane, GroupRequest(floor, 24, floor, floor, *ids))
        assert f"a multiple of {multiple} tokens: group 'full' cannot be cut finer" in str(caught.value)
        assert str(floor) in str(caught.value)
        assert caught.value.values["field"] == "first token"


def test_tokens_of_the_only_block_that_lie_apart_are_read_one_by_one() -> None:
    # With one block its stride means nothing, and may equal the stride of tokens without holes.
    (apart, close) = (
        Plane(
            "l",
            "key",
            "full",
            "plain",
            "",
            MemoryKind.DRAM,
            0,
            base=4096,
            num_blocks=1,
            block_stride=32,
            page_tokens=4,
            page_stride=0,
            block_states=4,
            unit_stride=0,
            token_stride=stride,
            state_bytes=8,
            axis_size=1,
            units=Interval(0, 1),
        )
        for stride in (16, 8)
    )
    group = Group("full", block_tokens=4, num_blocks=1)
    engines = {plane: EngineGeometry("e", (group,), (RankGeometry(0, (plane,)),)) for plane in (apart, close)}
    for theirs, mine in ((apart, close), (close, apart), (apart, apart)):
        blocks = {"full": Blocks([0])}
        expansion = plan_read(engines[theirs], engines[mine], 0, rule=PathRule(Path.DIRECT)).expand(blocks, blocks)
        (descriptors,) = expansion.sources[0].descriptors
        steps = [(theirs.token_stride * token, mine.token_stride * token) for token in range(4)]
        assert copies(descriptors) == [(4096 + there, 4096 + here, 8) for there, here in steps]
