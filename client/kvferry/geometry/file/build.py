"""From a checked file to an `EngineGeometry`: the groups with their inherited fields, checked against each other and
against the file; and every rank's planes in one virtual allocation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvferry.errors import BadGeometry, InvalidField
from kvferry.geometry.file.fields import (
    DTYPE_BYTES,
    MAX_LAYERS,
    MAX_RANKS,
    Content,
    FileComponent,
    FileGroup,
    GeometryFile,
    Meaning,
    Table,
    at,
    short,
)
from kvferry.geometry.model import EngineGeometry, Group, GroupKind, RankGeometry
from kvferry.geometry.plane import Interval, MemoryKind, Plane, TokenShard, shards

KINDS = {"full": GroupKind.TOKENS, "window": GroupKind.WINDOW, "state": GroupKind.STATE}

MAX_PLANES = 1 << 16
"""The most planes of all ranks together. No message could carry more."""
MAX_RANK_LAYERS = 1 << 20
"""Ranks times layers of all groups, held or not."""
FIRST_ADDRESS = 1 << 32
"""The beginning of each rank's allocation; not zero, so that no address looks like "none"."""
ALIGNMENT = 4096
"""Every pool of a rank begins at a multiple of this, as engines' allocations do."""


@dataclass(frozen=True, slots=True)
class _Component:
    """One component of the given layers of a group; None: of all its layers. Components of one `tensor` may be
    interleaved. `shards` has the units held, by tp_rank; `plane` has the fields that are the same in all its planes."""

    tensor: str
    shards: tuple[Interval, ...]
    layers: frozenset[int] | None
    plane: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Piece:
    """A rank's part of one component of one layer. `along` has the number of steps along each counted axis of the
    memory (`ORDER`), and the names of layer, tensor and component: pieces with the same name lie together. `plane` has
    the fields of its plane. `_nest` sets the strides, and the `offset` in bytes from the start of the group's memory.
    """

    along: dict[str, Any]
    plane: dict[str, Any]
    offset: int = 0


