"""The fields of a geometry file, each described once: the checks, the errors with their paths, and
docs/geometry.schema.json (``make schema``) come from these descriptions. Groups and components inherit: see
`GeometryFile.tables`."""

from __future__ import annotations

import difflib
import re
import reprlib
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvferry.errors import InvalidField
from kvferry.geometry.plane import Interval

MAX_RANKS = 4096
MAX_LAYERS = 4096
BIG = 1 << 48
"""The largest size in a file: products of a few sizes still fit an address, or the plane refuses them."""

DTYPE_BYTES = {
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8"), 1),
    **dict.fromkeys(("float32", "int32"), 4),
    "float64": 8,
}
"""Bytes of one element."""

ORDER = ("layer", "block", "page", "tensor", "component", "unit", "token")
"""The axes of a group's memory. Layers, tensors and components may differ in size; the others are counted."""

OF_TOKENS = ("block_size", "page_size", "token_shard", "window", "shards", "layout", "tokens_per_state")
"""Fields of a group that a state does not have."""


def _interval(edges: tuple[int, int]) -> Interval:
    if edges[0] >= edges[1]:
        raise ValueError("[begin, end] with begin < end")
    return Interval(*edges)


def _ratio(value: int | tuple[int, int]) -> Fraction:
    return Fraction(*value) if isinstance(value, tuple) else Fraction(value)


def _whole_order(order: list[str]) -> list[str]:
    """Add `page` inside `block` and `tensor` outside `component` where they are absent."""
    for absent, neighbour, after in (("page", "block", 1), ("tensor", "component", 0)):
        if absent not in order and neighbour in order:
            place = order.index(neighbour) + after
            order = [*order[:place], absent, *order[place:]]
    if sorted(order) != sorted(ORDER):
        raise ValueError(f"each of {', '.join(ORDER)} once, outermost first (page and tensor may be left out)")
    return order


Index = Annotated[int, Field(ge=0, le=BIG)]
Positive = Annotated[int, Field(ge=1, le=1 << 31)]

if TYPE_CHECKING:
    from typing import Optional as Own

    Dtype: TypeAlias = str
    Axis: TypeAlias = str
    Span: TypeAlias = Interval
    Ratio: TypeAlias = Fraction | int
