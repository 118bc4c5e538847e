"""Worlds of a few hundred bytes, and oracles of each byte's owner, and of the beginnings and ends of blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind, Plane, RankGeometry
from tests.support.geometries import Engine, Layout, Rank, Tensor, engine, tensors, tp_ranks
from tests.support.simulated_memories import address

BLOCKS = 6
FULL = tensors(layers=3, axis=2, state_bytes=2)
OTHER = tensors(layers=3, prefix="other", group="other", axis=2, state_bytes=2)
STATE = [Tensor("mamba", "ssm", "state", axis=2, state_bytes=2, state_rows=2)]

Given = Mapping[str, Blocks]
Pair = tuple[EngineGeometry, EngineGeometry, Given, Given]

LAYOUTS = {
    "planes apart": Layout("BPUT"),
    "packed": Layout("BPUT", level=1, cross_layer=True),
    "units outermost, padded": Layout("UPBT", level=1, pad={"B": 3, "U": 5, "P": 1}, pages=2),
    "pages outermost": Layout("PBUT", pages=2),
    "states outermost": Layout("TUPB"),
    "states and units outermost": Layout("TUBP", level=2, pages=2),
    "side by side in a unit": Layout("BPTU", level=4),
}


def one_group(engine_id: str, layout: str, block_tokens: int = 2) -> EngineGeometry:
    """Three layers of key and value."""
    return engine(engine_id, FULL, block_tokens=block_tokens, num_blocks=BLOCKS, layout=LAYOUTS[layout]).geometry()


def three_groups(engine_id: str, layout: str, others: int) -> EngineGeometry:
    """A second group of `others` blocks beside the first, and one of states."""
    groups = (
        Group("full", block_tokens=2, num_blocks=BLOCKS),
        Group("other", block_tokens=2, num_blocks=others),
        Group("state", GroupKind.STATE, num_blocks=4),
    )
    return Engine(engine_id, groups, tp_ranks([*FULL, *OTHER, *STATE], 1), {"": LAYOUTS[layout]}).geometry()


def two_groups(engine_id: str, pool: str, ranks: Sequence[Sequence[Tensor]]) -> EngineGeometry:
    """Two groups: on one memory if they have a pool."""
    groups = tuple(Group(name, block_tokens=2, num_blocks=2 * BLOCKS, pool=pool) for name in ("full", "other"))
    held = (Rank(tuple(held for tensor in of for held in tp_ranks([tensor], 1)[0].held)) for of in ranks)
    return Engine(engine_id, groups, tuple(held), {}).geometry()


def piled(geometry: EngineGeometry, step: int) -> EngineGeometry:
    """The same engine, each plane `step` bytes behind the plane before, even if planes overlap."""
    planes = geometry.ranks[0].planes
    moved = tuple(replace(plane, base=planes[0].base + step * at) for at, plane in enumerate(planes))
    return replace(geometry, ranks=(RankGeometry(0, moved),))


def woven(engine_id: str) -> EngineGeometry:
    """Key has its units outside the blocks; value lies in the gaps between its blocks, and has but one unit."""
    model = [Tensor("l", "key", axis=2, state_bytes=2), Tensor("l", "value", axis=1, state_bytes=2)]
    geometry = engine(engine_id, model, block_tokens=2, num_blocks=BLOCKS).geometry()
    key, value = geometry.ranks[0].planes
    key = replace(key, block_stride=8, unit_stride=8 * BLOCKS)
    value = replace(value, base=key.base + 4, block_stride=8)
    return replace(geometry, ranks=(RankGeometry(0, (key, value)),))


def one_unit(engine_id: str, layout: str) -> EngineGeometry:
    """One unit and one page: strides from unit to unit, and from page to page, that are never used."""
    model = tensors(layers=2, axis=1, state_bytes=2)
    geometry = engine(engine_id, model, block_tokens=2, num_blocks=BLOCKS, layout=LAYOUTS[layout]).geometry()
    planes = (
        replace(plane, unit_stride=plane.block_stride + 2, page_stride=2 * plane.block_stride + 2)
        for plane in geometry.ranks[0].planes
    )
    return replace(geometry, ranks=(RankGeometry(0, tuple(planes)),))


def pairs() -> dict[str, Pair]:
    """Two engines, and the blocks of a request on both."""
    ids = {"full": Blocks([1, 2, 0, 5])}, {"full": Blocks([4, 5, 1, 3])}
    two_ids = (
        {"full": Blocks([1, 2, 9]), "other": Blocks([4, 3])},
        {"full": Blocks([11, 7, 8]), "other": Blocks([0, 4])},
    )
    names = list(LAYOUTS)
    found: dict[str, Pair] = {
        f"{read_from} to {read_into}": (one_group("p", read_from), one_group("d", read_into), *ids)
        for read_from, read_into in zip(names, [*names[1:], names[0]], strict=True)
    }
    found["other block sizes"] = (
        one_group("p", "packed", 3),
        one_group("d", "units outermost, padded", 2),
        {"full": Blocks([4, 1, 2], 3, 11)},
        {"full": Blocks([3, 4, 0, 2], 5, 11)},
    )
    found["three groups"] = (
        three_groups("p", "packed", BLOCKS),
        three_groups("d", "planes apart", 4),
        {"full": ids[0]["full"], "other": Blocks([5, 3]), "state": Blocks([2])},
        {"full": ids[1]["full"], "other": Blocks([0, 2]), "state": Blocks([3])},
    )
    both = [[*FULL, *OTHER]]
    found["two groups of a pool"] = (two_groups("p", "memory", both), two_groups("d", "memory", both), *two_ids)
    found["two groups on two ranks"] = (two_groups("p", "", [FULL, OTHER]), two_groups("d", "", both), *two_ids)
    found["one block"] = (
        engine("p", FULL, block_tokens=4, num_blocks=1).geometry(),
        engine("d", FULL, block_tokens=4, num_blocks=1, layout=LAYOUTS["states outermost"]).geometry(),
        {"full": Blocks([0])},
        {"full": Blocks([0])},
    )
    run = {"full": Blocks([1, 2, 3, 4, 5])}
    found["one unit"] = (one_unit("p", "planes apart"), one_unit("d", "packed"), *ids)
    found["woven"] = (woven("p"), woven("d"), run, run)
    for step in (0, 7, 40):
        source = piled(one_group("p", "planes apart"), step)
        found[f"source planes every {step} bytes"] = (source, one_group("d", "packed"), *ids)
    return found


PAIRS = pairs()


class Bytes:
    """The blocks to which the bytes of a rank belong, by the definition of a plane, and the request's share of them."""

    def __init__(self, geometry: EngineGeometry, rank: int, blocks: Given) -> None:
        self.groups = {group.name: group for group in geometry.groups}
        self.blocks = blocks
        self.owners: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for plane in geometry.ranks[rank].planes:
            units = range(plane.units.begin, plane.units.end)
            for block, unit, x in product(range(plane.num_blocks), units, range(plane.block_states)):
                where = address(plane, block, unit, x)
                for byte in range(where, where + plane.state_bytes):
                    self.owners[byte].add((plane.group, block))

    def tokens(self, byte: int) -> set[tuple[str, int]]:
        """The tokens of the request's blocks to which a byte belongs, with their groups; one token for a state."""
        found = set()
        for name, block in self.owners.get(byte, ()):
            size = max(1, self.groups[name].block_tokens)
            ids = self.blocks[name].ids.tolist()
            if block in ids:
                begin = (self.blocks[name].first_token // size + ids.index(block)) * size
                found |= {(name, token) for token in range(begin, begin + size)}
        return found

    @property
    def own(self) -> list[int]:
        """The bytes of the request's blocks."""
        return [byte for byte in sorted(self.owners) if self.tokens(byte)]

    @property
    def others(self) -> list[int]:
        """The bytes of other blocks, and the bytes before and behind all blocks."""
        edges = {min(self.owners) - 1, max(self.owners) + 1}
        return [byte for byte in sorted({*self.owners} | edges) if not self.tokens(byte)]

    def strange(self, begin: int, length: int) -> bool:
        """Whether a byte of this stretch belongs to blocks, but to none of the request's."""
        return any(self.owners.get(byte) and not self.tokens(byte) for byte in range(begin, begin + length))


@dataclass(frozen=True)
class Side:
    """One rank's memory: the beginnings and ends of each group's blocks, and the request's share of them."""

    planes: tuple[Plane, ...]
    groups: Mapping[str, Group]
    blocks: Mapping[str, Blocks]
    starts: Mapping[int, set[tuple[str, int]]]
    ends: Mapping[int, set[tuple[str, int]]]

    @classmethod
    def of(cls, planes: tuple[Plane, ...], groups: Iterable[Group], blocks: Mapping[str, Blocks]) -> Side:
        starts: dict[int, set[tuple[str, int]]] = defaultdict(set)
        ends: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for plane in planes:
            for block_id in range(plane.num_blocks):
                for unit in range(plane.units.begin, plane.units.end):
                    for x in range(plane.block_states):
                        where = address(plane, block_id, unit, x)
                        starts[where].add((plane.group, block_id))
                        ends[where + plane.state_bytes].add((plane.group, block_id))
        return cls(planes, {group.name: group for group in groups}, blocks, starts, ends)

    def known(self, where: int, length: int) -> bool:
        """Whether these bytes begin with a state and end with one; other positions within a block are not checked."""
        return where in self.starts and where + length in self.ends

    def places(self, group: str, where: int, length: int) -> list[int] | None:
        """The indices of these bytes' blocks in the request; None if a block is not the request's, or there is none."""
        first = {block for name, block in self.starts.get(where, ()) if name == group}
        last = {block for name, block in self.ends.get(where + length, ()) if name == group}
        if not first or not last:
            return None
        ids = self.blocks[group].ids.tolist()
        wanted = range(min(first), max(last) + 1)
        return [ids.index(block) for block in wanted] if wanted and set(wanted) <= set(ids) else None

    def tokens(self, group: str, place: int) -> range:
        """The tokens of a block of the request."""
        size = self.groups[group].block_tokens
        begin = (self.blocks[group].first_token // size + place) * size
        return range(begin, begin + size)


def may_be_right(theirs: Side, mine: Side, source: int, destination: int, length: int) -> bool:
    """Whether both are blocks of the request that hold the same tokens, in some group."""
    for name, group in mine.groups.items():
        there, here = theirs.places(name, source, length), mine.places(name, destination, length)
        if there is None or here is None or any(np.diff(there) != 1) or any(np.diff(here) != 1):
            continue
        pairs = (there[0], here[0]), (there[-1], here[-1])
        if group.kind is GroupKind.STATE or all(
            set(theirs.tokens(name, place)) & set(mine.tokens(name, own)) for place, own in pairs
        ):
            return True
    return False
