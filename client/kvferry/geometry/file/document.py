"""What a geometry file says, checked and with every default filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvferry.errors import InvalidField
from kvferry.geometry.file.components import DTYPE_BYTES, MAX_LAYERS, Component, Defaults, read_components
from kvferry.geometry.file.fields import MISSING, Fields, indices, short
from kvferry.geometry.file.layout import AXES, axis_order, state_order
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Interval, MemoryKind
from kvferry.geometry.sharding import shards

MAX_RANKS = 4096
MAX_GROUPS = 256
MAX_PLANES = 1 << 16
"""Of all ranks together. No message could carry more."""
MAX_RANK_LAYERS = 1 << 20
"""Ranks times layers of all groups, held or not."""
KINDS = {"full": GroupKind.TOKENS, "window": GroupKind.WINDOW, "state": GroupKind.STATE}
_MEMORY = {"dram": MemoryKind.DRAM, "vram": MemoryKind.VRAM}
LAYER_NAME = "layers.{}"


_TOKENS_ONLY = ("block_size", "page_size", "token_shard", "window", "shards", "layout", "tokens_per_state")
_GROUP_ONLY = (
    "name",
    "kind",
    "layers",
    "layer_name",
    "stage",
    "window",
    "pool",
    "null_block",
    "page_size",
    "page_padding",
    "block_padding",
    "token_shard",
    "format",
    "granule",
    "units_divide",
    "optional",
    "tokens_per_state",
    "rows",
    "components",
)


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One group.

    Attributes:
        group: as the engine declares it.
        path: its JSON path, for errors.
        layers: indices, in memory order.
        layer_name: pattern of their names.
        stage: the pp_rank that holds all of them; None: the stages decide, the last has what lies past them.
        components: of each layer, in memory order.
        order: of axes, outermost first.
        page_tokens: tokens per page, over all token shards; 0 for state groups.
        page_padding, block_padding: bytes.
        token_shards: number of token shards; tp_rank r holds shard ``r % token_shards``.
        interleave: tokens.
    """

    group: Group
    path: str
    layers: tuple[int, ...]
    layer_name: str
    stage: int | None
    components: tuple[Component, ...]
    order: tuple[str, ...]
    page_tokens: int
    page_padding: int
    block_padding: int
    token_shards: int
    interleave: int


@dataclass(frozen=True, slots=True)
class Document:
    """A whole file."""

    engine_id: str
    identity: dict[str, str]
    tp_size: int
    pp_size: int
    stages: tuple[Interval, ...]
    memory_kind: MemoryKind
    device: int
    groups: tuple[GroupPart, ...]
    partial: bool


def read_document(value: object) -> Document:
    """Check a parsed JSON document; raises `InvalidField`."""
    fields = Fields(value)
    fields.text("$schema", None, 4096)
    fields.text("description", None, 4096)
    engine_id = fields.text("engine_id")
    tp_size = fields.integer("tp_size", 1, 1, MAX_RANKS)
    pp_size = fields.integer("pp_size", 1, 1, MAX_RANKS)
    if tp_size * pp_size > MAX_RANKS:
        raise InvalidField("pp_size", pp_size, f"at most {MAX_RANKS} ranks in all")
    model = fields.object("model")
    if model is None:
        raise InvalidField("model", MISSING, "an object")
    layers = model.integer("layers", low=1, high=MAX_LAYERS)
    defaults = _model_defaults(model, Defaults(tp_size))
    model.finish()
    defaults = _placing_defaults(fields, defaults)
    stages = fields.intervals("stages", pp_size, "pp_rank", layers) or _even_stages(pp_size, layers)
    identity = fields.strings("identity")
    memory_kind = _MEMORY[fields.choice("memory", _MEMORY, "dram")]
    device = fields.integer("device", 0, 0, 1 << 16)
    groups = _read_groups(fields, defaults, layers, pp_size)
    partial = fields.flag("partial", False)
    fields.finish()
    planes = tp_size * sum(len(part.layers) * len(part.components) for part in groups)
    if planes > MAX_PLANES:
        raise InvalidField("model.layers", layers, f"layers that make at most {MAX_PLANES} planes, not {planes}")
    looked_at = tp_size * pp_size * sum(len(part.layers) for part in groups)
    if looked_at > MAX_RANK_LAYERS:
        raise InvalidField("pp_size", pp_size, f"ranks times layers of at most {MAX_RANK_LAYERS}, not {looked_at}")
    return Document(engine_id, identity, tp_size, pp_size, stages, memory_kind, device, groups, partial)