else:
    Dtype, Axis = Literal[tuple(DTYPE_BYTES)], Literal[ORDER]
    Span = Annotated[tuple[Index, Index], Strict(False), AfterValidator(_interval)]
    Ratio = Annotated[Positive | Annotated[tuple[Positive, Positive], Strict(False)], AfterValidator(_ratio)]

    class Own:
        """The type of a field that is None where the file omits it, and may not be null in the file."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind


Granule = Literal["page"] | Annotated[int, Field(ge=1, le=1 << 20)]
Order = Annotated[list[Axis], AfterValidator(_whole_order)]


@dataclass(frozen=True, slots=True)
class Never:
    """Fields that an object must not have if `field` is given or, with a `value`, if `field` has (with `unless`, has
    not) that value."""

    names: tuple[str, ...]
    because: str
    field: str
    value: str | None = None
    unless: bool = False


class Described(BaseModel):
    """An object of a file. An unknown field is an error, because a typing mistake must not mean the default. The
    docstring of a field is its description in the schema."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)
    never: ClassVar[tuple[Never, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, value: object) -> object:
        known = sorted(field.alias or name for name, field in cls.model_fields.items())
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f'"{near[0]}"?' if near else f"one of {', '.join(known)}"
                raise PydanticCustomError("field", "a known field: {hint}", {"field": name, "hint": hint})
        return value

    @model_validator(mode="after")
    def _has_no_refused_field(self) -> Described:
        for rule in self.never:
            holds = getattr(self, rule.field) == rule.value if rule.value else rule.field in self.model_fields_set
            given = [name for name in rule.names if name in self.model_fields_set]
            if given and holds != rule.unless:
                raise PydanticCustomError("field", "no such field {why}", {"field": given[0], "why": rule.because})
        return self

    def given(self, kind: type[Described]) -> dict[str, Any]:
        """The fields of `kind` that the file gives in this object."""
        return {name: getattr(self, name) for name in kind.model_fields if name in self.model_fields_set}


_PHRASES = {
    "model_type": "an object",
    "dict_type": "an object",
    "tuple_type": "a list of two integers",
    "missing": "a value: this field has no default",
    "string_pattern_mismatch": "a name with {} for the layer's index",
}
_AROUND = re.compile(r"^\w+ should (be |have )?|^Value error, | after validation, not \d+")


def refusal(error: ValidationError, document: object) -> InvalidField:
    """The first mistake. A field that may have several types has an error for each type, at the same path."""
    found: dict[str, tuple[object, list[str]]] = {}
    for detail in error.errors(include_url=False):
        value, path = document, ""
        field = detail.get("ctx", {}).get("field")
        for part in (*detail["loc"], *([] if field is None else [field])):
            known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
            if part not in known:
                if detail["type"] == "missing":
                    value, path = None, at(path, part)
                break  # The rest of the location names the attempted type.
            value, path = value[part], at(path, part)  # type: ignore[index]
        phrase = _PHRASES.get(detail["type"], _AROUND.sub("", detail["msg"]))
        phrase = phrase.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
        found.setdefault(path, (value, []))[1].append(phrase)
    path, (value, phrases) = next(iter(found.items()))
    return InvalidField(path or "the document", short(value), " or ".join(dict.fromkeys(phrases)))


def at(path: str, name: str | int) -> str:
    """The JSON path of a field or an item."""
    return f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}" if path else name


def short(value: object) -> object:
    """The value for an error message; a long value is shortened."""
    return reprlib.repr(value) if isinstance(value, (dict, list)) else value


def integer(default: Any, low: int, high: int) -> Any:
    """An integer field in ``[low, high]``."""
    return Field(default, ge=low, le=high)


def text(default: Any, high: int, **more: Any) -> Any:
    """A string field of 1 to `high` characters."""
    return Field(default, min_length=1, max_length=high, **more)


class Content(Described):
    """What one layer holds of a token."""

    attention: Literal["gqa", "mha", "mla"] = "gqa"
    """gqa and mha hold a key and a value for each KV head; mla holds one latent (and rope) for all."""
    kv_heads: Own[int] = integer(None, 1, 1 << 20)
    """KV heads of the whole model."""
    head_dim: Own[int] = integer(None, 1, 1 << 24)
    """Elements of a head's key, and of its value."""
    latent_dim: Own[int] = integer(None, 1, 1 << 24)
    """mla: elements of the latent."""
    rope_dim: int = integer(0, 0, 1 << 24)
    """mla: elements of the rope part beside it. 0: no such component."""
    dtype: Own[Dtype] = None
    """Type of one element. Packed 4-bit values are counted as uint8."""


class FileModel(Content):
    """What the model's layers hold."""

    layers: int = integer(..., 1, MAX_LAYERS)
    """Number of layers."""


class Meaning(Described):
    """What the bytes mean, and what may be cut. A group's fields hold for components that do not have them."""

    format: str = text("plain", 256)
    """What the bytes mean; compared verbatim. "plain": natural order. "opaque": nothing is known, pages move whole."""
    granule: Own[Granule] = None
    """Consecutive states that may not be cut apart; "page": a whole page. Default 1, or a page where format is
    "opaque"."""
    units_divide: Own[bool] = None
    """Whether single heads or channels may be read. Default true, or false where format is "opaque"."""
    optional: bool = False
    """The planes may stay uncovered by a source."""
    tokens_per_state: Ratio = 1
    """Tokens that one state of a compressed cache stands for: an integer, or [numerator, denominator]."""


