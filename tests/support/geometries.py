"""Geometries for the planner's tests, written from the definition of a plane and from nothing else.

A model is a list of tensors. An engine says which units and tokens of them each rank holds, and how each rank lays
them out; `Engine.build` is what the planner is told, and how much memory each rank has. Nothing here uses
`kvferry.geometry.shard`, `kvferry.geometry.formats` or the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kvferry.geometry import EngineGeometry, Group, GroupKind, Interval, MemoryKind, Plane, RankGeometry, TokenShard

ALL_TOKENS = TokenShard()


@dataclass(frozen=True)
class Tensor:
    """One KV tensor of one layer of the model: `axis` units, each state `state_bytes` long."""

    layer: str
    component: str
    group: str = "full"
    axis: int = 4
    state_bytes: int = 4
    tokens_per_state: Fraction = Fraction(1)
    granule: int = 1
    divide: bool = True
    optional: bool = False
    state_rows: int = 0
    """Rows of a state group's tensor; 0 for tensors with tokens."""

    @property
    def name(self) -> str:
        return f"{self.layer}/{self.component}"


@dataclass(frozen=True)
class Held:
    """What one rank holds of a tensor."""

    tensor: Tensor
    units: Interval
    tokens: TokenShard = ALL_TOKENS


@dataclass(frozen=True)
class Layout:
    """How the planes of a rank lie in memory: any order of the axes, any padding, side by side at any level.

    `order` names the axes from the outermost: B(locks), P(ages), U(nits), T(okens). The planes of one cluster lie side
    by side inside the first `level` axes: 0 is apart, 1 (with B first) blocks-first, 4 packed in the content dimension.
    """

    order: str = "BPUT"
    level: int = 0
    cross_layer: bool = False
    """All layers of a group are one cluster; else the components of a layer are."""
    pages: int = 1
    """Pages per block, where the states per block divide; 0: one page per granule."""
    pad: Mapping[str, int] = field(default_factory=dict)
    """Bytes of padding after each member of an axis."""


HND = Layout("BPUT")
NHD = Layout("BPTU")
BLOCKS_FIRST = Layout("BPUT", level=1)
PACKED = Layout("BPUT", level=4)
CROSS_LAYER = Layout("BPUT", level=1, cross_layer=True)


@dataclass(frozen=True)
class Rank:
    """One rank: what it holds, by group layout."""

    held: tuple[Held, ...]
    labels: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """An engine: its groups, ranks and layouts (by group; "" for the others)."""

    engine_id: str
    groups: tuple[Group, ...]
    ranks: tuple[Rank, ...]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)

    def base(self, rank: int) -> int:
        """First address of a rank's memory."""
        return ((rank + 1) << 36) + 4096 * (rank + 1)

    def build(self) -> tuple[EngineGeometry, list[int]]:
        """The geometry, and the bytes of memory of each rank."""
        ranks, sizes = [], []
        for index, rank in enumerate(self.ranks):
            planes, size = self._planes(rank, self.base(index))
            ranks.append(RankGeometry(index, tuple(planes), rank.labels or {"tp_rank": index}))
            sizes.append(size)
        return EngineGeometry(self.engine_id, self.groups, tuple(ranks), self.identity), sizes

    def geometry(self) -> EngineGeometry:
        return self.build()[0]

    def _planes(self, rank: Rank, base: int) -> tuple[list[Plane], int]:
        planes: dict[str, Plane] = {}
        pooled: dict[str, list[Group]] = {}
        top = base
        for group in self.groups:
            if group.pool:
                pooled.setdefault(group.pool, []).append(group)
                continue
            held = [h for h in rank.held if h.tensor.group == group.name]
            for members in _clusters(held, self.layout(group)):
                made, size = cluster(group, members, self.layout(group), top)
                planes.update((plane.name, plane) for plane in made)
                top += size + 3
        for groups in pooled.values():
            made, size = self._overlaid(rank, groups, top)
            planes.update((plane.name, plane) for plane in made)
            top += size + 3
        return [planes[h.tensor.name] for h in rank.held], top - base

    def layout(self, group: Group) -> Layout:
        """The layout of a group."""
        return self.layouts.get(group.name, self.layouts.get("", HND))

    def _overlaid(self, rank: Rank, groups: Sequence[Group], base: int) -> tuple[list[Plane], int]:
        """Groups on one memory: each block of it holds a block of one group or of another."""
        wide = {}
        for group in groups:
            layout = self.layout(group)
            order = "B" + layout.order.replace("B", "")
            wide[group.name] = replace(layout, order=order, level=max(1, layout.level), cross_layer=True)
        held = {g.name: [h for h in rank.held if h.tensor.group == g.name] for g in groups}
        groups = [group for group in groups if held[group.name]]
        strides = {g.name: cluster(g, held[g.name], wide[g.name], base)[0][0].block_stride for g in groups}
        found: list[Plane] = []
        most = 0
        for group in groups:
            pad = wide[group.name].pad
            missing = max(strides.values()) - strides[group.name]
            layout = replace(wide[group.name], pad={**pad, "B": pad.get("B", 0) + missing})
            made, size = cluster(group, held[group.name], layout, base)
            found += made
            most = max(most, size)
        return found, most


