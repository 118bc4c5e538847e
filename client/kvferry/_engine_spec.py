"""The description of an engine: its name, its KV-cache groups, and its number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry._arguments import check_fields, integer, label, several, string_map
from kvferry.errors import InvalidField
from kvferry.geometry.model import Group


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Describes an engine. All of its processes use an equal value.

    Attributes:
        engine_id: stable name, 1 to 256 bytes, printable.
        groups: the KV-cache groups.
        num_ranks: number of ranks; each registers a cache.
        identity: everything that the contents of the cache depend on: model, revision digest, quantisation, rope and
            the like. An engine reads only from engines of equal identity.
        partial: the engine holds a part of the model: its ranks together need not hold every head (unit) and token of
            each of their layers. If False, the home refuses the last rank of an engine with such a gap, with
            `BadGeometry`; most often, two ranks have declared the same heads.

    Raises:
        InvalidField: a field has the wrong type or value.
    """

    engine_id: str
    groups: tuple[Group, ...]
    num_ranks: int = 1
    identity: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", several("groups", self.groups, Group, "several Groups, (group,)"))
        object.__setattr__(self, "identity", string_map("identity", self.identity))
        check_fields(self)
        label("engine_id", self.engine_id)
        integer("num_ranks", self.num_ranks, 1)
        if not self.groups:
            raise InvalidField("groups", self.groups, "at least one group")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise InvalidField("groups", names, "names that differ")

    def group(self, name: str) -> Group:
        """Return the group of this name; raises `InvalidField` for an unknown name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise InvalidField("group", name, f"one of {[group.name for group in self.groups]}")
