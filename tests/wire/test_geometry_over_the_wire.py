"""Geometry survives its proto, and whatever a peer sends instead ends in a typed error."""

import contextlib
from dataclasses import replace
from fractions import Fraction

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from kvferry._wire.geometry_codec import (
    PlaneDecoder,
    engine_from_proto,
    engine_to_proto,
    group_to_proto,
    groups_from_proto,
    plane_from_proto,
    plane_to_proto,
    region_from_proto,
    region_to_proto,
)
from kvferry.errors import BadGeometry
from kvferry.geometry import (
    EngineGeometry,
    Group,
    GroupKind,
    Interval,
    MemoryKind,
    MemoryRegion,
    Plane,
    RankGeometry,
    TokenShard,
)
from kvferry.v1 import geometry_pb2 as pb

printable = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
names = st.text(printable, min_size=1, max_size=12)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    kind = draw(st.sampled_from(GroupKind))
    num_blocks = draw(st.integers(1, 2**31 - 1))
    return Group(
        name=draw(names),
        kind=kind,
        block_tokens=0 if kind is GroupKind.STATE else draw(st.sampled_from((8, 16, 48, 256))),
        num_blocks=num_blocks,
        null_block=draw(st.none() | st.integers(0, num_blocks - 1)),
        window_tokens=draw(st.integers(1, 5000)) if kind is GroupKind.WINDOW else 0,
        pool=draw(st.just("") | names),
    )


