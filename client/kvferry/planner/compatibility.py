"""Whether one engine can read another's cache, and if not, every reason with both values (R8)."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import Mismatch
from kvferry.geometry.model import EngineGeometry, GroupKind
from kvferry.planner.coverage import Coverer, Indexed


def diff(source: EngineGeometry, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """Every reason why the destination's ranks cannot read the source's cache; empty if they can.

    The destination may hold just the ranks that ask. Identity is compared key by key, groups by what decides how their
    block tables are read, planes by format, dtype and cut (`coverage.COMPARED`), and every unit and token must be held.

    Raises:
        BadGeometry: a destination rank declares a byte in two planes that a read writes.
    """
    return diff_indexed(Indexed(source), destination)


def diff_indexed(source: Indexed, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """`diff` for a source that is compared with many destinations."""
    found = dict.fromkeys(engine_mismatches(source.engine, destination))
    coverer = Coverer(source, destination)
    for rank in destination.ranks:
        found |= dict.fromkeys(coverer.cover(rank).mismatches)
    return tuple(found)


def engine_mismatches(source: EngineGeometry, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """The part of `diff` that is not about the planes of single ranks: identity and groups."""
    return (*_identity(source, destination), *_groups(source, destination))


def _identity(source: EngineGeometry, destination: EngineGeometry) -> Iterator[Mismatch]:
    for key in sorted({*source.identity, *destination.identity}):
        theirs, ours = (engine.identity.get(key) for engine in (source, destination))
        if theirs != ours:
            shown = ["missing" if value is None else repr(value) for value in (theirs, ours)]
            message = f"identity {key!r} is {shown[0]} at the source, {shown[1]} at the destination"
            yield Mismatch("identity", "identity", key, theirs or "", ours or "", message)


def _groups(source: EngineGeometry, destination: EngineGeometry) -> Iterator[Mismatch]:
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
