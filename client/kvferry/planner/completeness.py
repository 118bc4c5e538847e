"""Whether the ranks of an engine together hold all units and tokens of their planes (R8).

Two ranks that by mistake declare the same heads are replicas to a reader: as a source they lack heads, which a reader
finds; as a destination each would get the heads that it declares, and one of them the wrong ones.
"""

from __future__ import annotations

from collections import Counter

from kvferry.errors import BadGeometry
from kvferry.geometry.plane import Interval, TokenShard
from kvferry.planner.coverage import Indexed, held_in_words, some
from kvferry.planner.line_rule import RankHolding


def check_complete(engine: Indexed) -> None:
    """Raise `BadGeometry` if units or tokens of a plane are held by no rank, unless the engine says that it is partial.

    Planes that no rank has are not missed: an engine may hold some layers only.

    Args:
        engine: with all its ranks.
    """
    if engine.engine.partial:
        return
    known: dict[tuple[int, int], tuple[Interval, ...]] = {}
    lacking: list[tuple[str, int, tuple[Interval, ...]]] = []
    for name, named in engine.named.items():
        size = max(plane.axis_size for _, plane in named.kinds)
        key = id(named.holdings), size
        if key not in known:
            known[key] = _lacking(named.holdings, size)
        if known[key]:
            lacking.append((name, size, known[key]))
    if not lacking:
        return
    name, size, missing = lacking[0]
    alike = f" (and {len(lacking) - 1} more planes)" if len(lacking) > 1 else ""
    raise BadGeometry(
        f"engine {engine.engine.engine_id!r}, plane {name}{alike}",
        f"units {some(missing)} of {size} are held by no rank for all tokens; held are "
        f"{held_in_words(engine.named[name].holdings)}. Does each rank declare its own heads? An engine that holds a "
        "part of the model only says partial=True",
    )


def _lacking(held: tuple[RankHolding, ...], size: int) -> tuple[Interval, ...]:
    """The units of ``[0, size)`` of which no rank holds all tokens, and no ranks that split the tokens alike do."""
    changes: dict[int, list[tuple[TokenShard, int]]] = {size: []}
    for one in held:
        changes.setdefault(one.units.begin, []).append((one.tokens, 1))
        changes.setdefault(one.units.end, []).append((one.tokens, -1))
    # Of the units from `reached` on: how many ranks hold each shard, how many shards of each split are held, and how
    # many splits are held whole.
    holders: Counter[TokenShard] = Counter()
    shards: Counter[tuple[int, int]] = Counter()
    reached = whole = 0
    missing: list[Interval] = []
    for unit in sorted(changes):
        if not whole and reached < unit:
            begin = missing.pop().begin if missing and missing[-1].end == reached else reached
            missing.append(Interval(begin, unit))
        for shard, change in changes[unit]:
            holders[shard] += change
            if holders[shard] == (change > 0):
                split = shard.count, shard.interleave
                whole -= shards[split] == shard.count
                shards[split] += change
                whole += shards[split] == shard.count
        reached = unit
    return tuple(missing)
