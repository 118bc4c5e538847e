"""`check_layout` on plain tensors: engines of a few lines write, right planes pass, wrong ones are refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from kvferry import Group, GroupKind, Interval, Plane
from kvferry.errors import InvalidField, LayoutMismatch
from kvferry.geometry.tensors import Holding, Part, planes_of_tensor
from kvferry.testing import CheckedLayout, check_layout

GROUP = Group("full", block_tokens=8, num_blocks=12, null_block=0)
HEADS, TOKENS, WIDTH = 8, 8, 16
HELD = Holding(units=Interval(0, HEADS), axis_size=HEADS)
TOKEN = {name: torch.zeros(HEADS, WIDTH, dtype=torch.bfloat16) for name in ("key", "value")}
AXES = ("kv", "block", "token", "head", "content")
Write = Callable[[Any, torch.Tensor], None]


def engine() -> tuple[torch.Tensor, Write, list[Plane]]:
    """A cache ``[K and V, blocks, tokens, heads, width]``, what writes it, and its planes."""
    shape = 2, GROUP.num_blocks, TOKENS, HEADS, WIDTH
    cache = torch.arange(prod(shape), dtype=torch.int16).view(torch.bfloat16).view(shape)

    def write(inputs: Any, slots: torch.Tensor) -> None:
        for part, name in enumerate(TOKEN):
            cache[part, slots // TOKENS, slots % TOKENS] = inputs[name]

    return cache, write, list(planes_of_tensor(cache, AXES, GROUP, "layer.0", ("key", "value"), HELD))


def check(cache: torch.Tensor, planes: Sequence[Plane], **engine: Any) -> CheckedLayout:
    """The check, which leaves every byte as it was, whatever it finds."""
    before = cache.clone()
    try:
        return check_layout(GROUP, cache.movedim(1, 0), planes, **engine)
    finally:
        assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


def test_right_planes_pass_by_the_values_of_an_end_block_and_some_others() -> None:
    cache, write, planes = engine()
    found = check(cache, planes, write=write, token=TOKEN, seed=1)
    assert (found.values, found.footprint) == (("key", "value"), ())
    assert {1, GROUP.num_blocks - 1} < set(found.blocks)
    assert GROUP.null_block not in found.blocks
    assert found.blocks == tuple(sorted(found.blocks))
    assert found == check(cache, planes, write=write, token=TOKEN, seed=1)


def test_planes_without_a_way_to_write_are_compared_with_the_tensor_alone() -> None:
    cache, _, planes = engine()
    assert check(cache, planes) == CheckedLayout()
    with pytest.raises(LayoutMismatch, match="declare the same bytes") as refused:
        check(cache, [planes[0], replace(planes[1], base=planes[0].base + 2)])
    assert refused.value.values["component"] == "key"


def swapped(planes: Sequence[Plane]) -> list[Plane]:
    return [replace(plane, component={"key": "value", "value": "key"}[plane.component]) for plane in planes]


def transposed(planes: Sequence[Plane]) -> list[Plane]:
    return [replace(plane, unit_stride=plane.token_stride, token_stride=plane.unit_stride) for plane in planes]


def moved(planes: Sequence[Plane]) -> list[Plane]:
    return [replace(plane, base=plane.base + plane.state_bytes) for plane in planes]


def of_other_type(planes: Sequence[Plane]) -> list[Plane]:
    return [replace(plane, dtype="float16") for plane in planes]


def too_few(planes: Sequence[Plane]) -> list[Plane]:
    return [*planes[:1]]


def of_more_blocks(planes: Sequence[Plane]) -> list[Plane]:
    return [replace(plane, num_blocks=plane.num_blocks + 1) for plane in planes]


def of_other_memory(planes: Sequence[Plane]) -> list[Plane]:
    return [replace(plane, device=1) for plane in planes]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (swapped, "not what the engine wrote"),
        (transposed, "not what the engine wrote"),
        (moved, "not its tensor's"),
        (of_other_type, "are declared to be float16"),
        (too_few, "of a block, which holds 4096"),
        (of_more_blocks, "the number of its blocks"),
        (of_other_memory, "its memory"),
    ],
)
def test_wrong_planes_are_refused(wrong: Callable[[Sequence[Plane]], list[Plane]], said: str) -> None:
    cache, write, planes = engine()
    with pytest.raises(LayoutMismatch, match=said) as refused:
        check(cache, wrong(planes), write=write, token=TOKEN)
    assert refused.value.values["layer"] == "layer.0"


def test_an_engine_is_given_no_slots_that_it_does_not_have() -> None:
    """It would write past its cache."""
    cache, _, planes = engine()
    slots_seen: list[int] = []
    longer = [
        replace(
            plane,
            block_states=2 * TOKENS,
            page_tokens=2 * TOKENS,
            token_stride=plane.token_stride // 2,
            unit_stride=plane.unit_stride,
            units=Interval(0, HEADS // 2),
            axis_size=HEADS // 2,
        )
        for plane in planes
    ]
    with pytest.raises(LayoutMismatch, match="hold 16 tokens, the group's 8"):
        check(cache, longer, write=lambda _, slots: slots_seen.extend(slots.tolist()), token=TOKEN)
    assert slots_seen == []


def test_a_kernel_that_writes_elsewhere_is_found_with_the_token_the_head_and_both_bytes() -> None:
    cache, write, planes = engine()

    def rotates_heads(inputs: Any, slots: torch.Tensor) -> None:
        write({**inputs, "value": inputs["value"].roll(1, 1)}, slots)

    with pytest.raises(LayoutMismatch) as refused:
        check(cache, planes, write=rotates_heads, token=TOKEN)
    values = refused.value.values
    assert (values["component"], values["block"], values["token"], values["head"]) == ("value", "1", "0", "0")
    assert bytes.fromhex(values["expected"]) != bytes.fromhex(values["found"])


def test_a_kernel_that_also_writes_into_the_next_block_is_found() -> None:
    cache, write, planes = engine()

    def writes_one_more(inputs: Any, slots: torch.Tensor) -> None:
        write(inputs, slots)
        cache[0, int(slots[-1]) // TOKENS - 1, 0, 0, 3] += 1

    with pytest.raises(LayoutMismatch, match="wrote a byte that no plane declares"):
        check(cache, planes, write=writes_one_more, token=TOKEN)


def test_an_exception_of_the_engine_is_raised_and_the_bytes_are_put_back() -> None:
    cache, write, planes = engine()

    def fails(inputs: Any, slots: torch.Tensor) -> None:
        write(inputs, slots)
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        check(cache, planes, write=fails, token=TOKEN)


def quantised(*, mixes: bool = False) -> tuple[torch.Tensor, Write, list[Plane]]:
    """int8 values of each token and head, with a float32 that scales them behind; `mixes`: of the next head."""
    group_cache = torch.zeros(GROUP.num_blocks, HEADS, TOKENS, WIDTH + 4, dtype=torch.int8)

    def write(inputs: Any, slots: torch.Tensor) -> None:
        values = inputs["key"].float()
        scales = values.abs().amax(-1, keepdim=True) / 127
        shown = scales.roll(1, 1) if mixes else scales
        cells = torch.cat([(values / scales).round().to(torch.int8), shown.contiguous().view(torch.int8)], -1)
        group_cache[slots // TOKENS, :, slots % TOKENS] = cells

    axes, parts = ("block", "head", "token", "content"), {"key": WIDTH, "key_scale": 4}
    return group_cache, write, list(planes_of_tensor(group_cache, axes, GROUP, "layer.0", parts, HELD))


def test_quantised_bytes_are_checked_by_what_they_depend_on() -> None:
    cache, write, planes = quantised()
    token = {"key": TOKEN["key"]}
    found = check_layout(GROUP, cache, planes, write=write, token=token)
    assert (found.values, found.footprint) == ((), ("key", "key_scale"))
    cache, write, planes = quantised(mixes=True)
    with pytest.raises(LayoutMismatch, match="when it wrote others"):
        check_layout(GROUP, cache, planes, write=write, token=token)


def stateful() -> tuple[Group, torch.Tensor, list[torch.Tensor], list[Plane]]:
    """Blocks of bytes with two states in each: rows and channels of a convolution, and a state for each head."""
    group = Group("state", GroupKind.STATE, 0, 6, null_block=0)
    rows, channels, heads, width = 3, 10, 4, 8
    sizes = rows * channels * 2, heads * width * 4
    cache = torch.zeros(6, sum(sizes) + 12, dtype=torch.int8)
    conv = cache[:, : sizes[0]].view(torch.bfloat16).view(6, rows, channels)
    ssm = cache[:, sizes[0] : sum(sizes)].view(torch.float32).view(6, heads, width)
    parts = [Part("conv_x", channels=Interval(0, 8)), Part("conv_b", channels=Interval(8, 10))]
    planes = [
        *planes_of_tensor(conv, ("block", "row", "channel"), group, "layer.0", parts),
        *planes_of_tensor(ssm, ("block", "head", "content"), group, "layer.0", ("ssm",)),
    ]
    return group, cache, [conv, ssm], planes


def test_states_are_written_through_the_engines_own_views() -> None:
    group, cache, states, planes = stateful()
    used = sum(state[0].numel() * state.element_size() for state in states)
    found = check_layout(group, cache, planes, states=states, block_bytes=used)
    assert (found.values, found.footprint) == (("ssm",), ("conv_x", "conv_b"))
    flat = [state.flatten(1) for state in states]
    assert check_layout(group, cache, planes, states=flat, block_bytes=used).values == ()
    # The padding is not declared.
    with pytest.raises(LayoutMismatch, match="which holds"):
        check_layout(group, cache, planes, states=states)
    channels_first = [
        replace(
            plane,
            unit_stride=3 * plane.state_bytes,
            token_stride=plane.state_bytes,
            base=plane.base + {"conv_x": 0, "conv_b": 2 * 8 * 2}[plane.component],
        )
        for plane in planes[:2]
    ]
    with pytest.raises(LayoutMismatch, match="when it wrote others"):
        check_layout(group, cache, [*channels_first, planes[2]], states=states, block_bytes=used)
    of_integers = [*planes[:2], replace(planes[2], dtype="int32")]
    with pytest.raises(LayoutMismatch, match="are declared to be int32"):
        check_layout(group, cache, of_integers, states=states, block_bytes=used)


def test_a_state_that_is_not_declared_whole_is_refused() -> None:
    group, cache, states, planes = stateful()
    used = sum(state[0].numel() * state.element_size() for state in states)
    more = [states[0], cache[:, 60 : used + 4].view(torch.float32)]
    with pytest.raises(LayoutMismatch, match="wrote a byte that no plane declares"):
        check_layout(group, cache, planes, states=more, block_bytes=used)


def test_planes_of_another_group_are_refused() -> None:
    """Its blocks and its null block are others."""
    cache, write, planes = engine()
    with pytest.raises(LayoutMismatch, match="its group") as refused:
        check(cache, [planes[0], replace(planes[1], group="other")], write=write, token=TOKEN)
    assert (refused.value.values["component"], refused.value.values["found"]) == ("value", "other")


def test_a_plane_that_lies_in_no_state_is_refused() -> None:
    """Nothing would write to it, and it would count as checked all the same."""
    group, cache, states, planes = stateful()
    used = sum(state[0].numel() * state.element_size() for state in states)
    for given, component in ((states[:1], "ssm"), ([states[1], states[1]], "conv_x")):
        with pytest.raises(LayoutMismatch, match=f"{component} is declared, but lies in none of"):
            check_layout(group, cache, planes, states=given, block_bytes=used)


def test_kernel_pages_are_parts_of_blocks() -> None:
    """The tensor's first axis counts pages of 4 tokens, of which each block has two."""
    pages = torch.zeros(2 * GROUP.num_blocks, 2, 4, HEADS, WIDTH, dtype=torch.bfloat16)
    axes = ("block", "kv", "token", "head", "content")
    planes = planes_of_tensor(pages, axes, GROUP, "layer.0", ("key", "value"), HELD)

    def write_pages(inputs: Any, slots: torch.Tensor) -> None:
        for part, name in enumerate(TOKEN):
            pages[slots // 4, part, slots % 4] = inputs[name]

    assert check_layout(GROUP, pages, planes, write=write_pages, token=TOKEN).values == ("key", "value")


def test_arguments_that_belong_together_are_required_together() -> None:
    cache, write, planes = engine()
    for given in ({"write": write}, {"token": TOKEN}):
        with pytest.raises(InvalidField, match="token"):
            check(cache, planes, **given)
    with pytest.raises(InvalidField, match="planes"):
        check(cache, [])


def test_the_layout_check_imports_no_node_server() -> None:
    code = "from kvferry.testing import check_layout\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvferry_server" not in done.stdout
