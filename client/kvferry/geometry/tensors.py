"""Planes and memory regions from the tensors of an engine. ::

    axes = ("kv", "block", "token", "head", "content")
    planes = planes_of(kv_caches, axes, group, holding=Holding(units=shard(tp_rank, tp_size, 8), axis_size=8))
    regions = regions_of(kv_caches.values())

The names say what each axis is, and the tensor's strides give its position in memory, so any permutation, padding or
view of a larger storage is accepted. `kvferry.geometry.formats` has the names for common engines. Engines without
tensors make `Plane` values from addresses themselves, or describe their memory with a `TensorView`.

Neither torch nor numpy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from kvferry._arguments import check_fields, instance, integer, integer_map, mapping, several, text, texts
from kvferry.errors import BadGeometry, InvalidField
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Interval, Plane, TokenShard
from kvferry.geometry.tensor_view import Axes
from kvferry.geometry.tensor_view import Tensor as Tensor
from kvferry.geometry.tensor_view import TensorView as TensorView
from kvferry.geometry.tensor_view import held as held
from kvferry.geometry.tensor_view import regions_of as regions_of
from kvferry.geometry.tensor_view import view_of as view_of

PLAIN = "plain"
"""Format of bytes in their natural order: each unit's content of each state is contiguous and means the same in every
layout, so that engines of different layouts can read from each other."""

OPAQUE = "opaque"
"""Format of bytes whose order inside a page is not declared."""

ALL_TOKENS = TokenShard()


@dataclass(frozen=True, slots=True)
class Part:
    """One component inside a tensor.

    Attributes:
        component: see `Plane.component`.
        kv: the component's index along the ``kv`` axis.
        content: its elements of the ``content`` axes; None: all.
        channels: its indices along the tensor's ``unit`` axis; None: all.
        units: the units of these channels, counted over the whole model; None: the holding's.
        axis_size: units of the whole model; None: the holding's.
        format, token_granule: None: the holding's.
    """

    component: str
    kv: int | None = None
    content: Interval | None = None
    channels: Interval | None = None
    units: Interval | None = None
    axis_size: int | None = None
    format: str | None = None
    token_granule: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of the model that all tensors of a call hold.

    Attributes:
        units: units held, counted over the whole model; None: the tensor's units, and no other rank has any.
        axis_size: units of the whole model; None: the end of `units`.
        token_shard: tokens held.
        tokens_per_state: tokens that one state stands for.
        format: names the meaning of the bytes.
        dtype: None: the tensor's.
        token_granule: states that may not be cut apart; 0: a whole page.
        units_divide: whether single units may be read.
        optional_cover: whether the planes may stay uncovered by a source.
        shared: whether other shared tensors of the rank may be the same memory, as of layers that share a cache.
    """

    units: Interval | None = None
    axis_size: int | None = None
    token_shard: TokenShard = ALL_TOKENS
    tokens_per_state: Fraction = Fraction(1)
    format: str = PLAIN
    dtype: str | None = None
    token_granule: int = 1
    units_divide: bool = True
    optional_cover: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens_per_state <= 0 or self.token_granule < 0:
            raise InvalidField("holding", (self.tokens_per_state, self.token_granule), "positive tokens_per_state")


Components = Sequence[str | Part] | Mapping[str, int]


def heads_held(heads: range | Interval, total_heads: int | None) -> Holding:
    """The holding of a rank with heads such as ``range(2, 4)`` of a model of `total_heads`; raises `InvalidField`."""
    expected = "range(first, end) of the model's heads, not empty"
    if isinstance(heads, range):
        if heads.step != 1 or not 0 <= heads.start < heads.stop:
            raise InvalidField("heads", heads, expected)
        heads = Interval(heads.start, heads.stop)
    found = instance("heads", heads, Interval, expected)
    if total_heads is None:
        raise InvalidField("total_heads", None, "the number of heads of the whole model, beside heads")
    return Holding(units=found, axis_size=integer("total_heads", total_heads, found.end))