@st.composite
def planes(draw: st.DrawFn, group: Group) -> Plane:
    """Planes of a group whose axes are nested in any order, padded."""
    shard = draw(st.sampled_from((TokenShard(), TokenShard(1, 2, 4), TokenShard(3, 4, 1))))
    per_state = draw(st.sampled_from((Fraction(1), Fraction(2), Fraction(1, 2), Fraction(4))))
    states = Fraction(group.block_tokens, shard.count) / per_state
    if group.kind is GroupKind.STATE or states.denominator > 1 or shard.interleave % per_state:
        shard, per_state, states = TokenShard(), Fraction(1), Fraction(group.block_tokens or 3)
    if group.block_tokens % (shard.count * shard.interleave):
        shard, states = TokenShard(), Fraction(group.block_tokens) / per_state
    if states.denominator > 1:
        per_state, states = Fraction(1), Fraction(group.block_tokens)
    pages = draw(st.sampled_from([n for n in (1, 2, 4) if states.numerator % n == 0]))
    begin, held = draw(st.integers(0, 50)), draw(st.integers(1, 9))
    content = draw(st.integers(1, 64))
    counts = {"token": states.numerator // pages, "unit": held, "page": pages, "block": group.num_blocks}
    strides, step = {}, content
    for axis in (*draw(st.permutations([axis for axis in counts if axis != "block"])), "block"):
        strides[axis] = step + draw(st.integers(0, 7))
        step = strides[axis] * counts[axis]
    return Plane(
        layer=draw(names),
        component=draw(names),
        group=group.name,
        format=draw(names),
        dtype=draw(st.just("") | names),
        memory_kind=draw(st.sampled_from(MemoryKind)),
        device=draw(st.integers(0, 7)),
        base=draw(st.integers(0, 2**48)),
        num_blocks=group.num_blocks,
        block_stride=strides["block"],
        page_tokens=counts["token"],
        page_stride=strides["page"],
        block_states=states.numerator,
        unit_stride=strides["unit"],
        token_stride=strides["token"],
        state_bytes=content,
        axis_size=begin + held + draw(st.integers(0, 5)),
        units=Interval(begin, begin + held),
        token_shard=shard,
        tokens_per_state=per_state,
        optional_cover=draw(st.booleans()),
        shared=draw(st.booleans()),
    )


@st.composite
def engines(draw: st.DrawFn) -> EngineGeometry:
    declared = draw(st.lists(groups(), min_size=1, max_size=3, unique_by=lambda group: group.name))
    ranks = []
    for index in sorted(draw(st.sets(st.integers(0, 20), max_size=3))):
        held = [draw(planes(group)) for group in declared if draw(st.booleans())]
        unique = {plane.name: plane for plane in held}
        labels = {"tp_rank": index} if draw(st.booleans()) else {}
        ranks.append(RankGeometry(index, tuple(unique.values()), labels))
    identity = draw(st.dictionaries(names, names, max_size=3))
    incarnation, partial = draw(st.binary(max_size=16)), draw(st.booleans())
    return EngineGeometry(draw(names), tuple(declared), tuple(ranks), identity, incarnation, partial)


def test_planes_groups_and_regions_are_sent_with_every_field() -> None:
    group = Group("g", GroupKind.WINDOW, 32, 64, null_block=1, window_tokens=9, pool="p")
    plane = Plane(
        *("layer", "key", "g", "hnd", "bfloat16", MemoryKind.VRAM, 1, 1 << 30, 64),
        *(1 << 16, 4, 1 << 12, 8, 1 << 9, 1 << 7, 1 << 7, 8),
        units=Interval(2, 6),
        token_shard=TokenShard(1, 2, 4),
        tokens_per_state=Fraction(2),
        token_granule=2,
        optional_cover=True,
        shared=True,
    )
    region = MemoryRegion(MemoryKind.VRAM, 1, 1 << 30, 1 << 20)
    sent: list[Message] = [group_to_proto(group), plane_to_proto(plane), region_to_proto(region)]
    for message in sent:
        assert {field.name for field, _ in message.ListFields()} == {field.name for field in message.DESCRIPTOR.fields}
    assert plane_from_proto(plane_to_proto(plane)) == plane


@given(engine=engines())
def test_engines_survive_the_wire(engine: EngineGeometry) -> None:
    sent = engine_to_proto(engine).SerializeToString()
    assert engine_from_proto(pb.EngineGeometry.FromString(sent)) == engine


@given(
    region=st.builds(
        MemoryRegion, st.sampled_from(MemoryKind), st.integers(0, 7), st.integers(0, 2**48), st.integers(1, 2**48)
    )
)
def test_regions_survive_the_wire(region: MemoryRegion) -> None:
    assert region_from_proto(region_to_proto(region)) == region


@given(data=st.data(), engine=engines())
def test_message_with_any_numbers_is_a_geometry_or_a_typed_error(data: st.DataObject, engine: EngineGeometry) -> None:
    message = engine_to_proto(engine)
    targets: list[Message] = [*message.groups, *(plane for rank in message.ranks for plane in rank.planes)]
    target = data.draw(st.sampled_from(targets))
    numbers = [f for f in target.DESCRIPTOR.fields if f.cpp_type in (f.CPPTYPE_UINT32, f.CPPTYPE_UINT64)]
    field = data.draw(st.sampled_from(numbers))
    top = 2**32 - 1 if field.cpp_type == field.CPPTYPE_UINT32 else 2**64 - 1
    value = data.draw(st.integers(0, top) | st.sampled_from((0, 1, top, top // 2, 2**31)))
    setattr(target, field.name, value)
    with contextlib.suppress(BadGeometry):
        engine_from_proto(message)


@given(raw=st.binary(max_size=200))
def test_message_of_any_bytes_is_a_geometry_or_a_typed_error(raw: bytes) -> None:
    message = pb.EngineGeometry()
    try:
        message.MergeFromString(raw)
    except DecodeError:
        return
    with contextlib.suppress(BadGeometry):
        engine_from_proto(message)


PLANE = Plane(
    layer="layers.0",
    component="key",
    group="full",
    format="plain",
    dtype="bfloat16",
    memory_kind=MemoryKind.DRAM,
    device=0,
    base=4096,
    num_blocks=10,
    block_stride=16 * 8 * 256,
    page_tokens=16,
    page_stride=0,
    block_states=16,
    unit_stride=16 * 256,
    token_stride=256,
    state_bytes=256,
    axis_size=8,
    units=Interval(0, 8),
)
GROUP = Group("full", block_tokens=16, num_blocks=10)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": ""},
        {"layer": "x" * 257},
        {"component": ""},
        {"format": ""},
        {"memory_kind": 0},
        {"memory_kind": 9},
        {"num_blocks": 0},
        {"num_blocks": 2**31},
        {"state_bytes": 0},
        {"axis_size": 7},
        {"unit_begin": 8},
        {"page_tokens": 5},
        {"token_granule": 3},
        {"token_stride": 255},
        {"unit_stride": 16 * 256 - 1},
        {"block_stride": 16 * 8 * 256 - 1},
        {"unit_stride": 0},
        {"base": 2**63},
        {"base": 2**64 - 1},
        {"block_stride": 2**63},
        {"block_stride": 2**64 - 1},
        {"token_granule": 16, "token_stride": 512, "unit_stride": 16 * 512, "block_stride": 16 * 8 * 512},
        {"units_divide": False, "unit_stride": 16 * 256 + 8, "block_stride": 16 * 8 * 256 + 64},
    ],
    ids=str,
)
def test_planes_that_contradict_themselves_are_refused(changes: dict[str, object]) -> None:
    message = plane_to_proto(PLANE)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(BadGeometry):
        plane_from_proto(message)


@given(st.data())
def test_planes_of_one_message_are_decoded_as_single_planes(data: st.DataObject) -> None:
    group = data.draw(groups())
    messages = []
    for plane in data.draw(st.lists(planes(group), min_size=1, max_size=3)):
        room = (1 << 63) - 1 - (plane.extent[1] - plane.base)
        for _ in range(3):
            moved = replace(plane, layer=data.draw(names), base=data.draw(st.integers(0, room)))
            messages.append(plane_to_proto(moved))
    decoder = PlaneDecoder()
    assert [decoder.decode(message) for message in messages] == [plane_from_proto(message) for message in messages]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": ""},
        {"layer": "x" * 257},
        {"base": 2**63},
        {"base": 2**64 - 1},
        {"base": 2**63 - 1},
        {"token_granule": 3},
        {"token_shard": pb.TokenShard(index=2, count=2)},
    ],
    ids=str,
)
def test_wrong_plane_is_refused_after_an_almost_equal_plane(changes: dict[str, object]) -> None:
    decoder = PlaneDecoder()
    assert decoder.decode(plane_to_proto(PLANE)) == PLANE
    message = plane_to_proto(PLANE)
    for name, value in changes.items():
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(BadGeometry):
        decoder.decode(message)
    assert decoder.decode(plane_to_proto(PLANE)) == PLANE


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "x" * 129},
        {"kind": 0},
        {"kind": 77},
        {"block_tokens": 0},
        {"num_blocks": 0},
        {"num_blocks": 2**31},
        {"has_null_block": True, "null_block": 10},
        {"window_tokens": 5},
        {"kind": pb.GROUP_KIND_WINDOW},
        {"kind": pb.GROUP_KIND_STATE},
    ],
    ids=str,
)
def test_groups_that_contradict_themselves_are_refused(changes: dict[str, object]) -> None:
    message = group_to_proto(GROUP)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(BadGeometry):
        groups_from_proto([message])


