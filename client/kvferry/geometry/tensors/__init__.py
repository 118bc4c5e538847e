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

from kvferry.geometry.tensors.planes import OPAQUE as OPAQUE
from kvferry.geometry.tensors.planes import PLAIN as PLAIN
from kvferry.geometry.tensors.planes import Holding as Holding
from kvferry.geometry.tensors.planes import Part as Part
from kvferry.geometry.tensors.planes import heads_held as heads_held
from kvferry.geometry.tensors.planes import named_tensors as named_tensors
from kvferry.geometry.tensors.planes import planes_of as planes_of
from kvferry.geometry.tensors.planes import planes_of_tensor as planes_of_tensor
from kvferry.geometry.tensors.view import Tensor as Tensor
from kvferry.geometry.tensors.view import TensorView as TensorView
from kvferry.geometry.tensors.view import held as held
from kvferry.geometry.tensors.view import regions_of as regions_of
from kvferry.geometry.tensors.view import view_of as view_of
