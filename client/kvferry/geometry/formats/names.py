"""Layer names that engines of different makes share."""

from __future__ import annotations

import re
from typing import cast

from kvferry._arguments import mapping, text
from kvferry.errors import BadGeometry
from kvferry.geometry.formats.parts import Layers
from kvferry.geometry.tensors import Tensor


def by_layer_number(tensors: Layers) -> dict[str, Tensor]:
    """The same tensors under names that engines share: ``model.layers.7.self_attn.attn`` becomes ``layers.7``.

    Raises:
        BadGeometry: a name without exactly one number, or two tensors of the same number (a draft model's, say, which
            need names of their own).
    """
    found: dict[str, Tensor] = {}
    for layer, tensor in mapping("tensors", tensors, "a mapping from layer names to tensors").items():
        name = text("a layer of tensors", layer)
        numbers = [part for part in re.split(r"[./]", name) if part.isdigit()]
        if len(numbers) != 1:
            raise BadGeometry(f"layer {name}", f"its name has {len(numbers)} numbers, not one")
        shared = f"layers.{int(numbers[0])}"
        if shared in found:
            raise BadGeometry(f"layer {name}", f"another tensor is {shared} too")
        found[shared] = cast(Tensor, tensor)
    return found