@pytest.mark.parametrize(
    "change",
    [
        {"group": "other"},
        {"num_blocks": 9},
        {"block_states": 8, "page_tokens": 8},
        {"token_shard": TokenShard(0, 2, 1)},
        {"tokens_per_state": Fraction(2)},
        {"token_shard": TokenShard(0, 3, 1), "block_states": 16},
    ],
    ids=str,
)
def test_planes_that_contradict_their_group_are_refused(change: dict[str, object]) -> None:
    plane = replace(PLANE, **change)  # type: ignore[arg-type]
    with pytest.raises(BadGeometry):
        EngineGeometry("e", (GROUP,), (RankGeometry(0, (plane,)),))


def test_engines_that_contradict_themselves_are_refused() -> None:
    rank = RankGeometry(0, (PLANE,))
    for groups_, ranks in (
        ((GROUP, GROUP), (rank,)),
        ((GROUP,), (rank, rank)),
        ((GROUP,), (RankGeometry(1, (PLANE,)), rank)),
    ):
        with pytest.raises(BadGeometry):
            EngineGeometry("e", groups_, ranks)
    with pytest.raises(BadGeometry):
        RankGeometry(0, (PLANE, PLANE))


def test_unknown_memory_kind_of_a_region_is_refused() -> None:
    with pytest.raises(BadGeometry):
        region_from_proto(pb.MemoryRegion(base=1, length=1))