class _Part:
    """One group, as the engine declares it (`group`) and as the file does (`fields`, with the inherited ones). Layers,
    given by their indices, and the components of each are in the order of memory; the axes' `order` is outermost first;
    a block has `pages`; `padding` is unused bytes after each step of an axis. Raises `InvalidField` for fields that do
    not fit each other."""

    def __init__(self, file: GeometryFile, path: str, said: Table, values: dict[str, Any]) -> None:
        self._file, self._path, self._said = file, path, said
        fields = self.fields = FileGroup.model_construct(**values)
        self._state = fields.kind == "state"
        if isinstance(said, FileGroup):
            _check_content(path, said, fields.attention)
        if fields.shards and said.shards is None and fields.kv_heads != file.model.kv_heads:
            raise self._wrong("shards", None, "a list of intervals: the group's kv_heads are not the model's")
        self._shards = _checked_shards(at(path, "shards"), fields.shards, file.tp_size, fields.kv_heads)
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
        kind, null_block = KINDS[fields.kind], fields.null_block
        self.group = Group(fields.name, kind, block_size, num_blocks, null_block, window, fields.pool)
        if file.tp_size % fields.token_shard.count:
            raise self._wrong("token_shard.count", fields.token_shard.count, f"a divisor of tp_size {file.tp_size}")
        self._page_tokens = fields.page_size or block_size
        if self._page_tokens and block_size % self._page_tokens:
            raise self._wrong("page_size", self._page_tokens, f"a divisor of block_size {block_size}")
        self.pages = 1 if self._state else block_size // self._page_tokens
        self.padding = {"page": fields.page_padding, "block": fields.block_padding}
        self.order = self._axes()
        self.components = self._components()

    def _wrong(self, name: str, value: object, expected: str) -> InvalidField:
        return InvalidField(at(self._path, name), short(value), expected)

    def _needed(self, name: str) -> int:
        return _known(getattr(self.fields, name), at(self._path, name))

    def _axes(self) -> tuple[str, ...]:
        """The order of axes, outermost first, that the words of the file describe."""
        fields, own = self.fields, self._said
        if fields.order and (own.order or not self._state):
            return tuple(fields.order)
        around, paging = ("", "block page layer") if fields.tensors == "cross_layer" else ("layer", "block page")
        if self._state:
            inner = "token component unit" if fields.rows == "rows_first" else "component unit token"
            # The file's `kv` for keys and values does not bind its states.
            kv = own.kv or "blocks_first"
            orders = {"apart": f"{around} tensor {paging} {inner}", "blocks_first": f"{around} {paging} tensor {inner}"}
            if kv not in orders:
                raise self._wrong("kv", kv, '"apart" or "blocks_first", for a state')
        else:
            inner = "unit token" if fields.layout == "HND" else "token unit"
            kv = fields.kv or ("packed" if fields.attention == "mla" else "apart")
            orders = {
                "apart": f"{around} tensor component {paging} {inner}",
                "blocks_first": f"{around} {paging} tensor component {inner}",
                "packed": f"{around} {paging} tensor {inner} component",
            }
        return tuple(orders[kv].split())

    def _components(self) -> tuple[_Component, ...]:
        fields, given = self.fields, self.fields.components
        if given is None:
            if self._state:
                raise self._wrong("components", None, "a list of components: a state has no default")
            names = ("latent", "rope")[: 2 if fields.rope_dim else 1] if fields.attention == "mla" else ("key", "value")
            return tuple(self._component(self._path, FileComponent(name=name)) for name in names)
        found: list[_Component] = []
        for index, said in enumerate(given):
            path = at(self._path, f"components[{index}]")
            found.append(self._component(path, said))
            if strange := (found[-1].layers or frozenset()) - set(self.layers):
                raise InvalidField(f"{path}.layers", min(strange), "layers of the group")
            if [other.name for other in given].count(said.name) > 1:
                raise InvalidField(f"{path}.name", said.name, "a name that no other component of the group has")
        return tuple(found)

    def _component(self, path: str, said: FileComponent) -> _Component:
        group, state, mla = self.fields, self._state, self.fields.attention == "mla"
        refused = "tokens_per_state" if state else "rows"
        if refused in said.model_fields_set:
            because = "for a state" if state else 'for a group that is not of kind "state"'
            raise InvalidField(f"{path}.{refused}", getattr(said, refused), f"no such field {because}")
        found = FileComponent.model_construct(**{**group.given(Meaning), **said.given(FileComponent)})
        opaque = found.format == "opaque"
        # An opaque component in a group that is not opaque inherits no granule.
        source = said if opaque and group.format != "opaque" else found
        whole = group.format == "opaque" or opaque
        granule = source.granule or ("page" if whole else 1)
        dim = {"latent": "latent_dim", "rope": "rope_dim"}.get(said.name, "latent_dim") if mla else "head_dim"
        units = found.units or (None if state else 1 if mla else group.kv_heads)
        units = _known(units, at(path, "units") if state else "model.kv_heads")
        content = _known(found.content or (1 if state else getattr(group, dim) or None), f"model.{dim}")
        dtype = found.dtype or group.dtype
        if dtype is None:
            raise InvalidField("model.dtype", None, f"one of {', '.join(DTYPE_BYTES)}")
        ratio = Fraction(1 if state else found.tokens_per_state)
        page_states = found.rows if state else self._page_states(said.name, ratio)
        conv = "conv" if said.name.startswith("conv_") else said.name
        return _Component(
            tensor=found.tensor or (conv if state else "kv"),
            shards=self._units_held(path, found, units),
            layers=None if found.layers is None else frozenset(_indices(f"{path}.layers", found.layers, MAX_LAYERS)),
            plane={
                "component": said.name,
                "group": group.name,
                "format": found.format,
                "dtype": dtype,
                "memory_kind": MemoryKind[self._file.memory.upper()],
                "device": self._file.device,
                "num_blocks": self.group.num_blocks,
                "page_tokens": page_states,
                "block_states": page_states * self.pages,
                "state_bytes": content * DTYPE_BYTES[dtype],
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
            field = "block_size" if tokens == self.group.block_tokens else "page_size"
            expected = f"tokens that are whole states of {ratio} tokens on each of {count} token shards"
            raise self._wrong(field, tokens, f"{expected} ({name} has {states} states per page)")
        return states.numerator

    def _units_held(self, path: str, said: FileComponent, units: int) -> tuple[Interval, ...]:
        """Units by tp_rank. Ranks that divide the tokens of their units (`token_shard`) hold the same units."""
        tp_size, count = self._file.tp_size, self.fields.token_shard.count
        if said.shards is not None:
            return _intervals(f"{path}.shards", said.shards, tp_size, units)
        if said.replicated:
            return (Interval(0, units),) * tp_size
        if self._shards and units == self.fields.kv_heads and not self._state:
            return self._shards
        by_rule = shards(tp_size // count, units)
        return tuple(by_rule[rank // count] for rank in range(tp_size))

    def pieces(self, stages: Sequence[Interval], tp_rank: int, pp_rank: int) -> list[_Piece]:
        """The pieces of the group that a rank holds."""
        stage, last = stages[pp_rank], pp_rank == len(stages) - 1
        past_all = max(stage.end for stage in stages)

        def held(layer: int) -> bool:
            if self.fields.stage is not None:
                return self.fields.stage == pp_rank
            return stage.begin <= layer < stage.end or (last and layer >= past_all)

        said = self.fields.token_shard
        tokens = TokenShard(tp_rank % said.count, said.count, said.interleave)
        found = []
        for layer in filter(held, self.layers):
            name = self.fields.layer_name.replace("{}", str(layer))
            for component in self.components:
                if component.layers is None or layer in component.layers:
                    units = component.shards[tp_rank]
                    plane = {**component.plane, "layer": name, "units": units, "token_shard": tokens}
                    along = {
                        "layer": name,
                        "tensor": component.tensor,
                        "component": plane["component"],
                        "block": plane["num_blocks"],
                        "page": self.pages,
                        "unit": len(units),
                        "token": plane["page_tokens"],
                    }
                    found.append(_Piece(along, plane))
        return found


def build_engine(file: GeometryFile) -> EngineGeometry:
    """The engine that a file describes. Raises `InvalidField` for fields that do not fit each other, and `BadGeometry`
    for a layout that contradicts itself."""
    tp_size, pp_size, layers = file.tp_size, file.pp_size, file.model.layers
    if tp_size * pp_size > MAX_RANKS:
        raise InvalidField("pp_size", pp_size, f"at most {MAX_RANKS} ranks in all")
    if file.stages is None and pp_size > layers:
        raise InvalidField("pp_size", pp_size, f"at most the {layers} layers of the model")
    stages = shards(pp_size, layers) if file.stages is None else _intervals("stages", file.stages, pp_size, layers)
    _check_content("model", file.model, file.model.attention)
    # Also where every group has shards of its own.
    _checked_shards("shards", file.shards, tp_size, file.model.kv_heads)
    parts = [_Part(file, *table) for table in file.tables()]
    names = [part.group.name for part in parts]
    if twice := [index for index, name in enumerate(names) if names.count(name) > 1]:
        raise InvalidField(f"groups[{twice[0]}].name", names[twice[0]], "a name that no other group has")
    planes = tp_size * sum(len(part.layers) * len(part.components) for part in parts)
    if planes > MAX_PLANES:
        raise InvalidField("model.layers", layers, f"layers that make at most {MAX_PLANES} planes, not {planes}")
    looked_at = tp_size * pp_size * sum(len(part.layers) for part in parts)
    if looked_at > MAX_RANK_LAYERS:
        raise InvalidField("pp_size", pp_size, f"ranks times layers of at most {MAX_RANK_LAYERS}, not {looked_at}")
    ranks = [_rank(file, parts, stages, tp, pp) for pp in range(pp_size) for tp in range(tp_size)]
    groups = tuple(part.group for part in parts)
    return EngineGeometry(file.engine_id, groups, tuple(ranks), file.identity, partial=file.partial)


def _rank(
    file: GeometryFile, parts: Sequence[_Part], stages: Sequence[Interval], tp_rank: int, pp_rank: int
) -> RankGeometry:
    planes: list[Plane] = []
    address = FIRST_ADDRESS
    pools: dict[tuple[str, str], list[_Part]] = {}
    for part in parts:
        key = ("pool", part.group.pool) if part.group.pool else ("group", part.group.name)
        pools.setdefault(key, []).append(part)
    for pool in pools.values():
        held = [(part, pieces) for part in pool if (pieces := part.pieces(stages, tp_rank, pp_rank))]
        sizes = [_nest(part.order, pieces, part.padding) for part, pieces in held]
        block_bytes = 0
        if len(pool) > 1 and held:
            # Groups of a pool share its block ids, so block n has the same bytes in all of them: equally long.
            block_bytes = max(piece.plane["block_stride"] for _, pieces in held for piece in pieces)
            sizes = [_nest(part.order, pieces, part.padding, block_bytes) for part, pieces in held]
        for _, pieces in held:
            found = [Plane(base=address + piece.offset, **piece.plane) for piece in pieces]
            if block_bytes:
                _check_pool(pool, found, address, block_bytes)
            planes += found
        address += -(-max(sizes, default=0) // ALIGNMENT) * ALIGNMENT
    count = max(part.fields.token_shard.count for part in parts)
    labels = {"tp_rank": tp_rank, "pp_rank": pp_rank, **({"dcp_rank": tp_rank % count} if count > 1 else {})}
    return RankGeometry(pp_rank * file.tp_size + tp_rank, tuple(planes), labels)


def _nest(axes: Sequence[str], pieces: Sequence[_Piece], padding: Mapping[str, int], block_bytes: int = 0) -> int:
    """Place the pieces with their axes nested as ordered, outermost first; returns the bytes of the whole. `padding` is
    unused bytes after each step of an axis; blocks are at least `block_bytes` apart. Raises `BadGeometry` if pieces
    that lie side by side inside a counted axis have different counts of it."""
    if not axes:
        (piece,) = pieces
        piece.offset = 0
        return int(piece.plane["state_bytes"])
    axis, rest = axes[0], axes[1:]
    if axis in ("layer", "tensor", "component"):
        size = 0
        beside: dict[str, list[_Piece]] = {}
        for piece in pieces:
            beside.setdefault(piece.along[axis], []).append(piece)
        for members in beside.values():
            more = _nest(rest, members, padding, block_bytes)
            for piece in members:
                piece.offset += size
            size += more
        return size
    stride = _nest(rest, pieces, padding, block_bytes) + padding.get(axis, 0)
    if axis == "block":
        stride = max(stride, block_bytes)
    counts: dict[int, _Piece] = {piece.along[axis]: piece for piece in pieces}
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[:2]
        where = " and ".join(f"{piece.along['layer']}/{piece.along['component']}" for piece in (first, second))
        problem = f"they lie side by side inside the {axis} axis, but have {one} and {other} of it"
        raise BadGeometry(where, f'{problem}; give them different "tensor"s, or another "kv" or "order"')
    (count,) = counts
    for piece in pieces:
        piece.plane[f"{axis}_stride"] = stride if count > 1 or axis == "block" else 0
    return stride * count


def _check_pool(pool: Sequence[_Part], planes: Iterable[Plane], address: int, block_bytes: int) -> None:
    """Check that different block ids of a pool never share memory, whichever of its groups use them."""
    where = f"pool {pool[0].group.pool!r}"
    counts = {part.group.num_blocks for part in pool}
    if len(counts) > 1:
        raise BadGeometry(where, f"its groups have {sorted(counts)} blocks; they share one space of block ids")
    tensor_bytes = block_bytes * counts.pop()
    for plane in planes:
        at = (plane.base - address) % tensor_bytes
        if plane.block_stride != block_bytes or at + plane.block_extent > block_bytes:
            problem = f"block n of {plane.name} does not lie within block n of the pool"
            sizes = f"{plane.block_extent} bytes, blocks {plane.block_stride} bytes apart, the pool's {block_bytes}"
            raise BadGeometry(where, f'{problem}: {sizes}; use another "order", with unit and token inside block')


def _check_content(path: str, said: Content, attention: str) -> None:
    """Raise `InvalidField` for fields of the other kind of attention."""
    mla = attention == "mla"
    because = f"for {attention}, which has {'latent_dim and rope_dim' if mla else 'kv_heads and head_dim'}"
    for name in ("kv_heads", "head_dim") if mla else ("latent_dim", "rope_dim"):
        if name in said.model_fields_set:
            raise InvalidField(at(path, name), getattr(said, name), f"no such field {because}")


def _checked_shards(
    path: str, spans: Sequence[Interval] | None, tp_size: int, kv_heads: int | None
) -> tuple[Interval, ...]:
    """The heads held, by tp_rank; empty: the file has no shards. Raises `InvalidField`."""
    if spans is None:
        return ()
    if kv_heads is None:
        raise InvalidField(path, short([[span.begin, span.end] for span in spans]), "no such field without kv_heads")
    return _intervals(path, spans, tp_size, kv_heads)


def _intervals(path: str, spans: Sequence[Interval], count: int, size: int) -> tuple[Interval, ...]:
    """`count` intervals within ``[0, size)``; raises `InvalidField`."""
    if len(spans) != count:
        raise InvalidField(path, f"{len(spans)} intervals", f"a list of {count} intervals [begin, end]")
    for index, span in enumerate(spans):
        if span.end > size:
            raise InvalidField(f"{path}[{index}]", [span.begin, span.end], f"[begin, end] with end <= {size}")
    return tuple(spans)


def _indices(path: str, items: Sequence[int | Interval], size: int) -> tuple[int, ...]:
    """Indices below `size`, given singly or as intervals; in the order given, each once."""
    found: dict[int, None] = {}
    for index, item in enumerate(items):
        begin, end = (item.begin, item.end) if isinstance(item, Interval) else (item, item + 1)
        said = item if isinstance(item, int) else [begin, end]
        if end > size:
            raise InvalidField(f"{path}[{index}]", said, f"an index below {size}, or [begin, end]")
        if twice := [known for known in range(begin, end) if known in found]:
            raise InvalidField(f"{path}[{index}]", said, f"each index once; {twice[0]} is given twice")
        found.update(dict.fromkeys(range(begin, end)))
    return tuple(found)


def _known(value: int | None, path: str) -> int:
    """A value that the file has to give; raises `InvalidField` if the value is missing."""
    if value is None:
        raise InvalidField(path, None, "an integer of at least 1")
    return value
