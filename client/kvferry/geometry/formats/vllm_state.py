"""vLLM's states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.geometry.model import Group
from kvferry.geometry.plane import Interval, Plane
from kvferry.geometry.tensors import Holding, Part, Tensor, planes_of_tensor


def vllm_state(
    states: Mapping[str, Sequence[Tensor]],
    group: Group,
    conv: Sequence[Part],
    *,
    dim_first: bool = False,
    heads: Interval | None = None,
    num_heads: int | None = None,
) -> tuple[Plane, ...]:
    """vLLM's Mamba-2 state: the convolution's last inputs, and the temporal state by heads.

    Args:
        states: by layer, (conv, ssm): conv ``[blocks, rows, channels]``, or ``[blocks, channels, rows]`` with
            `dim_first`; ssm ``[blocks, heads, head_dim, state_size]``.
        group: of kind STATE.
        conv: the sub-projections by their channels, e.g. ``Part("conv_x", channels=…, units=…, axis_size=…)``, conv_b
            and conv_c: each has an axis, a shard and replicas of its own.
        dim_first: vLLM's ``is_conv_state_dim_first()``; its default is rows first.
        heads: heads held, of `num_heads`.

    Source: vllm-project/vllm 0.32.0, ``MambaStateShapeCalculator.mamba2_state_shape``, ``_orient_conv_shape`` and
    ``get_conv_state_layout`` in vllm/model_executor/layers/mamba/mamba_utils.py.
    """
    conv_axes = ("block", "channel", "row") if dim_first else ("block", "row", "channel")
    found: list[Plane] = []
    for layer, (conv_state, ssm_state) in states.items():
        found += planes_of_tensor(conv_state, conv_axes, group, layer, conv)
        by_head = Holding(units=heads, axis_size=num_heads)
        found += planes_of_tensor(ssm_state, ("block", "head", "content", "content"), group, layer, ("ssm",), by_head)
    return tuple(found)
