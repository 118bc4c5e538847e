"""Strides from an order of axes: where each plane of a group lies when its axes are nested as named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.errors import BadGeometry

AXES = ("layer", "block", "page", "tensor", "component", "unit", "token")
"""The axes of a group's memory. Layers, tensors and components may differ in size; the others are counted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of one component of one layer.

    Attributes:
        layer, component: which.
        tensor: components with the same tensor are stored together where `component` is inside other axes.
        units: units held.
        page_states: states of one page.
        state_bytes: bytes of one unit of one state.
    """

    layer: str
    component: str
    tensor: str
    units: int
    page_states: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Blocking:
    """How a group's blocks are spaced.

    Attributes:
        num_blocks: number of blocks.
        pages: pages per block.
        page_padding, block_padding: bytes after each.
        block_bytes: smallest distance from block to block.
    """

    num_blocks: int
    pages: int = 1
    page_padding: int = 0
    block_padding: int = 0
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies: bytes from the start of the group's memory, and bytes from one to the next along each counted
    axis."""

    offset: int
    strides: dict[str, int]


def axis_order(layout: str, kv: str, *, cross_layer: bool) -> tuple[str, ...]:
    """The order of axes, outermost first, that the words of a geometry file stand for.

    Args:
        layout: ``HND`` (heads outside tokens) or ``NHD``.
        kv: ``apart`` (a tensor for each component), ``blocks_first`` (component after component inside each page) or
            ``packed`` (components side by side for each head and token).
        cross_layer: one tensor whose blocks hold all layers; else a tensor for each layer.
    """
    inner = ["unit", "token"] if layout == "HND" else ["token", "unit"]
    components = ["tensor", "component"]
    paging = ["block", "page", "layer"] if cross_layer else ["block", "page"]
    around = [] if cross_layer else ["layer"]
    if kv == "apart":
        return (*around, *components, *paging, *inner)
    if kv == "blocks_first":
        return (*around, *paging, *components, *inner)
    return (*around, *paging, "tensor", *inner, "component")


def state_order(rows: str, kv: str, *, cross_layer: bool) -> tuple[str, ...]:
    """The same for a state group.

    Args:
        rows: ``rows_first`` (each row holds the channels of all components of its tensor) or ``channels_first`` (each
            channel holds its rows).
        kv: ``apart`` (a tensor for each) or ``blocks_first`` (all tensors of a layer inside its block).
        cross_layer: one tensor whose blocks hold all layers.
    """
    inner = ["token", "component", "unit"] if rows == "rows_first" else ["component", "unit", "token"]
    around = [] if cross_layer else ["layer"]
    paging = ["block", "page", "layer"] if cross_layer else ["block", "page"]
    return (*around, "tensor", *paging, *inner) if kv == "apart" else (*around, *paging, "tensor", *inner)


def place(order: Sequence[str], pieces: Sequence[Piece], blocking: Blocking) -> tuple[dict[Piece, Place], int]:
    """Nest the axes as ordered, outermost first.

    Returns:
        The place of every piece, and the bytes of the whole.

    Raises:
        BadGeometry: pieces that lie side by side inside a counted axis differ in its count.
    """
    size, places = _lay(tuple(order), tuple(pieces), blocking)
    return places, size


def natural_block_bytes(order: Sequence[str], pieces: Sequence[Piece], blocking: Blocking) -> int:
    """The largest distance from block to block that an order has without `Blocking.block_bytes`."""
    places, _ = place(order, pieces, blocking)
    return max(found.strides["block"] for found in places.values())


_KEYS: dict[str, Callable[[Piece], str]] = {
    "layer": lambda piece: piece.layer,
    "tensor": lambda piece: piece.tensor,
    "component": lambda piece: piece.component,
}


def _lay(axes: tuple[str, ...], pieces: tuple[Piece, ...], blocking: Blocking) -> tuple[int, dict[Piece, Place]]:
    if not axes:
        return pieces[0].state_bytes, {pieces[0]: Place(0, {})}
    axis, rest = axes[0], axes[1:]
    places: dict[Piece, Place] = {}
    if axis in _KEYS:
        size = 0
        key = _KEYS[axis]
        named: dict[str, list[Piece]] = {}
        for piece in pieces:
            named.setdefault(key(piece), []).append(piece)
        for members in named.values():
            part, inner = _lay(rest, tuple(members), blocking)
            places.update({piece: Place(size + found.offset, found.strides) for piece, found in inner.items()})
            size += part
        return size, places
    size, inner = _lay(rest, pieces, blocking)
    count, stride = _count(axis, pieces, blocking), size
    if axis == "page":
        stride += blocking.page_padding
    elif axis == "block":
        stride = max(stride + blocking.block_padding, blocking.block_bytes)
    for piece, found in inner.items():
        places[piece] = Place(found.offset, {**found.strides, axis: stride})
    return stride * count, places


def _count(axis: str, pieces: tuple[Piece, ...], blocking: Blocking) -> int:
    if axis == "block":
        return blocking.num_blocks
    if axis == "page":
        return blocking.pages
    counts = {(piece.units if axis == "unit" else piece.page_states): piece for piece in pieces}
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[:2]
        raise BadGeometry(
            f"{first.layer}/{first.component} and {second.layer}/{second.component}",
            f"they lie side by side inside the {axis} axis, but have {one} and {other} of it; give them different "
            f'"tensor"s, or another "kv" or "order"',
        )
    return next(iter(counts))
