"""Whether one engine can read another's cache, and if not, every reason with both values (R8); and whether the ranks of
one engine together hold all units and tokens of their planes.

Two ranks that by mistake declare the same heads are replicas to a reader. As a source they lack heads, which a reader
finds; as a destination each gets the heads that it declares, and one of the two gets wrong heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvferry.errors import BadGeometry, Mismatch
from kvferry.geometry.model import EngineGeometry, GroupKind
from kvferry.geometry.plane import Interval, TokenShard
from kvferry.planner.coverage import Coverer, Holdings, Indexed, some
from kvferry.planner.line_rule import RankHolding


def diff(source: EngineGeometry, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """Every reason why the destination's ranks cannot read the source's cache; empty if they can.

    The destination may hold only the ranks that ask. Identity is compared key by key, groups by the fields that decide
    how block tables are read, planes by format, dtype and cut (`coverage.COMPARED`), and every unit and token must be
    held. Raises `BadGeometry` if a destination rank declares a byte in two planes that a read writes.
    """
    return diff_indexed(Indexed(source), destination)


def diff_indexed(source: Indexed, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """`diff` for a source that is compared with many destinations."""
    found = dict.fromkeys(engine_mismatches(source.engine, destination))
    coverer = Coverer(source, destination)
    for rank in destination.ranks:
        found |= dict.fromkeys(coverer.cover(rank).mismatches)
    return tuple(found)


def engine_mismatches(source: EngineGeometry, destination: EngineGeometry) -> Iterator[Mismatch]:
    """The part of `diff` for identity and groups, without the planes of single ranks."""
    for key in sorted({*source.identity, *destination.identity}):
        theirs, ours = (engine.identity.get(key) for engine in (source, destination))
        if theirs != ours:
            shown = ["missing" if value is None else repr(value) for value in (theirs, ours)]
            message = f"identity {key!r} is {shown[0]} at the source, {shown[1]} at the destination"
            yield Mismatch("identity", "identity", key, theirs or "", ours or "", message)
    offered = {group.name: group for group in source.groups}
    for group in destination.groups:
        other = offered.get(group.name)
        if other is None:
            planes = [plane for _, plane in destination.planes() if plane.group == group.name]
            if planes and not all(plane.optional_cover for plane in planes):
                message = f"group {group.name!r} does not exist at the source, which has {sorted(offered)}"
                yield Mismatch("group", group.name, "name", "", group.name, message)
            continue
        if group.kind is not other.kind:
            yield _differs(group.name, "kind", other.kind.name, group.kind.name)
        elif group.kind is GroupKind.WINDOW and group.window_tokens != other.window_tokens:
            yield _differs(group.name, "window_tokens", str(other.window_tokens), str(group.window_tokens))


def _differs(group: str, field: str, theirs: str, ours: str) -> Mismatch:
    message = f"group {group!r}: {field} is {theirs} at the source, {ours} at the destination"
    return Mismatch("group", group, field, theirs, ours, message)


def check_complete(engine: Indexed) -> None:
    """Raise `BadGeometry` if no rank holds some units or tokens of a plane, unless the engine is declared partial.

    Planes that no rank has are not missed: an engine may hold some layers only. `engine` has all its ranks.
    """
    if engine.engine.partial:
        return
    known: dict[tuple[Holdings, int], tuple[Interval, ...]] = {}
    lacking: list[tuple[str, int, tuple[Interval, ...]]] = []
    for name, named in engine.named.items():
        size = max(plane.axis_size for _, plane in named.kinds)
        key = named.holdings, size
        if key not in known:
            known[key] = _lacking(named.holdings.ranks, size)
        if known[key]:
            lacking.append((name, size, known[key]))
    if not lacking:
        return
    name, size, missing = lacking[0]
    alike = f" (and {len(lacking) - 1} more planes)" if len(lacking) > 1 else ""
    raise BadGeometry(
        f"engine {engine.engine.engine_id!r}, plane {name}{alike}",
        f"units {some(missing)} of {size} are held by no rank for all tokens; held are "
        f"{engine.named[name].holdings.in_words}. Does each rank declare its own heads? An engine that holds a "
        "part of the model only says partial=True",
    )


def _lacking(held: tuple[RankHolding, ...], size: int) -> tuple[Interval, ...]:
    """The units of ``[0, size)`` whose tokens are not all held, by one rank or by ranks that split the tokens alike."""
    changes: dict[int, list[tuple[TokenShard, int]]] = {size: []}
    for one in held:
        changes.setdefault(one.units.begin, []).append((one.tokens, 1))
        changes.setdefault(one.units.end, []).append((one.tokens, -1))
    # For the units from `reached` on: the ranks that hold each shard, the shards held of each split, and the number of
    # splits held whole.
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
