"""Planes of a destination rank that share bytes are refused, by name; planes that only interleave are not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.errors import BadGeometry
from kvferry.geometry import EngineGeometry, Group, Interval, MemoryKind, Plane, RankGeometry, file
from kvferry.geometry.overlap import check_apart
from kvferry.planner import diff, plan_read
from tests.support.geometries import Tensor, engine, tensors

FULL = Group("full", block_tokens=16, num_blocks=4)


def plane(name: str, base: int, **fields: Any) -> Plane:
    """Four blocks of 16 tokens of one head of 8 bytes, contiguous."""
    whole: dict[str, Any] = {
        "layer": name,
        "component": "key",
        "group": "full",
        "format": "plain",
        "dtype": "uint8",
        "memory_kind": MemoryKind.DRAM,
        "device": 0,
        "base": base,
        "num_blocks": 4,
        "block_stride": 128,
        "page_tokens": 16,
        "page_stride": 0,
        "block_states": 16,
        "unit_stride": 0,
        "token_stride": 8,
        "state_bytes": 8,
        "axis_size": 1,
        "units": Interval(0, 1),
    }
    return Plane(**{**whole, **fields})


def shared(planes: list[Plane], *groups: Group) -> tuple[str, str] | None:
    """Names of the planes that are refused; None if none are."""
    try:
        check_apart(groups or (FULL,), 0, planes)
    except BadGeometry as error:
        one, other = sorted(error.values["where"].removeprefix("rank 0, planes ").split(" and "))
        return one, other
    return None


def written(plane: Plane, blocks: int) -> set[int]:
    """Every byte of a plane, by its definition."""
    steps = itertools.product(
        range(blocks), range(plane.pages), range(len(plane.units)), range(plane.page_tokens), range(plane.state_bytes)
    )
    return {
        plane.base
        + block * plane.block_stride
        + page * plane.page_stride
        + unit * plane.unit_stride
        + token * plane.token_stride
        + byte
        for block, page, unit, token, byte in steps
    }


@st.composite
def padded_planes(
    draw: st.DrawFn, name: str, base: int, counts: Mapping[str, int], state_bytes: int, paddings: Sequence[int]
) -> Plane:
    """Any order of the axes, and behind each as many bytes as one of `paddings`, or once or twice what is in it."""
    span, strides = state_bytes, dict.fromkeys(counts, 0)
    for axis in draw(st.permutations(sorted(counts))):
        if counts[axis] > 1:
            strides[axis] = span + draw(st.sampled_from([*paddings, span, 2 * span]))
            span += strides[axis] * (counts[axis] - 1)
    return plane(
        name,
        base,
        num_blocks=counts["block"],
        block_stride=strides["block"],
        page_tokens=counts["token"],
        page_stride=strides["page"],
        block_states=counts["token"] * counts["page"],
        unit_stride=strides["unit"],
        token_stride=strides["token"],
        state_bytes=state_bytes,
        axis_size=counts["unit"],
        units=Interval(0, counts["unit"]),
    )


@st.composite
def small_planes(draw: st.DrawFn, name: str) -> Plane:
    """Any order of the axes, any padding, anywhere near."""
    counts = {axis: draw(st.integers(1, 3)) for axis in ("block", "page", "unit", "token")}
    return draw(padded_planes(name, draw(st.integers(0, 60)), counts, draw(st.integers(1, 4)), (0, 0, 1, 2, 5)))


@given(st.data())
def test_two_planes_are_refused_exactly_if_they_share_a_byte(data: st.DataObject) -> None:
    one, other = data.draw(small_planes("a")), data.draw(small_planes("b"))
    group = replace(FULL, num_blocks=min(one.num_blocks, other.num_blocks))
    common = written(one, group.num_blocks) & written(other, group.num_blocks)
    try:
        check_apart((group,), 0, (one, other))
    except BadGeometry:
        assert common
    else:
        assert not common


@given(st.data())
def test_a_shared_byte_is_found_among_many_planes(data: st.DataObject) -> None:
    planes = [data.draw(small_planes(name)) for name in "abcd"]
    moved = [replace(found, base=found.base + 40 * index) for index, found in enumerate(planes)]
    group = replace(FULL, num_blocks=min(found.num_blocks for found in planes))
    bytes_of = {found.name: written(found, group.num_blocks) for found in moved}
    pairs = {
        (one, other) for one, other in itertools.combinations(sorted(bytes_of), 2) if bytes_of[one] & bytes_of[other]
    }
    found = shared(moved, group)
    assert found in pairs if pairs else found is None


@given(st.data())
def test_groups_of_one_pool_may_lie_over_each_other_and_no_others(data: st.DataObject) -> None:
    one, other = data.draw(small_planes("a")), replace(data.draw(small_planes("b")), group="other")
    count = min(one.num_blocks, other.num_blocks)
    assume(written(one, count) & written(other, count))
    apart = replace(FULL, num_blocks=count), Group("other", block_tokens=16, num_blocks=count)
    with pytest.raises(BadGeometry, match=r"Groups that lie over each other share a pool\."):
        check_apart(apart, 0, [one, other])
    pooled = tuple(replace(group, pool="all") for group in apart)
    assert shared([one, other], *pooled) is None


def test_planes_of_a_pool_may_overlap_around_a_plane_of_no_pool() -> None:
    # Its blocks, 3 bytes apart, meet every gap of the others', 128 bytes apart, before any of their bytes.
    gaps = plane("c", 16, num_blocks=30, block_stride=3, token_stride=0, state_bytes=1, page_tokens=1, block_states=1)
    short = {"token_stride": 1, "state_bytes": 1}
    pooled = [plane("a", 0, **short), plane("b", 0, group="other", **short), replace(gaps, group="third")]
    groups = [
        replace(FULL, pool="all"),
        Group("other", block_tokens=16, num_blocks=4, pool="all"),
        Group("third", block_tokens=1, num_blocks=30),
    ]
    assert shared(pooled, *groups) is None
    groups[2] = replace(groups[2], num_blocks=39)
    pooled[2] = replace(pooled[2], num_blocks=39)
    assert shared(pooled, *groups) == ("a/key", "c/key")


def test_planes_of_one_group_of_a_pool_may_not_share_bytes() -> None:
    group = replace(FULL, pool="all")
    assert shared([plane("a", 0), plane("b", 504)], group) == ("a/key", "b/key")
    assert shared([plane("a", 0), plane("b", 512)], group) is None


def test_other_devices_and_kinds_of_memory_are_other_addresses() -> None:
    one = plane("a", 0)
    assert shared([one, plane("b", 0, device=1)]) is None
    assert shared([one, plane("b", 0, memory_kind=MemoryKind.VRAM)]) is None
    assert shared([one, plane("b", 0)]) == ("a/key", "b/key")


def test_blocks_past_the_groups_own_are_never_written() -> None:
    long = plane("a", 0, num_blocks=8)
    assert shared([long, plane("b", 512)]) is None
    assert shared([long, plane("b", 512)], replace(FULL, num_blocks=5)) == ("a/key", "b/key")


def test_planes_whose_strides_divide_each_other_are_compared() -> None:
    # Eight blocks of every other page's length: those with odd numbers meet the second half of the four.
    four = plane("a", 128, block_stride=256, token_stride=0, state_bytes=64, page_tokens=1, block_states=1)
    eight = replace(four, layer="b", base=0, num_blocks=8, block_stride=128)
    assert shared([four, eight], replace(FULL, num_blocks=8)) == ("a/key", "b/key")
    assert shared([replace(four, base=64), eight], replace(FULL, num_blocks=8)) is None


def test_strides_without_a_common_measure_are_searched() -> None:
    # Blocks 101 bytes apart against blocks 103 apart: 101 i == 103 j + 50 first at i = 78, j = 76.
    one = plane("a", 0, num_blocks=200, block_stride=101, token_stride=1, state_bytes=1, page_tokens=1, block_states=1)
    other = replace(one, layer="b", base=50, block_stride=103)
    assert shared([one, other], replace(FULL, num_blocks=79)) == ("a/key", "b/key")
    assert shared([one, other], replace(FULL, num_blocks=78)) is None


@st.composite
def large_planes(draw: st.DrawFn, name: str) -> Plane:
    """Of an engine's size: any order of the axes, any padding."""
    sizes = {
        "block": (1, 7, 100, 5000, 100_000),
        "page": (1, 2, 4),
        "unit": (1, 2, 8, 40, 128),
        "token": (1, 16, 17, 64),
    }
    counts = {axis: draw(st.sampled_from(of)) for axis, of in sizes.items()}
    state_bytes = draw(st.sampled_from([1, 2, 64, 128, 130, 576, 656]))
    return draw(padded_planes(name, 1 << 46, counts, state_bytes, (0, 0, 1, 3, 16, 64, 4096)))


