"""What several formats share: the number of a tensor's axes, and how its content is cut."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry._arguments import integer
from kvferry.errors import BadGeometry
from kvferry.geometry.tensors import Tensor, TensorView, view_of

Layers = Mapping[str, Tensor]
"""Tensors by layer name."""


def with_axes(layer: str, tensor: Tensor, count: int) -> TensorView:
    """The memory of a tensor of so many axes; raises `BadGeometry`."""
    view = view_of(tensor)
    if len(view.shape) != count:
        raise BadGeometry(f"layer {layer}", f"{count} axes are expected of {view.described}")
    return view


def halves(layer: str, view: TensorView, width: int) -> dict[str, int]:
    """K and V as equal parts of the content; raises `BadGeometry`."""
    if width % 2:
        raise BadGeometry(f"layer {layer}", f"K and V cannot be equal parts of the content of {view.described}")
    return {"key": width // 2, "value": width // 2}


def latent_parts(layer: str, width: int, latent_dim: int) -> dict[str, int]:
    """The latent and, if anything follows it, the rope; raises `BadGeometry`."""
    if not 0 < integer("latent_dim", latent_dim) <= width:
        raise BadGeometry(f"layer {layer}", f"a latent of {latent_dim} elements in a content of {width}")
    rope_dim = width - latent_dim
    return {"latent": latent_dim, "rope": rope_dim} if rope_dim else {"latent": latent_dim}


def head_width(layer: str, view: TensorView, heads: int) -> int:
    """Elements of a head in a content that holds all heads of the rank; raises `BadGeometry`."""
    width = view.shape[-1]
    if integer("heads", heads) < 1 or width % heads:
        raise BadGeometry(f"layer {layer}", f"{heads} heads do not divide the content of {view.described}")
    return width // heads