class FileComponent(Meaning):
    """One component of each layer of a group."""

    name: str = text(..., 64)
    """key, value, latent, rope, index, index_scale, key_scale, conv_x, ssm … Unique in its group."""
    units: Own[int] = integer(None, 1, 1 << 24)
    """Heads or channels of the whole model. Default: kv_heads, or 1 for mla; none for states."""
    content: Own[int] = integer(None, 1, 1 << 24)
    """Elements of one unit of one state. Default: head_dim, latent_dim or rope_dim; 1 for states."""
    dtype: Own[Dtype] = None
    """Type of one element. Default: that of the group."""
    rows: int = integer(1, 1, 1 << 20)
    """State: its number of rows. Rows use the token axis."""
    replicated: bool = False
    """Every rank holds all units."""
    shards: Own[list[Span]] = None
    """Units held, by tp_rank: tp_size intervals."""
    tensor: Own[str] = text(None, 64)
    """Components of one tensor lie together where the order has component inside token. Default: one tensor; for states
    conv for conv_ components, and one for each other."""
    layers: Own[list[Index | Span]] = Field(default=None, min_length=1)
    """Layers of the group that have the component. Default: all."""


class Placing(Described):
    """How a cache is divided and where it lies. The file's fields hold for groups that do not have them."""

    block_size: Own[int] = integer(None, 1, 1 << 20)
    """Tokens per block, over all token shards."""
    num_blocks: Own[int] = integer(None, 1, (1 << 31) - 1)
    """Number of blocks."""
    layout: Literal["HND", "NHD"] = "HND"
    """HND: heads outside tokens; NHD: tokens outside heads."""
    kv: Own[Literal["apart", "packed", "blocks_first"]] = None
    """apart: a tensor for each component; blocks_first: component after component inside each page; packed: components
    side by side for each head and token. Default apart; packed for mla; blocks_first for states, which cannot be
    packed."""
    tensors: Literal["per_layer", "cross_layer"] = "per_layer"
    """per_layer: a tensor for each layer, one after the other; cross_layer: one tensor whose pages hold all layers."""
    order: Own[Order] = Field(default=None, json_schema_extra={"minItems": 5, "maxItems": 7, "uniqueItems": True})
    """Every axis of the memory, outermost first, instead of layout, kv and tensors. page (inside block) and tensor
    (outside component) may be left out."""
    shards: Own[list[Span]] = None
    """KV heads held, by tp_rank: tp_size intervals. Default: rank x of n holds [x·H//n, (x+1)·H//n), or one head where
    that is empty."""
    never: ClassVar[tuple[Never, ...]] = (
        Never(("layout", "kv", "tensors"), 'beside "order", which says it all', "order"),
    )


class TokenShards(Described):
    """Context parallelism: rank tp_rank holds the tokens t with t // interleave % count == tp_rank % count, and the
    heads of part tp_rank // count of tp_size // count."""

    count: int = integer(..., 1, MAX_RANKS)
    """Number of token shards; divides tp_size."""
    interleave: int = integer(1, 1, 1 << 20)
    """Consecutive tokens of one shard."""