def _even_stages(pp_size: int, layers: int) -> tuple[Interval, ...]:
    if pp_size > layers:
        raise InvalidField("pp_size", pp_size, f"at most the {layers} layers of the model")
    return shards(pp_size, layers)


def _model_defaults(fields: Fields, above: Defaults) -> Defaults:
    """What a layer holds of a token."""
    attention = fields.choice("attention", ("gqa", "mha", "mla"), above.attention)
    if attention == "mla":
        fields.refuse(("kv_heads", "head_dim"), "for mla, which has latent_dim and rope_dim")
    else:
        fields.refuse(("latent_dim", "rope_dim"), f"for {attention}, which has kv_heads and head_dim")
    return replace(
        above,
        attention=attention,
        kv_heads=fields.integer("kv_heads", above.kv_heads, 1, 1 << 20),
        head_dim=fields.integer("head_dim", above.head_dim, 1, 1 << 24),
        latent_dim=fields.integer("latent_dim", above.latent_dim, 1, 1 << 24),
        rope_dim=fields.integer("rope_dim", above.rope_dim, 0, 1 << 24),
        dtype=fields.choice("dtype", DTYPE_BYTES, above.dtype),
    )


def _placing_defaults(fields: Fields, above: Defaults) -> Defaults:
    """How it is divided and where it lies."""
    own = fields.intervals("shards", above.tp_size, "tp_rank", above.kv_heads or 0) if above.kv_heads else None
    if above.kv_heads is None:
        fields.refuse(("shards",), "without kv_heads")
    if fields.has("order"):
        fields.refuse(("layout", "kv", "tensors"), 'beside "order", which says it all')
    tensors = "cross_layer" if above.cross_layer else "per_layer"
    return replace(
        above,
        block_size=fields.integer("block_size", above.block_size, 1, 1 << 20),
        num_blocks=fields.integer("num_blocks", above.num_blocks, 1, (1 << 31) - 1),
        layout=fields.choice("layout", ("HND", "NHD"), above.layout),
        kv=fields.choice("kv", ("apart", "packed", "blocks_first"), above.kv),
        cross_layer=fields.choice("tensors", ("per_layer", "cross_layer"), tensors) == "cross_layer",
        order=_read_order(fields) or above.order,
        shards=own or above.shards,
    )


def _read_order(fields: Fields) -> tuple[str, ...] | None:
    """An explicit order of axes; `page` and `tensor` may be left out where they are next to `block` and `component`."""
    expected = f"each of {', '.join(AXES)} once, outermost first (page and tensor may be left out)"
    items = fields.array("order", expected)
    if items is None:
        return None
    order = [item for _, item in items]
    if "page" not in order and "block" in order:
        order.insert(order.index("block") + 1, "page")
    if "tensor" not in order and "component" in order:
        order.insert(order.index("component"), "tensor")
    if len(order) != len(AXES) or any(axis not in order for axis in AXES):
        raise InvalidField(fields.at("order"), short([item for _, item in items]), expected)
    return tuple(str(axis) for axis in order)


def _read_groups(fields: Fields, defaults: Defaults, layers: int, pp_size: int) -> tuple[GroupPart, ...]:
    items = fields.array("groups", "a list of groups")
    if items is None:
        # What a group says of itself, the file says of its only one.
        return (_read_group(fields, defaults, layers, pp_size),)
    fields.refuse(_GROUP_ONLY, 'beside "groups": each group says it for itself')
    if len(items) > MAX_GROUPS:
        raise InvalidField("groups", f"{len(items)} groups", f"at most {MAX_GROUPS}")
    parts = []
    for path, item in items:
        group = Fields(item, path)
        placed = _placing_defaults(group, _group_model(group, defaults))
        parts.append(_read_group(group, placed, layers, pp_size))
        group.text("description", None, 4096)
        group.finish()
    names = [part.group.name for part in parts]
    for part in parts:
        if names.count(part.group.name) > 1:
            raise InvalidField(f"{part.path}.name", part.group.name, "a name that no other group has")
    return tuple(parts)