@given(st.data())
def test_a_byte_that_two_large_planes_share_is_found(data: st.DataObject) -> None:
    one, other = data.draw(large_planes("a")), data.draw(large_planes("b"))
    there, here = (
        sum(stride * data.draw(st.integers(0, count - 1)) for stride, count, _ in of.axes) for of in (one, other)
    )
    other = replace(other, base=one.base + there - here, group="other")
    groups = [Group(of.group, block_tokens=of.block_states, num_blocks=of.num_blocks) for of in (one, other)]
    assert shared([one, other], *groups) == ("a/key", "b/key")


# A cache of 64 layers with 16 planes each, in one storage: every order of its axes interleaves all of them.
COMPONENTS = [{"name": f"part_{index}", "content": 8 + index} for index in range(16)]
ORDERS = [
    {"layout": layout, "kv": kv, "tensors": tensors}
    for layout in ("HND", "NHD")
    for kv in ("apart", "packed", "blocks_first")
    for tensors in ("per_layer", "cross_layer")
] + [
    {"order": ["block", "unit", "token", "layer", "component"]},
    {"order": ["unit", "token", "block", "layer", "component"]},
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_thousand_interleaved_planes_pass_and_one_byte_too_many_is_found(order: dict[str, Any]) -> None:
    model = {"layers": 64, "kv_heads": 2, "head_dim": 1, "dtype": "uint8"}
    document = {"engine_id": "x", "block_size": 8, "page_size": 4, "num_blocks": 100_000, "model": model}
    made = file.parse({**document, "components": COMPONENTS, **order})
    planes = list(made.ranks[0].planes)
    assert shared(planes, *made.groups) is None
    # Its first byte is now the last of the plane before it.
    odd = planes[700]
    planes[700] = replace(odd, base=odd.base - 1)
    found = shared(planes, *made.groups)
    assert found is not None
    assert odd.name in found


def overlapping() -> EngineGeometry:
    """An engine whose value of layer 1 begins on the last byte of its key."""
    made = engine("d", tensors(layers=2)).geometry()
    ranks = []
    for rank in made.ranks:
        key = next(found for found in rank.planes if found.name == "layers.1/key")
        moved = [
            replace(found, base=key.extent[1] - 1) if found.name == "layers.1/value" else found for found in rank.planes
        ]
        ranks.append(RankGeometry(rank.rank, tuple(moved)))
    return replace(made, ranks=tuple(ranks))


def test_a_destination_is_refused_when_two_engines_meet() -> None:
    source = engine("p", tensors(layers=2)).geometry()
    with pytest.raises(
        BadGeometry,
        match=r"rank 0, planes layers\.1/key and layers\.1/value: both hold the same bytes.*They begin at 0x",
    ):
        diff(source, overlapping())
    with pytest.raises(BadGeometry, match="A read writes them twice"):
        plan_read(source, overlapping(), 0)


def test_a_source_may_declare_its_memory_twice() -> None:
    destination = engine("d", tensors(layers=2)).geometry()
    assert diff(overlapping(), destination) == ()


def test_planes_that_stay_uncovered_are_not_written() -> None:
    draft = Tensor("draft.0", "key", optional=True)
    made = engine("d", [*tensors(layers=1), draft]).geometry()
    (rank,) = made.ranks
    planes = tuple(replace(found, base=rank.planes[0].base) if found.optional_cover else found for found in rank.planes)
    destination = replace(made, ranks=(replace(rank, planes=planes),))
    assert diff(engine("p", tensors(layers=1)).geometry(), destination) == ()
    with pytest.raises(BadGeometry, match=r"layers\.0/key and draft\.0/key"):
        diff(engine("p", [*tensors(layers=1), draft]).geometry(), destination)
