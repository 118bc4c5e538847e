"""The tokens that a request moves and writes: `needed` and `written` against sets of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from kvferry.errors import BadBlock, BlocksShort, InvalidField, KvferryError
from kvferry.geometry import Blocks, Group, GroupKind
from kvferry.geometry.blocks import TOKEN_LIMIT
from kvferry.planner.request_blocks import GroupRequest, needed, written

Range = tuple[int, int] | None


class Wrong(Exception):
    """The error that the oracle expects."""

    def __init__(self, kind: type[KvferryError]) -> None:
        self.kind = kind


def outcome(call: Callable[[], Any]) -> Any:
    """A call's result, or the kind of its error."""
    try:
        return call()
    except Wrong as wrong:
        return wrong.kind
    except (BadBlock, BlocksShort, InvalidField) as error:
        return type(error)


def held(group: Group, blocks: Blocks) -> range:
    """The tokens that blocks hold."""
    room = (blocks.first_token // group.block_tokens + len(blocks.ids)) * group.block_tokens
    end = room if blocks.end_token is None else blocks.end_token
    if end > room:
        raise Wrong(BlocksShort)
    return range(blocks.first_token, end)


def block_of(group: Group, blocks: Blocks, token: int) -> int:
    return int(blocks.ids[token // group.block_tokens - blocks.first_token // group.block_tokens])


def ids_of(group: Group, blocks: Blocks, tokens: list[int]) -> list[int]:
    """The blocks of tokens, in their order."""
    found = [
        block_of(group, blocks, min(token for token in tokens if token // group.block_tokens == place))
        for place in sorted({token // group.block_tokens for token in tokens})
    ]
    if group.null_block in found:
        raise Wrong(BadBlock)
    return found


def wanted(group: Group, lowest: int, end: int) -> list[int]:
    """The tokens of ``[lowest, end)`` to which the token at `end` attends, if the window counts that token."""
    return [
        token for token in range(lowest, end) if group.kind is not GroupKind.WINDOW or end - token < group.window_tokens
    ]


def one_more(group: Group, lowest: int, end: int) -> list[int]:
    """The further tokens to which the token at `end` attends, if the window does not count that token."""
    return [end - group.window_tokens] if group.kind is GroupKind.WINDOW and end - group.window_tokens >= lowest else []


def in_range(group: Group, blocks: Blocks) -> None:
    if any(not 0 <= block < group.num_blocks for block in blocks.ids.tolist()):
        raise Wrong(BadBlock)


def lowest_of(mine: Blocks, asked: Range) -> int:
    return mine.first_token if asked is None else max(mine.first_token, asked[0])


def moved(group: Group, offered: range, mine: Blocks, asked: Range, *, theirs: Callable[[int], bool]) -> list[int]:
    """The tokens that are moved; `theirs`: whether the source has a block for an offered token."""
    room = held(group, mine)
    end = asked[1] if asked is not None else offered.stop if mine.end_token is None else mine.end_token
    lowest = lowest_of(mine, asked)
    tokens = wanted(group, lowest, end)
    if any(token not in offered or token not in room for token in tokens):
        raise Wrong(BlocksShort)
    more = [
        token
        for token in one_more(group, lowest, end)
        if token in offered and token in room and block_of(group, mine, token) != group.null_block and theirs(token)
    ]
    return more + tokens


def expected(group: Group, source_group: Group, theirs: Blocks, mine: Blocks, asked: Range) -> Any:
    """`needed`, for one group."""
    in_range(source_group, theirs)
    in_range(group, mine)
    offered = held(source_group, theirs)
    tokens = moved(
        group,
        offered,
        mine,
        asked,
        theirs=lambda token: block_of(source_group, theirs, token) != source_group.null_block,
    )
    if not tokens:
        return None
    end = tokens[-1] + 1
    required = min(wanted(group, lowest_of(mine, asked), end), default=end)
    source, own = ids_of(source_group, theirs, tokens), ids_of(group, mine, tokens)
    if len(set(own)) < len(own):
        raise Wrong(BadBlock)
    places = tokens[0] // source_group.block_tokens, tokens[0] // group.block_tokens
    return tokens[0], required, end, lowest_of(mine, asked), source, own, *places


def values_of(found: Mapping[str, GroupRequest]) -> Any:
    """`needed` in the oracle's words."""
    if not found:
        return None
    (one,) = found.values()
    ids = one.source.ids.tolist(), one.destination.ids.tolist()
    return one.begin, one.required, one.end, one.floor, *ids, one.source.first, one.destination.first


def expected_written(group: Group, theirs: Blocks | None, mine: Blocks, asked: Range) -> Any:
    """`written`, for one group."""
    in_range(group, mine)
    first = mine.first_token // group.block_tokens
    if theirs is None:
        end = asked[1] if asked is not None else mine.end_token
        last = (first + len(mine.ids)) * group.block_tokens
        lowest = lowest_of(mine, asked)
        tokens = range(lowest, last) if end is None else one_more(group, lowest, end) + wanted(group, lowest, end)
        places = {token // group.block_tokens for token in tokens if token < last}
        return [
            block for at, block in enumerate(mine.ids.tolist(), first) if at in places and block != group.null_block
        ]
    assert theirs.end_token is not None
    # Whether the source has a block is known later, so a block that is not written may be among them.
    tokens = moved(group, range(theirs.first_token, theirs.end_token), mine, asked, theirs=lambda token: True)
    if not tokens:
        return None
    own = ids_of(group, mine, tokens)
    if len(set(own)) < len(own):
        raise Wrong(BadBlock)
    behind = [block for at, block in enumerate(mine.ids.tolist(), first) if at * group.block_tokens > tokens[-1]]
    return own + [block for block in behind if block != group.null_block]


def drawn(turns: Random, group: Group, *, says: bool = False) -> Blocks:
    """Blocks of a request, mostly good ones."""
    ids = turns.sample(range(group.num_blocks), turns.randint(0, 5))
    if ids and turns.random() < 0.1:
        ids[turns.randrange(len(ids))] = turns.choice((-1, ids[0], group.num_blocks, group.num_blocks - 1))
    first = turns.choice((0, 0, turns.randint(0, 12)))
    room = (first // group.block_tokens + len(ids)) * group.block_tokens
    end = max(first, room - turns.randint(-1, 2 * group.block_tokens)) if says or turns.random() < 0.5 else None
    return Blocks(ids, first, end)


def asked_of(turns: Random) -> Range:
    begin = turns.randint(0, 16)
    return turns.choice((None, (begin, begin + turns.randint(0, 12))))


def groups(turns: Random) -> tuple[Group, Group]:
    """A destination's group, and the source's."""
    kind = turns.choice((GroupKind.TOKENS, GroupKind.WINDOW))
    window = turns.randint(1, 9) if kind is GroupKind.WINDOW else 0
    made = [
        Group("g", kind, turns.randint(1, 4), turns.randint(8, 12), turns.choice((None, 0, 3)), window) for _ in "sd"
    ]
    return made[0], made[1]


@pytest.mark.parametrize("seed", range(4))
def test_needed_tokens_are_those_of_set_arithmetic(seed: int) -> None:
    turns, seen = Random(seed), set()
    for _ in range(800):
        group, source_group = groups(turns)
        theirs, mine, asked = drawn(turns, source_group), drawn(turns, group), asked_of(turns)
        due = outcome(lambda: expected(group, source_group, theirs, mine, asked))  # noqa: B023
        made = outcome(lambda: values_of(needed([group], {"g": source_group}, {"g": theirs}, {"g": mine}, asked)))  # noqa: B023
        assert made == due, (group, source_group, theirs, mine, asked)
        seen.add(due if isinstance(due, type) else type(due))
    assert seen == {BadBlock, BlocksShort, tuple, type(None)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("granted", [True, False])
def test_written_blocks_are_those_of_set_arithmetic(seed: int, granted: bool) -> None:
    turns, seen = Random(seed), set()
    for _ in range(800):
        group, source_group = groups(turns)
        theirs = drawn(turns, source_group, says=True) if granted else None
        mine, asked = drawn(turns, group), asked_of(turns)
        due = outcome(lambda: expected_written(group, theirs, mine, asked))  # noqa: B023
        given = None if theirs is None else {"g": theirs}
        found = outcome(lambda: written([group], given, {"g": mine}, asked))  # noqa: B023
        made: Any = found if isinstance(found, type) else found["g"].tolist() if "g" in found else None
        if theirs is None and due == [] and not isinstance(made, type):
            # Nothing is written, so an invalid block is not found.
            assert len(made) <= 1
            continue
        assert made == due, (group, theirs, mine, asked)
        seen.add(due if isinstance(due, type) else type(due))
    assert seen == ({BadBlock, BlocksShort, list, type(None)} if granted else {BadBlock, list})


FULL = Group("full", block_tokens=4, num_blocks=8, null_block=0)
STATE = Group("state", GroupKind.STATE, num_blocks=8, null_block=0)
POOLED = [Group(name, block_tokens=4, num_blocks=8, pool="one") for name in ("a", "b")]
Call = Callable[[list[Group], dict[str, Blocks] | None, dict[str, Blocks]], object]


def needed_of(groups: list[Group], theirs: dict[str, Blocks] | None, mine: dict[str, Blocks]) -> object:
    assert theirs is not None
    return needed(groups, {group.name: group for group in groups}, theirs, mine, None)


def written_of(groups: list[Group], theirs: dict[str, Blocks] | None, mine: dict[str, Blocks]) -> object:
    return {name: ids.tolist() for name, ids in written(groups, theirs, mine, None).items()}


BOTH = pytest.mark.parametrize("call", [needed_of, written_of])


def whole(*ids: int) -> Blocks:
    return Blocks(list(ids), 0, 4 * len(ids))


@BOTH
def test_a_state_is_one_block_at_one_token(call: Call) -> None:
    right = {"state": Blocks([5], state_token=9)}
    assert call([STATE], right, right)
    for wrong, error in (
        (Blocks([], state_token=9), InvalidField),
        (Blocks([5, 6], state_token=9), InvalidField),
        (Blocks([5], state_token=8), BlocksShort),
    ):
        for theirs, mine in ((right, {"state": wrong}), ({"state": wrong}, right)):
            with pytest.raises(error) as caught:
                call([STATE], theirs, mine)
            if error is InvalidField:
                side = "source" if theirs["state"] is wrong else "destination"
                assert str(caught.value).startswith(f"number of {side} blocks of state group")
    with pytest.raises(BadBlock, match="the null block"):
        call([STATE], right, {"state": Blocks([0], state_token=9)})


def test_a_state_is_moved_whatever_the_tokens() -> None:
    theirs, mine = {"state": Blocks([5], state_token=9)}, {"state": Blocks([3], state_token=9)}
    assert values_of(needed([STATE], {"state": STATE}, theirs, mine, (2, 3))) == (0, 0, 1, 0, [5], [3], 0, 0)
    assert written_of([STATE], theirs, mine) == written_of([STATE], None, mine) == {"state": [3]}


def test_a_state_in_the_sources_null_block_is_refused() -> None:
    theirs, mine = {"state": Blocks([0])}, {"state": Blocks([3])}
    with pytest.raises(BadBlock, match=r"source block 0 .* the null block"):
        needed([STATE], {"state": STATE}, theirs, mine, None)


@BOTH
def test_a_block_given_twice_in_a_pool_is_refused(call: Call) -> None:
    once = {"a": whole(1, 2), "b": whole(3, 4)}
    assert call(POOLED, once, once)
    with pytest.raises(BadBlock, match=r"pool one.* block 2|block 2 .*given twice"):
        call(POOLED, once, {"a": whole(1, 2), "b": whole(3, 2)})
    # Groups without a pool have one of their own, whatever its name.
    apart = [POOLED[0], Group("one", block_tokens=4, num_blocks=8), Group("c", block_tokens=4, num_blocks=8)]
    same = {"a": whole(1, 2), "one": whole(1, 2), "c": whole(1, 2)}
    assert call(apart, same, same)


@BOTH
def test_groups_without_destination_blocks_are_refused(call: Call) -> None:
    both = {"a": whole(1), "b": whole(2)}
    with pytest.raises(InvalidField, match="destination blocks") as caught:
        call(POOLED, both, {"a": whole(1)})
    assert "group 'b'" in str(caught.value)


def test_groups_that_the_source_does_not_grant_are_refused_or_not_written() -> None:
    both = {"a": whole(1), "b": whole(2)}
    with pytest.raises(BlocksShort):
        needed_of(POOLED, {"a": whole(1)}, both)
    # The reads of this rank are known only with the source's geometry.
    assert written_of(POOLED, {"a": whole(1)}, both) == {"a": [1]}
    assert written_of(POOLED, None, {"b": whole(2)}) == {"b": [2]}
    assert written_of(POOLED, {"a": whole(5), "c": whole(5)}, {"a": whole(1)}) == {"a": [1]}
    with pytest.raises(InvalidField, match="groups of this engine"):
        written_of(POOLED, None, {"a": whole(1), "c": whole(2)})


def test_a_group_that_is_not_read_is_not_written() -> None:
    theirs = {"a": Blocks([1], 0, 0), "b": whole(2)}
    assert written_of(POOLED, theirs, {"a": Blocks([1], 0, 0), "b": whole(2)}) == {"b": [2]}
    assert list(needed_of(POOLED, theirs, {"a": Blocks([1], 0, 0), "b": whole(2)})) == ["b"]  # type: ignore[call-overload]


def test_tokens_are_moved_up_to_the_limit() -> None:
    block = 1 << 20
    group = Group("g", block_tokens=block, num_blocks=8)
    fine = Blocks([3], TOKEN_LIMIT - block, TOKEN_LIMIT - 1)
    assert values_of(needed([group], {"g": group}, {"g": fine}, {"g": fine}, None))[2] == TOKEN_LIMIT - 1


def test_ids_are_a_copy_that_does_not_wrap() -> None:
    group = Group("g", block_tokens=4, num_blocks=1 << 30)
    (one,) = needed([group], {"g": group}, {"g": whole(1 << 29)}, {"g": whole(7)}, None).values()
    assert (one.source.ids * 1024).tolist() == [1 << 39]
    assert (one.destination.ids * (1 << 40)).tolist() == [7 << 40]


@pytest.mark.parametrize(("theirs", "mine"), [([0, 5], [3, 4]), ([5, 6], [0, 4])])
def test_the_token_before_a_window_is_not_required(theirs: list[int], mine: list[int]) -> None:
    """Token 3 is in a block of its own side's null block, which both declare to hold."""
    group = Group("g", GroupKind.WINDOW, block_tokens=4, num_blocks=8, null_block=0, window_tokens=4)

    def values_of_two(source: list[int], destination: list[int]) -> Any:
        given = {"g": Blocks(source, 0, 7)}, {"g": Blocks(destination, 0, 7)}
        assert written([group], *given, None)["g"].tolist() == [block for block in destination if block]
        return values_of(needed([group], {"g": group}, *given, None))

    assert values_of_two(theirs, mine) == (4, 4, 7, 0, theirs[1:], mine[1:], 1, 1)
    assert values_of_two([5, 6], [3, 4]) == (3, 4, 7, 0, [5, 6], [3, 4], 0, 0)