def _read_group(fields: Fields, defaults: Defaults, layers: int, pp_size: int) -> GroupPart:
    """One group; `defaults` hold what it says, or inherits, of its layers' content and place."""
    name = fields.text("name", high=128) if fields.path else fields.text("name", "full", 128)
    kind = KINDS[fields.choice("kind", KINDS, "full")]
    state = kind is GroupKind.STATE
    layer_name = fields.text("layer_name", LAYER_NAME)
    if not re.fullmatch(r"[^{}]*\{\}[^{}]*", layer_name):
        raise InvalidField(fields.at("layer_name"), layer_name, "a name with {} for the layer's index")
    own_names = layer_name != LAYER_NAME
    chosen = fields.array("layers", "a list of layer indices and [begin, end] intervals")
    held = tuple(range(layers)) if chosen is None else indices(chosen, MAX_LAYERS if own_names else layers)
    stage = fields.integer("stage", None, 0, pp_size - 1)
    if state:
        fields.refuse(_TOKENS_ONLY, "for a state")
    elif defaults.block_size is None:
        raise InvalidField(fields.at("block_size"), MISSING, "an integer of at least 1")
    if defaults.num_blocks is None:
        raise InvalidField(fields.at("num_blocks"), MISSING, "an integer of at least 1")
    if kind is not GroupKind.WINDOW:
        fields.refuse(("window",), 'for a group that is not of kind "window"')
    block_tokens = 0 if state else defaults.block_size or 0
    token_shards, interleave = _read_token_shard(fields, defaults.tp_size)
    null_block = fields.integer("null_block", None, 0, defaults.num_blocks - 1)
    return GroupPart(
        group=Group(
            name=name,
            kind=kind,
            block_tokens=block_tokens,
            num_blocks=defaults.num_blocks,
            null_block=null_block,
            window_tokens=fields.integer("window", low=1) if kind is GroupKind.WINDOW else 0,
            pool=fields.text("pool", "", 128),
        ),
        path=fields.path,
        layers=held,
        layer_name=layer_name,
        stage=stage,
        components=read_components(fields, defaults, kind, token_shards, held),
        order=_order(fields, defaults, state=state),
        page_tokens=_page_tokens(fields, block_tokens),
        page_padding=fields.integer("page_padding", 0),
        block_padding=fields.integer("block_padding", 0),
        token_shards=token_shards,
        interleave=interleave,
    )


def _group_model(fields: Fields, above: Defaults) -> Defaults:
    """A group's own model fields over the file's; its heads are divided as the file says only if they are as many."""
    found = _model_defaults(fields, above)
    if above.shards and not fields.has("shards") and found.kv_heads != above.kv_heads:
        raise InvalidField(fields.at("shards"), MISSING, "intervals: the group's kv_heads are not the model's")
    return found


def _read_token_shard(fields: Fields, tp_size: int) -> tuple[int, int]:
    nested = fields.object("token_shard")
    if nested is None:
        return 1, 1
    count = nested.integer("count", low=1, high=tp_size)
    interleave = nested.integer("interleave", 1, 1, 1 << 20)
    nested.finish()
    if tp_size % count:
        raise InvalidField(nested.at("count"), count, f"a divisor of tp_size {tp_size}")
    return count, interleave


def _page_tokens(fields: Fields, block_tokens: int) -> int:
    if block_tokens == 0:
        return 0
    page_tokens = fields.integer("page_size", block_tokens, 1, block_tokens)
    if block_tokens % page_tokens:
        raise InvalidField(fields.at("page_size"), page_tokens, f"a divisor of block_size {block_tokens}")
    return page_tokens


def _order(fields: Fields, defaults: Defaults, *, state: bool) -> tuple[str, ...]:
    if state:
        rows = fields.choice("rows", ("rows_first", "channels_first"), "rows_first")
        if fields.has("order") and defaults.order:
            return defaults.order
        # What the file says of keys and values does not bind its states.
        kv = fields.choice("kv", ("apart", "blocks_first"), "blocks_first")
        return state_order(rows, kv, cross_layer=defaults.cross_layer)
    fields.refuse(("rows",), 'for a group that is not of kind "state"')
    if defaults.order:
        return defaults.order
    kv = defaults.kv or ("packed" if defaults.attention == "mla" else "apart")
    return axis_order(defaults.layout, kv, cross_layer=defaults.cross_layer)