def planes_of(
    tensors: Mapping[str, Tensor],
    axes: Sequence[str] | None,
    group: Group,
    components: Components | None = None,
    holding: Holding | None = None,
) -> tuple[Plane, ...]:
    """The planes of a rank's tensors, by layer name.

    Args:
        tensors: a tensor for each layer, all of the same axes.
        axes: names of the axes, see `planes_of_tensor`; None: the order inside a page is unknown, so pages move whole,
            between equal pages only. Then axis 0 is that of the blocks, each one contiguous piece, and the component is
            ``kv``.
        group, components, holding: see `planes_of_tensor`.

    Raises:
        BadGeometry: shape and strides do not fit the axes or the group.
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(tensors).items():
        if axes is not None:
            found += planes_of_tensor(tensor, axes, group, layer, components, holding)
            continue
        view, whole = _opaque(view_of(tensor), layer, group, _holding(holding))
        found += planes_of_tensor(view, ("block", "unit", "token", "content"), group, layer, ("kv",), whole)
    return tuple(found)


def named_tensors(tensors: object) -> dict[str, Tensor]:
    """A copy of a mapping from layers to tensors; raises `InvalidField`, or `BadGeometry` for an unusable tensor."""
    found: dict[str, Tensor] = {}
    given = mapping("tensors", tensors, "a mapping from layer names to tensors")
    if not given:
        raise InvalidField("tensors", {}, "at least one layer")
    for layer, tensor in given.items():
        name = text("a layer of tensors", layer)
        try:
            view_of(tensor)
        except BadGeometry as error:
            raise BadGeometry(f"layer {name}", str(error.values["problem"])) from None
        found[name] = cast(Tensor, tensor)
    return found


def _holding(holding: Holding | None) -> Holding:
    return Holding() if holding is None else instance("holding", holding, Holding, "a Holding")


def planes_of_tensor(
    tensor: Tensor,
    axes: Sequence[str],
    group: Group,
    layers: str | Sequence[str],
    components: Components | None = None,
    holding: Holding | None = None,
) -> tuple[Plane, ...]:
    """The planes of one tensor.

    Args:
        tensor: of any strides, as long as the content of one unit of one state is contiguous.
        axes: the name of each axis, outermost first. ``block`` (or ``slot``: blocks and tokens in one axis),
            ``token`` (alias ``row`` for states), ``unit`` (aliases ``head``, ``channel``), ``content`` (repeated for
            several axes of content); where they exist ``kv``, ``page`` and ``layer``. An absent axis has one element.
            Without ``page``, a block may still be several consecutive indices of ``block``, each a page.
        group: its block_tokens give the pages of a block, and its num_blocks the blocks that must fit.
        layers: the layer's name; with a ``layer`` axis, a name for each of its indices.
        components: along ``kv``, or the only component; or a mapping from component to its number of elements of
            ``content``, in order (K and V packed side by side); or `Part` for everything else. Default: key and value
            along ``kv``.
        holding: the tensor's part of the model; the default is all of it.

    Returns:
        Planes by layer, then component.

    Raises:
        BadGeometry: names shape and strides.
    """
    axis = Axes(view_of(tensor), texts("axes", axes))
    instance("group", group, Group, "a Group")
    holding = _holding(holding)
    parts = _parts(axis, components)
    names = [layers] if isinstance(layers, str) else list(texts("layers", layers))
    if len(names) != axis.size("layer"):
        raise axis.problem(f"{len(names)} layer names for a layer axis of {axis.size('layer')}")
    return tuple(
        _plane(axis, group, name, index * axis.stride("layer"), part, holding)
        for index, name in enumerate(names)
        for part in parts
    )


def _opaque(view: TensorView, layer: str, group: Group, holding: Holding) -> tuple[TensorView, Holding]:
    """A tensor of which only the beginnings of its blocks are known, as blocks, units, states and bytes: pages move
    whole, between equal pages only."""
    instance("group", group, Group, "a Group")
    elements = view.contiguous(range(1, len(view.shape)))
    if elements is None:
        raise BadGeometry(f"layer {layer}", f"the blocks along axis 0 of {view.described} are not contiguous")
    if view.shape[0] < group.num_blocks:
        problem = f"it has {view.shape[0]}, and group {group.name!r} has {group.num_blocks}; name the axes"
        why = "its axes are not named, so axis 0 is taken for the blocks"
        raise BadGeometry(f"layer {layer}", f"{why}: {problem} ({view.described})")
    page_bytes = elements * view.itemsize
    units = holding.units or Interval(0, holding.axis_size or 1)
    # The pages of a block are not declared, so a block is one page; the bytes of a token are unknown.
    states, ratio = _block_states(group, holding) or 1, holding.tokens_per_state
    if page_bytes % (states * len(units)):
        # A page whose bytes do not divide by its tokens is one state that stands for all of them.
        states, ratio = 1, Fraction(group.block_tokens or 1, holding.token_shard.count)
    state_bytes, rest = divmod(page_bytes, states * len(units))
    if rest:
        raise BadGeometry(f"layer {layer}", f"pages of {page_bytes} bytes do not divide by {len(units)} units")
    cells = replace(
        view,
        shape=(view.shape[0], len(units), states, state_bytes),
        strides=(view.strides[0], state_bytes * states, state_bytes, 1),
        itemsize=1,
    )
    format = OPAQUE if holding.format == PLAIN else holding.format
    holding = replace(holding, units=units, format=format, token_granule=0, units_divide=False)
    return cells, replace(holding, tokens_per_state=ratio)


def _parts(axis: Axes, components: Components | None) -> list[Part]:
    if components is None:
        if axis.size("kv") != 2:
            raise axis.problem("without a kv axis of 2, its components must be given")
        components = ("key", "value")
    if isinstance(components, Mapping):
        parts, begin = [], 0
        for name, size in integer_map("components", components).items():
            parts.append(Part(name, content=Interval(begin, begin + size)))
            begin += size
        if begin != axis.content:
            raise axis.problem(f"components of {begin} elements for a content of {axis.content}")
    else:
        given = several("components", components, object, "component names or Parts")
        named = [Part(part) if isinstance(part, str) else part for part in given]
        parts = list(several("components", named, Part, "component names or Parts"))
        if axis.has("kv") and all(part.kv is None for part in parts):
            if len(parts) != axis.size("kv"):
                raise axis.problem(f"{len(parts)} components for a kv axis of {axis.size('kv')}")
            parts = [replace(part, kv=index) for index, part in enumerate(parts)]
    for part in parts:
        if not (axis.has("kv") or part.kv is None) or (part.kv or 0) not in range(axis.size("kv")):
            raise axis.problem(f"{part.component} is at index {part.kv} of a kv axis of {axis.size('kv')}")
        if axis.size("kv") > 1 and part.kv is None:
            raise axis.problem(f"{part.component} has no index along the kv axis")
        if part.content and part.content.end > axis.content:
            raise axis.problem(f"{part.component} is elements {part.content} of a content of {axis.content}")
        if part.channels and part.channels.end > axis.size("unit"):
            raise axis.problem(f"{part.component} is channels {part.channels} of an axis of {axis.size('unit')}")
    return parts


def _block_states(group: Group, holding: Holding) -> int:
    """States of one block of the group on this rank; 0 for state groups, where the tensor decides."""
    if group.kind is GroupKind.STATE:
        return 0
    count, ratio = holding.token_shard.count, holding.tokens_per_state
    states = Fraction(group.block_tokens, count) / ratio
    if states.denominator != 1:
        blocks = f"blocks of {group.block_tokens} tokens over {count} token shards"
        raise BadGeometry(f"group {group.name!r}", f"{blocks} are not whole states of {ratio} tokens")
    return states.numerator


def _plane(axis: Axes, group: Group, layer: str, offset: int, part: Part, holding: Holding) -> Plane:
    view = axis.view
    paging = _paging(axis, group, holding)
    channels = part.channels or Interval(0, axis.size("unit"))
    units = part.units or holding.units or Interval(0, len(channels))
    if len(units) != len(channels):
        raise axis.problem(f"{part.component} of {layer} has {len(channels)} units here, {units} are declared")
    content = part.content or Interval(0, axis.content)
    granule = holding.token_granule if part.token_granule is None else part.token_granule
    base = view.address + offset + (part.kv or 0) * axis.stride("kv")
    base += channels.begin * axis.stride("unit") + content.begin * view.itemsize
    return Plane(
        layer=layer,
        component=part.component,
        group=group.name,
        format=part.format or holding.format,
        dtype=view.dtype if holding.dtype is None else holding.dtype,
        memory_kind=view.memory_kind,
        device=view.device,
        base=base,
        unit_stride=axis.stride("unit") if len(units) > 1 else 0,
        state_bytes=len(content) * view.itemsize,
        axis_size=part.axis_size or holding.axis_size or units.end,
        units=units,
        token_shard=holding.token_shard,
        tokens_per_state=holding.tokens_per_state,
        token_granule=granule or paging["page_tokens"],
        units_divide=holding.units_divide,
        optional_cover=holding.optional_cover,
        shared=holding.shared,
        **paging,
    )


def _paging(axis: Axes, group: Group, holding: Holding) -> dict[str, int]:
    """The group's blocks in the tensor's block axes, as fields of a plane; strides in bytes."""
    states = _block_states(group, holding)
    if axis.has("slot"):
        states, stride = states or 1, axis.stride("slot")
        blocks, pages, page_states = axis.size("slot") // states, 1, states
        block_stride, page_stride, token_stride = stride * states, 0, stride if states > 1 else 0
    else:
        page_states = axis.size("token")
        blocks, block_stride, token_stride = axis.size("block"), axis.stride("block"), axis.stride("token")
        states = states or page_states * axis.size("page")
        pages, rest = divmod(states, page_states)
        if rest or pages < 1 or (axis.has("page") and pages != axis.size("page")):
            there = f"pages of {page_states}" + (f", {axis.size('page')} per block" if axis.has("page") else "")
            raise axis.problem(f"blocks of group {group.name!r} have {states} states, but the tensor has {there}")
        page_stride = axis.stride("page")
        if not axis.has("page"):
            page_stride = block_stride if pages > 1 else 0
            blocks, block_stride = blocks // pages, block_stride * pages
    if blocks < group.num_blocks:
        name = "slot" if axis.has("slot") else "block"
        there = f"axis {name!r} has {axis.size(name)}"
        if pages > 1 and not axis.has("page"):
            there += f", axis 'token' has {page_states} where a block has {states}, so {pages} make a block"
        elif name == "slot":
            there += f", and a block has {states}"
        fit = f"{blocks} blocks fit, and group {group.name!r} has {group.num_blocks}"
        raise axis.problem(f"{there}: {fit}; are the axes named in the tensor's order?")
    return {
        "num_blocks": blocks,
        "block_stride": block_stride,
        "page_tokens": page_states,
        "page_stride": page_stride,
        "block_states": page_states * pages,
        "token_stride": token_stride,
    }
