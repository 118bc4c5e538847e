"""Planes and memory regions from the tensors of an engine. ::

    axes = ("kv", "block", "token", "head", "content")
    planes = planes_of(kv_caches, axes, group, holding=Holding(units=shard(tp_rank, tp_size, 8), axis_size=8))
    regions = regions_of(kv_caches.values())

The names say what each axis is, the tensor's strides say where it lies, so any permutation, padding or view of a larger
storage will do. `kvferry.geometry.formats` has the names for the engines people use. Engines without tensors make
`Plane` values from addresses themselves, or describe their memory with a `TensorView`.

Neither torch nor numpy is imported here.
"""

from __future__ import annotations

from kvferry.geometry.tensors.holding import OPAQUE, PLAIN, Holding, Part, heads_held
from kvferry.geometry.tensors.planes import named_tensors, opaque_planes, planes_of, planes_of_tensor
from kvferry.geometry.tensors.view import Tensor, TensorView, held, regions_of, view_of

__all__ = [
    "OPAQUE",
    "PLAIN",
    "Holding",
    "Part",
    "Tensor",
    "TensorView",
    "heads_held",
    "held",
    "named_tensors",
    "opaque_planes",
    "planes_of",
    "planes_of_tensor",
    "regions_of",
    "view_of",
]
