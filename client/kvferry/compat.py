"""Whether one engine can read another's cache, and if not, every reason with both values (R8)."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.covering import cover, planes_by_name
from kvferry.errors import Mismatch
from kvferry.geometry import EngineGeometry, GroupKind


def diff(source: EngineGeometry, destination: EngineGeometry) -> tuple[Mismatch, ...]:
    """Every reason why the destination's ranks cannot read the source's cache; empty if they can.

    The destination may hold just the ranks that ask. Identity is compared key by key, groups by what decides how their
    block tables are read, planes by format, dtype and cut (`covering.COMPARED`), and every unit and token must be held.
    """
    found = [*_identity(source, destination), *_groups(source, destination)]
    offered, readers = planes_by_name(source), planes_by_name(destination)
    groups = {group.name: group for group in destination.groups}
    seen = set()
    for rank in destination.ranks:
        for mismatch in cover(offered, readers, rank, groups).mismatches:
            if mismatch not in seen:
                seen.add(mismatch)
                found.append(mismatch)
    return tuple(found)


def _identity(source: EngineGeometry, destination: EngineGeometry) -> Iterator[Mismatch]:
    for key in sorted({*source.identity, *destination.identity}):
        theirs, ours = source.identity.get(key), destination.identity.get(key)
        if theirs != ours:
            message = f"identity {key!r} is {theirs!r} at the source, {ours!r} at the destination"
            yield Mismatch("identity", "identity", key, str(theirs), str(ours), message)


def _groups(source: EngineGeometry, destination: EngineGeometry) -> Iterator[Mismatch]:
    offered = {group.name: group for group in source.groups}
    for group in destination.groups:
        other = offered.get(group.name)
        if other is None:
            planes = [plane for _, plane in destination.planes() if plane.group == group.name]
            if planes and not all(plane.optional_cover for plane in planes):
                message = f"group {group.name!r} does not exist at the source, which has {sorted(offered)}"
                yield Mismatch("group", group.name, "name", "none", group.name, message)
            continue
        fields = ["kind"] if group.kind is not GroupKind.WINDOW else ["kind", "window_tokens"]
        for name in fields:
            theirs, ours = getattr(other, name), getattr(group, name)
            if theirs != ours:
                shown = [getattr(value, "name", value) for value in (theirs, ours)]
                message = f"group {group.name!r}: {name} is {shown[0]} at the source, {shown[1]} at the destination"
                yield Mismatch("group", group.name, name, str(shown[0]), str(shown[1]), message)
