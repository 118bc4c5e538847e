"""Layers with a recurrent state: Mamba, gated delta nets, short convolutions, linear attention.

vLLM hands over one tensor of bytes for all states of a layer, ``int8 [blocks, 1, 1, bytes]``; the layer divides the
tensor into the last inputs of a convolution, and the state proper. Tensor ranks divide each projection of the
convolution separately (x, B and C of Mamba-2; q, k and v of a gated delta net), so each projection is a component with
channels of its own.

Source: vllm-project/vllm 0.32.0, ``MambaBase.bind_kv_cache`` in vllm/model_executor/layers/mamba/abstract.py,
``MambaStateShapeCalculator`` in mamba_utils.py beside it, ``derive_mamba_conv_split`` in
vllm/distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py, ``MambaMixer2.__init__`` in mamba_mixer2.py.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from kvferry.errors import BadGeometry, InvalidField
from kvferry.geometry.plane import Interval, Plane
from kvferry.geometry.tensors import Part, planes_of_tensor, view_of
from kvferry.integrations.vllm.shards import Layer

_GROUP_COUNTS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""Names of the number of Mamba-2's groups in configurations of models."""


def state_planes(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with a recurrent state. Errors as `layer_planes`."""
    kind, states = layer.spec.mamba_type.name, _states(layer)
    if kind in ("MAMBA1", "MAMBA2", "GDN_ATTN") and len(states) == 2:
        return _convolution(layer, states[0]) + _by_head(layer, states[1])
    if kind == "SHORT_CONV" and len(states) == 1:
        return _convolution(layer, states[0])
    if kind == "LINEAR" and len(states) == 1:
        return _by_head(layer, states[0])
    known = "Mamba-1, Mamba-2, GDN, short convolution or linear attention, without buffers of drafts"
    raise InvalidField(f"state of {layer.name}", f"{kind} with {len(states)} tensors", known)


def _states(layer: Layer) -> list[torch.Tensor]:
    """Return views of a layer's states in its bytes."""
    lengths = [prod(shape) * dtype.itemsize for shape, dtype in zip(layer.spec.shapes, layer.spec.dtypes, strict=True)]
    if layer.cache.itemsize != 1 or layer.cache.shape[1:] != (1, 1, sum(lengths)):
        found = view_of(layer.cache).described
        raise BadGeometry(f"layer {layer.name}", f"states of {lengths} bytes in {found}")
    pieces = torch.split(layer.cache[:, 0, 0], lengths, dim=1)
    return [
        piece.view(dtype).view(-1, *shape)
        for piece, dtype, shape in zip(pieces, layer.spec.dtypes, layer.spec.shapes, strict=True)
    ]


def _by_head(layer: Layer, state: torch.Tensor) -> tuple[Plane, ...]:
    """Return the plane of a state that ranks divide by its first axis: heads, or channels of Mamba-1."""
    axes = ("block", "head", *("content" for _ in state.shape[2:]))
    return planes_of_tensor(state, axes, layer.group, layer.name, ("ssm",), layer.heads)


def _convolution(layer: Layer, state: torch.Tensor) -> tuple[Plane, ...]:
    """Return the planes of a convolution's last inputs, one for each projection that ranks divide separately."""
    axes = ("block", "channel", "row") if is_conv_state_dim_first() else ("block", "row", "channel")
    ranks, rank = _share(layer)
    parts: list[Part] = []
    begin = 0
    for name, size, alike in _projections(layer, state.shape[axes.index("channel")]):
        first, axis = (0, size) if alike else (rank * size, ranks * size)
        channels, units = Interval(begin, begin + size), Interval(first, first + size)
        parts.append(Part(name, channels=channels, units=units, axis_size=axis))
        begin += size
    return planes_of_tensor(state, axes, layer.group, layer.name, parts, layer.heads)


def _projections(layer: Layer, channels: int) -> list[tuple[str, int, bool]]:
    """Return the projections of a convolution's input: name, channels on this rank, whether all ranks hold the same."""
    kind, shape = layer.spec.mamba_type.name, layer.spec.shapes[-1]
    if kind in ("MAMBA1", "SHORT_CONV"):
        return [("conv_x", channels, False)]
    by_head = int(shape[0]) * int(shape[1])
    rest, odd = divmod(channels - by_head, 2)
    if odd or rest < 1:
        raise BadGeometry(f"layer {layer.name}", f"{channels} channels of a convolution for a state of {tuple(shape)}")
    if kind == "GDN_ATTN":
        return [("conv_q", rest, False), ("conv_k", rest, False), ("conv_v", by_head, False)]
    alike = _one_group(layer, rest // int(shape[2]))
    return [("conv_x", by_head, False), ("conv_b", rest, alike), ("conv_c", rest, alike)]


def _share(layer: Layer) -> tuple[int, int]:
    """Return the number of shares of a state, and the index of this rank's share."""
    units, axis = layer.heads.units, layer.heads.axis_size
    if units is None or axis is None:
        raise BadGeometry(f"layer {layer.name}", "which heads of the state the rank holds is not declared")
    return axis // len(units), units.begin // len(units)


def _one_group(layer: Layer, here: int) -> bool:
    """Return whether all ranks hold the same group of B and C, because the model has only one. The shape shows only how
    many are here."""
    ranks, _ = _share(layer)
    if ranks == 1:
        return False
    config: Any = layer.vllm_config.model_config.hf_text_config
    counts = [int(getattr(config, name)) for name in _GROUP_COUNTS if getattr(config, name, None)]
    if counts and here == 1 == counts[0]:
        return True
    if counts and here * ranks == counts[0]:
        return False
    raise InvalidField(f"groups of {layer.name}", counts, f"{here} on each of {ranks} ranks, in one of {_GROUP_COUNTS}")
