"""`check_layout` on a device's memory: right planes pass, wrong ones are refused, and every byte is put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from kvferry import Group, Interval
from kvferry.errors import LayoutMismatch
from kvferry.geometry.tensors import Holding, planes_of_tensor
from kvferry.testing import check_layout

TOKENS, HEADS, WIDTH = 16, 8, 64
OTHER = {"key": "value", "value": "key"}


@pytest.mark.parametrize("axes", [("block", "head", "token"), ("block", "token", "head")])
def test_planes_are_checked_where_the_cache_is(device: str, axes: tuple[str, str, str]) -> None:
    group = Group("full", block_tokens=TOKENS, num_blocks=64, null_block=0)
    sizes = {"block": 64, "head": HEADS, "token": TOKENS}
    cache = torch.rand(*(sizes[axis] for axis in axes), 2 * WIDTH, device=device).to(torch.bfloat16)
    before = cache.clone()
    held = Holding(units=Interval(0, HEADS), axis_size=HEADS)
    parts = {"key": WIDTH, "value": WIDTH}
    planes = planes_of_tensor(cache, (*axes, "content"), group, "layer", parts, held)
    by_token = cache if axes[1] == "token" else cache.transpose(1, 2)

    def write(inputs: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        by_token[slots // TOKENS, slots % TOKENS] = torch.cat([inputs["key"], inputs["value"]], -1)

    token = {name: torch.empty(HEADS, WIDTH, dtype=torch.bfloat16) for name in OTHER}
    found = check_layout(group, cache, planes, write=write, token=token)
    assert found.values == ("key", "value")
    wrong = [replace(plane, component=OTHER[plane.component]) for plane in planes]
    with pytest.raises(LayoutMismatch, match="is not what the engine wrote"):
        check_layout(group, cache, wrong, write=write, token=token)
    assert torch.equal(cache, before)
