"""The groups of a geometry file with all that they inherit, checked against each other and against the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvferry.errors import InvalidField
from kvferry.geometry.file.described import MISSING, at, short
from kvferry.geometry.file.fields import (
    DTYPE_BYTES,
    MAX_LAYERS,
    Content,
    FileComponent,
    FileGroup,
    GeometryFile,
    Meaning,
    Table,
)
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Interval
from kvferry.geometry.sharding import shards

KINDS = {"full": GroupKind.TOKENS, "window": GroupKind.WINDOW, "state": GroupKind.STATE}


@dataclass(frozen=True, slots=True)
class Component:
    """One component of every layer of a group (or of `layers`).

    Attributes:
        name: of the component.
        tensor: components of one tensor may be interleaved.
        shards: units held, by tp_rank.
        page_states: states of one page.
        state_bytes: bytes of one unit of one state.
        layers: layers that have it; None: all of the group.
        plane: the fields of its planes that are the same on every rank and layer.
    """

    name: str
    tensor: str
    shards: tuple[Interval, ...]
    page_states: int
    state_bytes: int
    layers: frozenset[int] | None
    plane: dict[str, Any]


class GroupPart:
    """One group. Raises `InvalidField` for fields that do not fit each other.

    Attributes:
        group: as the engine declares it.
        fields: what the file says of it, with what it inherits.
        layers: indices, in memory order.
        components: of each layer, in memory order.
        order: of axes, outermost first.
        pages: of a block.
    """

    def __init__(self, file: GeometryFile, path: str, said: Table, values: dict[str, Any]) -> None:
        self._file, self._path, self._said = file, path, said
        fields = self.fields = FileGroup.model_construct(**values)
        self._state = fields.kind == "state"
        if isinstance(said, FileGroup):
            check_content(path, said, fields.attention)
        if fields.shards and said.shards is None and fields.kv_heads != file.model.kv_heads:
            raise InvalidField(
                at(path, "shards"), MISSING, "a list of intervals: the group's kv_heads are not the model's"
            )
        self._shards = checked_shards(at(path, "shards"), fields.shards, file.tp_size, fields.kv_heads)
        own_names = fields.layer_name != Table.model_fields["layer_name"].default
        most = MAX_LAYERS if own_names else file.model.layers
        self.layers = tuple(range(file.model.layers))
        if fields.layers is not None:
            self.layers = _indices(at(path, "layers"), fields.layers, most)
        if fields.stage is not None and fields.stage >= file.pp_size:
            raise self._wrong("stage", fields.stage, f"below pp_size {file.pp_size}")
        num_blocks = self._needed("num_blocks")
        block_size = 0 if self._state else self._needed("block_size")
        if fields.null_block is not None and fields.null_block >= num_blocks:
            raise self._wrong("null_block", fields.null_block, f"below num_blocks {num_blocks}")
        window = self._needed("window") if fields.kind == "window" else 0
        self.group = Group(
            fields.name, KINDS[fields.kind], block_size, num_blocks, fields.null_block, window, fields.pool
        )
        if file.tp_size % fields.token_shard.count:
            raise self._wrong("token_shard.count", fields.token_shard.count, f"a divisor of tp_size {file.tp_size}")
        self._page_tokens = fields.page_size or block_size
        if self._page_tokens and block_size % self._page_tokens:
            raise self._wrong("page_size", self._page_tokens, f"a divisor of block_size {block_size}")
        self.pages = 1 if self._state else block_size // self._page_tokens
        self.order = self._axes()
        self.components = self._components()

    def _wrong(self, name: str, value: object, expected: str) -> InvalidField:
        return InvalidField(at(self._path, name), short(value), expected)

    def _needed(self, name: str) -> int:
        value: int | None = getattr(self.fields, name)
        if value is None:
            raise self._wrong(name, MISSING, "an integer of at least 1")
        return value

    def _axes(self) -> tuple[str, ...]:
        """Return the order of axes, outermost first, that the words of the file stand for."""
        fields, own = self.fields, self._said
        if fields.order and (own.order or not self._state):
            return tuple(fields.order)
        cross = fields.tensors == "cross_layer"
        around, paging = ([], ["block", "page", "layer"]) if cross else (["layer"], ["block", "page"])
        if self._state:
            rows_first = fields.rows == "rows_first"
            inner = ["token", "component", "unit"] if rows_first else ["component", "unit", "token"]
            # What the file says of keys and values does not bind its states.
            if own.kv == "packed":
                raise self._wrong("kv", own.kv, '"apart" or "blocks_first", for a state')
            apart = own.kv == "apart"
            return (*around, "tensor", *paging, *inner) if apart else (*around, *paging, "tensor", *inner)
        inner = ["unit", "token"] if fields.layout == "HND" else ["token", "unit"]
        kv = fields.kv or ("packed" if fields.attention == "mla" else "apart")
        if kv == "apart":
            return (*around, "tensor", "component", *paging, *inner)
        if kv == "blocks_first":
            return (*around, *paging, "tensor", "component", *inner)
        return (*around, *paging, "tensor", *inner, "component")

    def _components(self) -> tuple[Component, ...]:
        fields, given = self.fields, self.fields.components
        if given is None:
            if self._state:
                raise self._wrong("components", MISSING, "a list of components: a state has no default")
            names = ("latent", "rope")[: 2 if fields.rope_dim else 1] if fields.attention == "mla" else ("key", "value")
            return tuple(self._component(self._path, FileComponent(name=name)) for name in names)
        found: list[Component] = []
        for index, said in enumerate(given):
            path = at(self._path, f"components[{index}]")
            found.append(self._component(path, said))
            if strange := (found[-1].layers or frozenset()) - set(self.layers):
                raise InvalidField(f"{path}.layers", min(strange), "layers of the group")
            if [other.name for other in given].count(said.name) > 1:
                raise InvalidField(f"{path}.name", said.name, "a name that no other component of the group has")
        return tuple(found)

    def _component(self, path: str, said: FileComponent) -> Component:
        group, state, mla = self.fields, self._state, self.fields.attention == "mla"
        refused = "tokens_per_state" if state else "rows"
        if refused in said.model_fields_set:
            because = "for a state" if state else 'for a group that is not of kind "state"'
            raise InvalidField(f"{path}.{refused}", getattr(said, refused), f"no such field {because}")
        found = FileComponent.model_construct(**{**group.given(Meaning), **said.given(FileComponent)})
        opaque = found.format == "opaque"
        # A component that is opaque in a group that is not takes no granule from it.
        source = said if opaque and group.format != "opaque" else found
        whole = group.format == "opaque" or opaque
        granule = source.granule or ("page" if whole else 1)
        dim = {"latent": "latent_dim", "rope": "rope_dim"}.get(said.name, "latent_dim") if mla else "head_dim"
        units = _known(
            found.units or (None if state else 1 if mla else group.kv_heads),
            at(path, "units") if state else "model.kv_heads",
        )
        content = _known(found.content or (1 if state else getattr(group, dim) or None), f"model.{dim}")
        dtype = found.dtype or group.dtype
        if dtype is None:
            raise InvalidField("model.dtype", MISSING, f"one of {', '.join(DTYPE_BYTES)}")
        ratio = Fraction(1 if state else found.tokens_per_state)
        page_states = found.rows if state else self._page_states(said.name, ratio)
        conv = "conv" if said.name.startswith("conv_") else said.name
        return Component(
            name=said.name,
            tensor=found.tensor or (conv if state else "kv"),
            shards=self._units_held(path, found, units),
            page_states=page_states,
            state_bytes=content * DTYPE_BYTES[dtype],
            layers=None if found.layers is None else frozenset(_indices(f"{path}.layers", found.layers, MAX_LAYERS)),
            plane={
                "format": found.format,
                "dtype": dtype,
                "axis_size": units,
                "tokens_per_state": ratio,
                "token_granule": page_states if granule == "page" else granule,
                "units_divide": not whole if source.units_divide is None else source.units_divide,
                "optional_cover": found.optional,
            },
        )

    def _page_states(self, name: str, ratio: Fraction) -> int:
        count, tokens = self.fields.token_shard.count, self._page_tokens
        states = Fraction(tokens, count) / ratio
        if states.denominator != 1:
            raise self._wrong(
                "block_size" if tokens == self.group.block_tokens else "page_size",
                tokens,
                f"tokens that are whole states of {ratio} tokens on each of {count} token shards ({name} has {states} "
                "states per page)",
            )
        return states.numerator

    def _units_held(self, path: str, said: FileComponent, units: int) -> tuple[Interval, ...]:
        """Return units by tp_rank. Ranks that share out their units' tokens (`token_shard`) hold the same units."""
        tp_size, count = self._file.tp_size, self.fields.token_shard.count
        if said.shards is not None:
            return intervals(f"{path}.shards", said.shards, tp_size, units)
        if said.replicated:
            return (Interval(0, units),) * tp_size
        if self._shards and units == self.fields.kv_heads and not self._state:
            return self._shards
        by_rule = shards(tp_size // count, units)
        return tuple(by_rule[rank // count] for rank in range(tp_size))


def check_content(path: str, said: Content, attention: str) -> None:
    """Raise `InvalidField` for fields of another kind of attention."""
    mla = attention == "mla"
    because = f"for {attention}, which has {'latent_dim and rope_dim' if mla else 'kv_heads and head_dim'}"
    for name in ("kv_heads", "head_dim") if mla else ("latent_dim", "rope_dim"):
        if name in said.model_fields_set:
            raise InvalidField(at(path, name), getattr(said, name), f"no such field {because}")


def checked_shards(
    path: str, spans: Sequence[Interval] | None, tp_size: int, kv_heads: int | None
) -> tuple[Interval, ...] | None:
    """Return the heads held, by tp_rank; None: the file does not say."""
    if spans is None:
        return None
    if kv_heads is None:
        raise InvalidField(path, short([[span.begin, span.end] for span in spans]), "no such field without kv_heads")
    return intervals(path, spans, tp_size, kv_heads)


def intervals(path: str, spans: Sequence[Interval], count: int, size: int) -> tuple[Interval, ...]:
    """Return `count` intervals within ``[0, size)``; raises `InvalidField`."""
    if len(spans) != count:
        raise InvalidField(path, f"{len(spans)} intervals", f"a list of {count} intervals [begin, end]")
    for index, span in enumerate(spans):
        if span.end > size:
            raise InvalidField(f"{path}[{index}]", [span.begin, span.end], f"[begin, end] with end <= {size}")
    return tuple(spans)


def _indices(path: str, items: Sequence[int | Interval], size: int) -> tuple[int, ...]:
    """Return indices below `size`, given one by one or as intervals; in the order given, each once."""
    found: dict[int, None] = {}
    for place, item in enumerate(items):
        begin, end = (item.begin, item.end) if isinstance(item, Interval) else (item, item + 1)
        said = item if isinstance(item, int) else [begin, end]
        if end > size:
            raise InvalidField(f"{path}[{place}]", said, f"an index below {size}, or [begin, end]")
        if twice := [index for index in range(begin, end) if index in found]:
            raise InvalidField(f"{path}[{place}]", said, f"each index once; {twice[0]} is given twice")
        found.update(dict.fromkeys(range(begin, end)))
    return tuple(found)


def _known(value: int | None, path: str) -> int:
    if value is None:
        raise InvalidField(path, MISSING, "an integer of at least 1")
    return value