def _clusters(held: Sequence[Held], layout: Layout) -> list[list[Held]]:
    if layout.level == 0:
        return [[h] for h in held]
    if layout.cross_layer:
        return [list(held)] if held else []
    layers: dict[str, list[Held]] = {}
    for h in held:
        layers.setdefault(h.tensor.layer, []).append(h)
    return list(layers.values())


def block_states(group: Group, held: Held) -> int:
    """States of one block that a rank holds."""
    if group.kind is GroupKind.STATE:
        return held.tensor.state_rows
    states = Fraction(group.block_tokens, held.tokens.count) / held.tensor.tokens_per_state
    assert states.denominator == 1, f"{group} does not hold whole states of {held}"
    return int(states)


def cluster(group: Group, members: Sequence[Held], layout: Layout, base: int) -> tuple[list[Plane], int]:
    """Planes that lie side by side at the layout's level, and the bytes they take together."""
    shapes = []
    for held in members:
        states = block_states(group, held)
        pages = layout.pages or states // held.tensor.granule
        if states % pages or states // pages % held.tensor.granule:
            pages = 1
        shapes.append({"B": group.num_blocks, "P": pages, "U": len(held.units), "T": states // pages})
    level, order = layout.level, layout.order
    # Side by side inside an axis means that all members have the axis in common.
    while level > 0 and any(len({shape[axis] for shape in shapes}) > 1 for axis in order[:level]):
        level -= 1
    strides: list[dict[str, int]] = [{} for _ in members]
    sizes = [held.tensor.state_bytes for held in members]
    for axis in reversed(order[level:]):
        for index, shape in enumerate(shapes):
            strides[index][axis] = sizes[index] + layout.pad.get(axis, 0)
            sizes[index] = strides[index][axis] * shape[axis]
    offsets = [sum(sizes[:index]) for index in range(len(members))]
    total = sum(sizes)
    for axis in reversed(order[:level]):
        for stride in strides:
            stride[axis] = total + layout.pad.get(axis, 0)
        total = strides[0][axis] * shapes[0][axis]
    planes = [
        Plane(
            layer=held.tensor.layer,
            component=held.tensor.component,
            group=group.name,
            format="plain",
            dtype="uint8",
            memory_kind=MemoryKind.DRAM,
            device=0,
            base=base + offset,
            num_blocks=group.num_blocks,
            block_stride=stride["B"],
            page_tokens=shape["T"],
            page_stride=stride["P"] if shape["P"] > 1 else 0,
            block_states=shape["T"] * shape["P"],
            unit_stride=stride["U"] if shape["U"] > 1 else 0,
            token_stride=stride["T"] if shape["T"] > 1 or held.tensor.granule > 1 else 0,
            state_bytes=held.tensor.state_bytes,
            axis_size=held.tensor.axis,
            units=held.units,
            token_shard=held.tokens,
            tokens_per_state=held.tensor.tokens_per_state,
            token_granule=held.tensor.granule,
            units_divide=held.tensor.divide,
            optional_cover=held.tensor.optional,
        )
        for held, offset, stride, shape in zip(members, offsets, strides, shapes, strict=True)
    ]
    return planes, total


# --- what ranks hold ------------------------------------------------------------------------------------------------


def tensors(
    layers: int = 2, components: Sequence[str] = ("key", "value"), *, prefix: str = "layers", **fields: object
) -> list[Tensor]:
    """`components` of `layers` layers."""
    return [Tensor(f"{prefix}.{layer}", name, **fields) for layer in range(layers) for name in components]  # type: ignore[arg-type]


def shard(rank: int, size: int, axis: int) -> Interval:
    """Units of rank `rank` of `size`: an even share, or one replicated unit where there are more ranks than units."""
    begin, end = rank * axis // size, (rank + 1) * axis // size
    return Interval(begin, end) if begin < end else Interval(begin, begin + 1)


def tp_ranks(model: Sequence[Tensor], size: int, replicated: Sequence[str] = ()) -> tuple[Rank, ...]:
    """Tensor parallel ranks; tensors of the `replicated` components are held whole by each."""
    return tuple(
        Rank(
            tuple(
                Held(t, Interval(0, t.axis) if t.component in replicated else shard(rank, size, t.axis)) for t in model
            ),
            {"tp_rank": rank, "pp_rank": 0},
        )
        for rank in range(size)
    )


def engine(
    engine_id: str,
    model: Sequence[Tensor],
    tp: int = 1,
    *,
    block_tokens: int = 16,
    num_blocks: int = 12,
    layout: Layout = HND,
    replicated: Sequence[str] = (),
    **group: object,
) -> Engine:
    """An engine with one group, tensor parallel."""
    name = model[0].group
    made = Group(name, block_tokens=block_tokens, num_blocks=num_blocks, **group)  # type: ignore[arg-type]
    return Engine(engine_id, (made,), tp_ranks(model, tp, replicated), {"": layout})
