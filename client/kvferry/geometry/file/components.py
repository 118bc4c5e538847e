"""The components of a group's layers, and what they inherit."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvferry.errors import InvalidField
from kvferry.geometry.file.fields import MISSING, Fields, indices
from kvferry.geometry.model import GroupKind
from kvferry.geometry.plane import Interval
from kvferry.geometry.sharding import shards

MAX_LAYERS = 4096
MAX_COMPONENTS = 64
"""Of one group."""

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "uint8": 1,
}
"""Bytes of one element. Packed 4-bit values are counted as uint8."""


@dataclass(frozen=True, slots=True)
class Component:
    """One component of every layer of a group (or of `layers`).

    Attributes:
        name: of the component.
        tensor: components of one tensor may be interleaved.
        units: of the whole model.
        shards: units held, by tp_rank.
        content: elements of one unit of one state.
        dtype: of an element.
        rows: states of a state group's block; 0 for groups of tokens.
        tokens_per_state: tokens one state stands for.
        format: see `Plane.format`.
        granule: states; 0: a whole page.
        units_divide: see `Plane.units_divide`.
        optional: see `Plane.optional_cover`.
        layers: layers that have it; None: all of the group.
    """

    name: str
    tensor: str
    units: int
    shards: tuple[Interval, ...]
    content: int
    dtype: str
    rows: int
    tokens_per_state: Fraction
    format: str
    granule: int
    units_divide: bool
    optional: bool
    layers: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What groups inherit: the file's own fields and its `model`, or a group's over them."""

    tp_size: int
    block_size: int | None = None
    num_blocks: int | None = None
    layout: str = "HND"
    kv: str | None = None
    cross_layer: bool = False
    order: tuple[str, ...] | None = None
    shards: tuple[Interval, ...] | None = None
    attention: str = "gqa"
    kv_heads: int | None = None
    head_dim: int | None = None
    latent_dim: int | None = None
    rope_dim: int = 0
    dtype: str | None = None


def read_components(
    fields: Fields, defaults: Defaults, kind: GroupKind, token_shards: int, layers: tuple[int, ...]
) -> tuple[Component, ...]:
    """The components that a group names, or those of its attention; raises `InvalidField`."""
    reader = _ComponentReader(fields, defaults, token_shards, state=kind is GroupKind.STATE)
    items = fields.array("components", "a list of components")
    if items is None:
        if kind is GroupKind.STATE:
            raise InvalidField(fields.at("components"), MISSING, "a list of components: a state has no default")
        names = ["key", "value"]
        if defaults.attention == "mla":
            names = ["latent", "rope"] if defaults.rope_dim else ["latent"]
        return tuple(reader.read(Fields({"name": name}, fields.path)) for name in names)
    if len(items) > MAX_COMPONENTS:
        raise InvalidField(fields.at("components"), f"{len(items)} components", f"at most {MAX_COMPONENTS}")
    components = tuple(reader.read(Fields(item, path)) for path, item in items)
    for (path, _), component in zip(items, components, strict=True):
        strange = (component.layers or frozenset()) - set(layers)
        if strange:
            raise InvalidField(f"{path}.layers", min(strange), "layers of the group")
        if [other.name for other in components].count(component.name) > 1:
            raise InvalidField(f"{path}.name", component.name, "a name that no other component of the group has")
    return components


class _ComponentReader:
    """Reads components of one group; what they leave out is the group's."""

    def __init__(self, group: Fields, defaults: Defaults, token_shards: int, *, state: bool) -> None:
        self._defaults = defaults
        self._token_shards = token_shards
        self._state = state
        self._format = group.text("format", "plain")
        self._granule = _read_granule(group, 0 if self._format == "opaque" else 1)
        self._divide = group.flag("units_divide", self._format != "opaque")
        self._optional = group.flag("optional", False)
        self._tokens_per_state = group.ratio("tokens_per_state", Fraction(1))

    def read(self, fields: Fields) -> Component:
        """One component."""
        defaults, name = self._defaults, fields.text("name", high=64)
        heads = 1 if defaults.attention == "mla" else defaults.kv_heads
        units = fields.integer("units", None if self._state else heads, 1, 1 << 24)
        if units is None:
            missing = fields.at("units") if self._state else "model.kv_heads"
            raise InvalidField(missing, MISSING, "an integer of at least 1")
        content = fields.integer("content", self._default_content(name), 1, 1 << 24)
        if content is None:
            missing = {"latent": "model.latent_dim", "rope": "model.rope_dim"}.get(name, "model.head_dim")
            raise InvalidField(missing, MISSING, "an integer of at least 1")
        dtype = fields.choice("dtype", DTYPE_BYTES, defaults.dtype)
        if dtype is None:
            raise InvalidField("model.dtype", MISSING, f"one of {', '.join(DTYPE_BYTES)}")
        layers = fields.array("layers", "a list of layer indices and [begin, end] intervals")
        own_format = fields.text("format", self._format)
        opaque = own_format == "opaque" and self._format != "opaque"
        component = Component(
            name=name,
            tensor=fields.text("tensor", self._default_tensor(name), 64),
            units=units,
            shards=self._shards(fields, units),
            content=content,
            dtype=dtype,
            rows=fields.integer("rows", 1, 1, 1 << 20) if self._state else 0,
            tokens_per_state=fields.ratio("tokens_per_state", self._tokens_per_state),
            format=own_format,
            granule=_read_granule(fields, 0 if opaque else self._granule),
            units_divide=fields.flag("units_divide", not opaque and self._divide),
            optional=fields.flag("optional", self._optional),
            layers=None if layers is None else frozenset(indices(layers, MAX_LAYERS)),
        )
        if self._state:
            fields.refuse(("tokens_per_state",), "for a state")
        else:
            fields.refuse(("rows",), 'for a group that is not of kind "state"')
        fields.finish()
        return component

    def _default_content(self, name: str) -> int | None:
        if self._state:
            return 1
        if self._defaults.attention == "mla":
            return self._defaults.rope_dim or None if name == "rope" else self._defaults.latent_dim
        return self._defaults.head_dim

    def _default_tensor(self, name: str) -> str:
        if not self._state:
            return "kv"
        return "conv" if name.startswith("conv_") else name

    def _shards(self, fields: Fields, units: int) -> tuple[Interval, ...]:
        """Units by tp_rank. Ranks that share their units' tokens out among them (`token_shard`) hold the same units."""
        defaults = self._defaults
        tp_size = defaults.tp_size
        own = fields.intervals("shards", tp_size, "tp_rank", units)
        if own:
            return own
        if fields.flag("replicated", False):
            return (Interval(0, units),) * tp_size
        if defaults.shards and units == defaults.kv_heads and not self._state:
            return defaults.shards
        by_rule = shards(tp_size // self._token_shards, units)
        return tuple(by_rule[rank // self._token_shards] for rank in range(tp_size))


def _read_granule(fields: Fields, default: int) -> int:
    if fields.has("granule") and fields.value("granule") == "page":
        return 0
    return fields.integer("granule", default, 1, 1 << 20)
