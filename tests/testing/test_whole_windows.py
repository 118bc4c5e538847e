"""What of a sliding window arrives, in an engine whose window is the keys before the query."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group, GroupKind
from kvferry.errors import BlocksShort
from kvferry.testing import Fabric

WINDOW = 12
BLOCK = 4
SOON = 60.0
AXES = ("kv", "block", "head", "token", "content")
GROUP = Group("window", GroupKind.WINDOW, BLOCK, 16, null_block=0, window_tokens=WINDOW)


def arrived(fabric: Fabric, offered: Blocks, mine: Blocks, tokens: tuple[int, int] | None) -> list[int]:
    """The tokens that a read writes into the destination's blocks, whatever they are."""
    theirs = np.arange(1, 2 * 16 * BLOCK + 1, dtype=np.float32).reshape(2, 16, 1, BLOCK, 1)
    own = np.zeros_like(theirs)
    prefill = fabric.client().register_cache(EngineSpec("p", (GROUP,)), tensors={"layer0": theirs}, axes=AXES)
    decode = fabric.client().register_cache(EngineSpec("d", (GROUP,)), tensors={"layer0": own}, axes=AXES)
    publication = prefill.session.publish("request", {"window": offered})
    decode.read(publication.reference, {"window": mine}, tokens=tokens).result(SOON)
    found = []
    for place, block in enumerate(mine.ids.tolist(), mine.first_token // BLOCK):
        for at in range(BLOCK):
            token = place * BLOCK + at
            if own[:, block, 0, at].any():
                source = int(offered.ids[place - offered.first_token // BLOCK])
                assert (own[:, block, 0, at] == theirs[:, source, 0, at]).all()
                found.append(token)
    return found


@pytest.mark.parametrize("tokens", [None, (0, 30)])
def test_a_window_that_counts_the_keys_before_the_query_arrives_whole(
    fabric: Fabric, tokens: tuple[int, int] | None
) -> None:
    offered, mine = Blocks([5, 9, 2, 7], 18, 30), Blocks([3, 4, 6, 8], 18, 30)
    assert arrived(fabric, offered, mine, tokens) == list(range(30 - WINDOW, 30))


@pytest.mark.parametrize("prompt", range(1, 34))
def test_a_window_of_any_prompt_arrives_whole(fabric: Fabric, prompt: int) -> None:
    first = max(0, prompt - WINDOW)
    count = -(-prompt // BLOCK) - first // BLOCK
    offered, mine = Blocks(range(1, 1 + count), first, prompt), Blocks(range(8, 8 + count), first, prompt)
    assert arrived(fabric, offered, mine, None) == list(range(first, prompt))


# The first of a window's 12 tokens is the last of its block, which an engine that counts the query has freed.
FREED = Blocks([7, 2, 5], 20, 31)
KEPT = Blocks([1, 7, 2, 5], 16, 31)


@pytest.mark.parametrize(
    ("offered", "mine", "first"),
    [
        (KEPT, Blocks([9, 3, 4, 6], 16, 31), 19),
        (FREED, Blocks([9, 3, 4, 6], 16, 31), 20),
        (KEPT, Blocks([3, 4, 6], 20, 31), 20),
        (KEPT, Blocks([0, 3, 4, 6], 16, 31), 20),
    ],
)
def test_the_token_that_only_some_engines_need_may_be_freed(
    fabric: Fabric, offered: Blocks, mine: Blocks, first: int
) -> None:
    assert arrived(fabric, offered, mine, None) == list(range(first, 31))


def test_tokens_that_every_engine_needs_are_required(fabric: Fabric) -> None:
    with pytest.raises(BlocksShort, match=r"tokens \[20, 31\)"):
        arrived(fabric, Blocks([7, 2, 5], 21, 31), Blocks([3, 4, 6], 20, 31), None)
