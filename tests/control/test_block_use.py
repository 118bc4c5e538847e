"""Which blocks may be written and published, against lists of what is under way (R2, R4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from kvferry._control.block_use import BlockUse, Writes
from kvferry.errors import BadBlock
from kvferry.geometry import Group
from kvferry.geometry.blocks import BlockIds

GROUPS = (
    Group("full", block_tokens=16, num_blocks=6),
    Group("a", block_tokens=16, num_blocks=6, pool="shared"),
    Group("b", block_tokens=16, num_blocks=8, pool="shared"),
)
POOLS = {"full": "full", "a": "shared", "b": "shared"}
LAYERS = (None, frozenset({"x"}), frozenset({"y"}), frozenset({"x", "y"}))
Ids = dict[str, list[int]]
Blocks = list[tuple[str, int]]


def blocks(ids: Ids) -> Blocks:
    return [(POOLS[group], block) for group, listed in ids.items() for block in listed]


def arrays(ids: Ids) -> Mapping[str, BlockIds]:
    return {group: np.array(listed, np.int32) for group, listed in ids.items()}


@dataclass
class Written:
    """A read under way."""

    writes: Writes
    key: int | None
    blocks: Blocks
    layers: frozenset[str] | None
    asks: bool
    is_quiet: bool = False


@dataclass
class Model:
    """What is under way, as lists; every call is judged by looking at all of them."""

    turns: Random
    use: BlockUse = field(default_factory=lambda: BlockUse(GROUPS))
    pinned: list[Ids] = field(default_factory=list)
    published: dict[int, list[tuple[int, Ids]]] = field(default_factory=dict)
    written: list[Written] = field(default_factory=list)
    numbers: int = 0

    def __post_init__(self) -> None:
        self.writers = [self.use.writes(rank) for rank in (0, 1, None)]

    def ids(self) -> Ids:
        found: Ids = {}
        for group in GROUPS:
            if self.turns.random() < 0.6:
                found[group.name] = [self.turns.randrange(group.num_blocks) for _ in range(self.turns.randint(0, 2))]
        return found

    def begin(self) -> None:
        writes, ids, layers = self.turns.choice(self.writers), self.ids(), self.turns.choice(LAYERS)
        overlap, asks = self.turns.random() < 0.2, self.turns.random() < 0.5
        held = [one for ids in self.pinned for one in blocks(ids)]
        held += [one for steps in self.published.values() for _, ids in steps for one in blocks(ids)]
        for other in self.written:
            same = other.writes.rank == writes.rank or other.writes.rank is None or writes.rank is None
            if same and not other.is_quiet and (layers is None or other.layers is None or layers & other.layers):
                held += other.blocks
        free = overlap or not set(blocks(ids)) & set(held)
        one = Written(writes, None, blocks(ids), layers, asks)
        try:
            one.key = writes.begin(
                "read",
                arrays(ids),
                layers=layers,
                quiet=(lambda: one.is_quiet) if asks else None,
                allow_overlap=overlap,
            )
        except BadBlock:
            assert not free
        else:
            assert free
            self.written.append(one)

    def end(self) -> None:
        if self.written:
            one = self.written.pop(self.turns.randrange(len(self.written)))
            if one.asks and self.turns.random() < 0.7:
                # No call reports the quiet: the record asks for it.
                one.is_quiet = True
                self.written.append(one)
            else:
                for _ in range(self.turns.randint(1, 2)):
                    one.writes.end(one.key)

    def pin(self) -> None:
        ids = self.ids()
        more_of = self.turns.choice([None, *self.published])
        earlier = [] if more_of is None else [one for _, step in self.published[more_of] for one in blocks(step)]
        every = earlier + blocks(ids)
        held = [one for other in self.written if not other.is_quiet for one in other.blocks]
        free = len(set(every)) == len(every) and not set(blocks(ids)) & set(held)
        try:
            self.use.pin(arrays(ids), more_of)
        except BadBlock:
            assert not free
            return
        assert free
        what = self.turns.random()
        if what < 0.2:
            self.use.unpin(arrays(ids))
        elif what < 0.3:
            self.pinned.append(ids)
        else:
            if more_of is None:
                self.numbers += 1
                more_of = self.numbers
            steps = self.published.setdefault(more_of, [])
            step = 1 + max((step for step, _ in steps), default=-1)
            self.use.name(arrays(ids), more_of)
            steps.append((step, ids))

    def release(self) -> None:
        if self.published:
            number = self.turns.choice(list(self.published))
            del self.published[number]
            self.use.released([number, number, 999])


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_granted_exactly_when_it_is_not_in_use(seed: int) -> None:
    model = Model(Random(seed))
    actions = [model.begin, model.end, model.pin, model.release]
    for _ in range(150):
        model.turns.choices(actions, (4, 3, 4, 2))[0]()
    for one in model.written:
        one.writes.end(one.key)
    for ids in model.pinned:
        model.use.unpin(arrays(ids))
    model.use.released(list(model.published))
    for writes in model.writers:
        writes._end_quiet(writes._under_way)
        # Else each later check would look at every read.
        assert not any(counts.any() for counts in writes._counts.values())
    # Nothing is left behind.
    assert not model.use._pins
    every = {group.name: np.arange(group.num_blocks, dtype=np.int32) for group in GROUPS if group.name != "a"}
    model.writers[2].begin("all", every)
    with pytest.raises(BadBlock, match="read all may still write to it"):
        model.use.pin(every)


def test_errors_name_the_user_of_a_block() -> None:
    use = BlockUse(GROUPS)
    for number, ids in ((5, arrays({"a": [1]})), (6, arrays({"b": [2], "full": [1]}))):
        use.pin(ids)
        use.name(ids, number)
    writes = use.writes()
    for group, block, number in (("b", 1, 5), ("a", 2, 6), ("full", 1, 6)):
        with pytest.raises(BadBlock, match=rf"destination block {block} .* publication {number} holds it"):
            writes.begin("read", arrays({group: [block]}))
    writes.begin("read", arrays({"full": [2]}))
    with pytest.raises(BadBlock, match="group 'b', source block 1 of 8: it is given twice"):
        use.pin(arrays({"b": [1]}), more_of=5)
    with pytest.raises(BadBlock, match="group 'b', source block 3 of 8: it is given twice"):
        use.pin(arrays({"a": [3], "b": [4, 3]}))


def test_the_steps_of_a_publication_cost_the_next_one_nothing() -> None:
    looks = 0

    class Step(dict[str, BlockIds]):
        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

    use, costs = BlockUse((Group("full", block_tokens=16, num_blocks=400),)), []
    for block in range(400):
        before, ids = looks, Step(full=np.array([block], np.int32))
        use.pin(ids, 1)
        use.name(ids, 1)
        costs.append(looks - before)
    assert max(costs[1:]) == costs[1]
    with pytest.raises(BadBlock, match="source block 7 of 400: it is given twice"):
        use.pin(arrays({"full": [7]}), 1)


@pytest.mark.parametrize("reuses", [False, True], ids=["other-blocks", "freed-blocks"])
def test_the_reads_that_run_cost_a_new_one_nothing(reuses: bool) -> None:
    """A thousand reads run, and others come and go beside them, in blocks of their own or in those just freed."""
    running, short, asked = 1000, 200, list[int]()
    writes = BlockUse((Group("full", block_tokens=16, num_blocks=running + short),)).writes()

    def claim(block: int, *, quiet: bool) -> None:
        def answer() -> bool:
            asked.append(block)
            return quiet

        writes.begin("read", arrays({"full": [block]}), quiet=answer)

    for block in range(running):
        claim(block, quiet=False)
    asked.clear()
    for number in range(short):
        claim(running + (0 if reuses else number), quiet=True)
    assert len(asked) <= 3 * short
    with pytest.raises(BadBlock, match="read read may still write to it"):
        claim(5, quiet=False)


def test_quiet_claims_without_blocks_do_not_pile_up() -> None:
    writes = BlockUse(GROUPS).writes()
    for _ in range(100):
        writes.begin("read", {}, quiet=lambda: True)
    assert len(writes._under_way) <= 2