class Table(Placing, Meaning):
    """Planes that share one block table: those of a group or, without groups, of the file."""

    kind: Literal["full", "window", "state"] = "full"
    """full: block i of a request has its tokens [i·block_size, (i+1)·block_size); window: only the last blocks are
    held; state: one block per request."""
    layers: Own[list[Index | Span]] = Field(default=None, min_length=1)
    """Its layers: indices and [begin, end] intervals, each layer once, in the order of memory. Default: all."""
    layer_name: str = text("layers.{}", 256, pattern=r"^[^{}]*\{\}[^{}]*$")
    """Name of its layers, {} for the index; equal on both engines."""
    stage: Own[int] = integer(None, 0, MAX_RANKS)
    """The pp_rank that holds all its layers. Default: by the stages; layers past the model's are on the last."""
    window: Own[int] = integer(None, 1, BIG)
    """Size of the window, in tokens."""
    pool: str = text("", 128)
    """Groups of one pool share its block ids and its memory. Default: a pool of its own."""
    null_block: Own[int] = integer(None, 0, 1 << 31)
    """The id that stands for no block. Default: there is none."""
    page_size: Own[int] = integer(None, 1, 1 << 20)
    """Tokens per page, over all token shards; divides block_size. Default: a block is one page."""
    page_padding: int = integer(0, 0, BIG)
    """Unused bytes after each page."""
    block_padding: int = integer(0, 0, BIG)
    """Unused bytes after each block."""
    token_shard: TokenShards = TokenShards(count=1)
    """Which tokens each rank holds. Default: all."""
    rows: Literal["rows_first", "channels_first"] = "rows_first"
    """State: rows_first: a row holds the channels of all conv_ components; channels_first: a channel holds its rows."""
    components: Own[list[FileComponent]] = Field(default=None, min_length=1, max_length=64)
    """What each layer holds, in the order of memory. Default: key and value; for mla latent, and rope if there is
    rope_dim; states have no default."""
    never: ClassVar[tuple[Never, ...]] = (
        *Placing.never,
        Never(OF_TOKENS, "for a state", "kind", "state"),
        Never(("rows",), 'for a group that is not of kind "state"', "kind", "state", unless=True),
        Never(("window",), 'for a group that is not of kind "window"', "kind", "window", unless=True),
    )


class FileGroup(Table, Content):
    """One of several groups. The file's fields of `Content` and `Placing` hold where the group does not have them."""

    name: str = text(..., 128)
    """Unique in its engine, equal on both engines of a read."""
    description: str = text("", 4096)
    """For people."""


class GeometryFile(Table):
    """The cache geometry of an engine, for planning without running it. Read by kvferry.geometry.file."""

    schema_: str = text("", 4096, alias="$schema")
    """The address of this schema, for editors."""
    description: str = text("", 4096)
    """For people."""
    engine_id: str = text(..., 256)
    """Name of the engine."""
    tp_size: int = integer(1, 1, MAX_RANKS)
    """Tensor-parallel size."""
    pp_size: int = integer(1, 1, MAX_RANKS)
    """Pipeline-parallel size; rank = pp_rank · tp_size + tp_rank."""
    stages: Own[list[Span]] = None
    """Layers held, by pp_rank: pp_size intervals. Default: as evenly as possible."""
    memory: Literal["dram", "vram"] = "dram"
    """Where the cache lies."""
    device: int = integer(0, 0, 1 << 16)
    """NIXL's device index."""
    partial: bool = False
    """The ranks together need not hold every unit and token of their layers; otherwise that is refused."""
    identity: dict[str, str] = {}
    """What the cache was computed with: model, revision digest, quantisation, rope … Equal on both engines."""
    model: FileModel
    """What the model's layers hold."""
    name: str = text("full", 128)
    """Name of the only group; equal on both engines of a read."""
    groups: Own[list[FileGroup]] = Field(default=None, min_length=1, max_length=256)
    """Groups of layers with block tables of their own. Default: one group of all layers; then the file itself may have
    the fields of a group."""
    never: ClassVar[tuple[Never, ...]] = (
        *Table.never,
        Never(
            ("name", *(name for name in Table.model_fields if name not in Placing.model_fields)),
            'beside "groups": each group says it for itself',
            "groups",
        ),
    )

    def tables(self) -> list[tuple[str, Table, dict[str, Any]]]:
        """The groups: the path of each, its own fields, and all its fields with the inherited ones."""
        above = {**self.given(Placing), **self.model.given(Content)}
        if self.groups is None:
            return [("", self, {**self.given(Table), **above, "name": self.name})]
        given = [group.given(FileGroup) for group in self.groups]
        return [(f"groups[{index}]", self.groups[index], {**above, **own}) for index, own in enumerate(given)]
