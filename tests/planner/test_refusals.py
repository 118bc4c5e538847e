"""Planes that cannot be read are refused when two engines meet, with the field and both values; not by a request."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kvferry.errors import BadGeometry, Incompatible, InvalidField, Mismatch
from kvferry.geometry import EngineGeometry, Group, GroupKind, Interval, Plane, RankGeometry, TokenShard
from kvferry.planner import coverage, diff, plan_read
from tests.support.geometries import HND, NHD, Engine, Held, Layout, Rank, Tensor, engine, tensors, tp_ranks

GQA = tensors(layers=1, axis=4)


def changed(geometry: EngineGeometry, component: str = "key", rank: int | None = None, **fields: Any) -> EngineGeometry:
    """The geometry with other fields in the planes of a component."""

    def change(index: int, plane: Plane) -> Plane:
        mine = plane.component == component and rank in (None, index)
        return replace(plane, **fields) if mine else plane

    ranks = tuple(replace(r, planes=tuple(change(r.rank, plane) for plane in r.planes)) for r in geometry.ranks)
    return replace(geometry, ranks=ranks)


def only(source: EngineGeometry, destination: EngineGeometry) -> Mismatch:
    """The only reason why the pair is refused; planning refuses with the same reason."""
    (mismatch,) = diff(source, destination)
    with pytest.raises(Incompatible) as caught:
        plan_read(source, destination, destination.ranks[0].rank)
    assert mismatch in caught.value.mismatches
    assert mismatch.message in str(caught.value)
    return mismatch


def test_units_that_no_rank_holds_are_named() -> None:
    source = engine("p", GQA, 4).geometry()
    source = replace(source, ranks=source.ranks[:2])
    found = diff(source, engine("d", GQA, 1).geometry())
    assert {m.kind for m in found} == {"uncovered"}
    assert "units [2, 4) (all tokens) are held by no rank" in found[0].message
    assert found[0].destination == "[0, 4)"
    assert found[0].source == "[0, 1) all tokens by rank 0, [1, 2) all tokens by rank 1"


def test_ranks_are_refused_only_if_they_need_the_missing_units() -> None:
    source, destination = engine("p", GQA, 4).geometry(), engine("d", GQA, 2).geometry()
    source = replace(source, ranks=source.ranks[:2])
    plan_read(source, destination, 0)
    with pytest.raises(Incompatible, match=r"units \[2, 4\)"):
        plan_read(source, destination, 1)


def test_units_held_twice_by_one_rank_are_no_geometry() -> None:
    rank = engine("p", GQA, 1).geometry().ranks[0]
    with pytest.raises(BadGeometry, match=r"layers\.0/key is declared twice"):
        RankGeometry(0, (*rank.planes, rank.planes[0]))


def test_a_plane_that_the_source_lacks_is_refused() -> None:
    source, destination = engine("p", GQA[:1]).geometry(), engine("d", GQA).geometry()
    mismatch = only(source, destination)
    assert (mismatch.kind, mismatch.where, mismatch.destination) == ("uncovered", "layers.0/value", "[0, 4)")


def test_an_optional_plane_may_stay_uncovered_and_is_listed() -> None:
    draft = [Tensor("draft.0", "key", optional=True)]
    source, destination = engine("p", GQA).geometry(), engine("d", GQA + draft).geometry()
    assert diff(source, destination) == ()
    assert plan_read(source, destination, 0).uncovered == ("draft.0/key",)


def test_an_optional_plane_that_the_source_has_in_another_format_is_refused() -> None:
    draft = [Tensor("draft.0", "key", optional=True)]
    source, destination = engine("p", GQA + draft).geometry(), engine("d", GQA + draft).geometry()
    ranks = tuple(
        replace(r, planes=tuple(replace(p, format="other") if p.layer == "draft.0" else p for p in r.planes))
        for r in source.ranks
    )
    assert only(replace(source, ranks=ranks), destination).kind == "format"


def test_surplus_source_planes_are_fine() -> None:
    assert diff(engine("p", [*GQA, Tensor("draft.0", "key")]).geometry(), engine("d", GQA).geometry()) == ()


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("format", "column-major", "format"),
        ("dtype", "float8_e4m3fn", "plane"),
        ("state_bytes", 2, "plane"),
        ("axis_size", 8, "plane"),
        ("token_granule", 4, "granule"),
        ("units_divide", False, "plane"),
    ],
)
def test_compared_fields_are_named_with_both_values(field: str, value: object, kind: str) -> None:
    source = engine("p", GQA, layout=NHD if field == "units_divide" else HND).geometry()
    change: dict[str, Any] = {field: value}
    ours = getattr(source.ranks[0].planes[0], field)
    mismatch = only(source, changed(source, **change))
    expected = (kind, "layers.0/key", field, str(ours), str(value))
    assert (mismatch.kind, mismatch.where, mismatch.field, mismatch.source, mismatch.destination) == expected


def test_differing_fields_are_all_named_at_once() -> None:
    destination = changed(engine("d", GQA).geometry(), format="other", dtype="int8", token_granule=2)
    found = diff(engine("p", GQA).geometry(), destination)
    assert [m.field for m in found] == ["format", "dtype", "token_granule"]


def test_ranks_that_differ_in_one_way_are_named_once() -> None:
    source, destination = engine("p", GQA, 4).geometry(), engine("d", GQA, 4).geometry()
    found = diff(source, changed(destination, dtype="int8"))
    assert len(found) == 1


def test_compressed_caches_of_another_ratio_are_refused() -> None:
    model = [Tensor("layers.0", "key", tokens_per_state=Fraction(4))]
    other = [Tensor("layers.0", "key", tokens_per_state=Fraction(2))]
    mismatch = only(engine("p", model).geometry(), engine("d", other).geometry())
    assert (mismatch.field, mismatch.source, mismatch.destination) == ("tokens_per_state", "4", "2")


def test_identity_is_compared_key_by_key() -> None:
    source = replace(engine("p", GQA).geometry(), identity={"model": "llama", "rope": "yarn"})
    destination = replace(engine("d", GQA).geometry(), identity={"model": "qwen", "quantisation": "fp8"})
    found = {m.field: (m.source, m.destination) for m in diff(source, destination)}
    assert found == {"model": ("llama", "qwen"), "rope": ("yarn", ""), "quantisation": ("", "fp8")}
    with pytest.raises(Incompatible, match="'model' is 'llama' at the source, 'qwen' at the destination"):
        plan_read(source, destination, 0)


def grouped(engine_id: str, group: Group, model: list[Tensor] | None = None) -> EngineGeometry:
    return Engine(engine_id, (group,), tp_ranks(model or GQA, 1), {"": HND}).geometry()


def test_groups_of_different_kinds_are_refused() -> None:
    window = Group("full", GroupKind.WINDOW, 16, 8, window_tokens=32)
    mismatch = only(grouped("p", Group("full", block_tokens=16, num_blocks=8)), grouped("d", window))
    assert (mismatch.field, mismatch.source, mismatch.destination) == ("kind", "TOKENS", "WINDOW")


def test_windows_of_different_sizes_are_refused() -> None:
    small, large = (Group("full", GroupKind.WINDOW, 16, 8, window_tokens=size) for size in (32, 64))
    mismatch = only(grouped("p", small), grouped("d", large))
    assert (mismatch.field, mismatch.source, mismatch.destination) == ("window_tokens", "32", "64")


def test_a_group_that_the_source_lacks_is_refused() -> None:
    other = [replace(tensor, group="other") for tensor in GQA]
    source = grouped("p", Group("full", block_tokens=16, num_blocks=8))
    found = diff(source, grouped("d", Group("other", block_tokens=16, num_blocks=8), other))
    assert found[0].kind == "group"
    assert "which has ['full']" in found[0].message


def opaque(
    engine_id: str, tp: int, *, pages: int = 1, block_tokens: int = 16, granule: int = 16, axis: int = 4
) -> Engine:
    model = [Tensor("layers.0", "kv", axis=axis, granule=granule, divide=False)]
    return engine(engine_id, model, tp, layout=Layout("BPUT", pages=pages), block_tokens=block_tokens)


def test_opaque_pages_of_equal_size_and_shard_are_read() -> None:
    assert diff(opaque("p", 2).geometry(), opaque("d", 2).geometry()) == ()


def test_opaque_blocks_made_of_several_equal_pages_are_read() -> None:
    source = opaque("p", 2, granule=8, pages=2).geometry()
    assert diff(source, opaque("d", 2, granule=8, block_tokens=8).geometry()) == ()


def test_opaque_pages_of_unequal_size_are_refused_with_the_reason() -> None:
    source = opaque("p", 2, granule=8, pages=2).geometry()
    found = diff(source, opaque("d", 2, granule=16).geometry())
    granule = next(m for m in found if m.field == "token_granule")
    assert (granule.kind, granule.source, granule.destination) == ("granule", "8", "16")
    assert "cannot be cut to fit" in granule.message


def test_opaque_pages_are_not_cut_by_unit() -> None:
    found = diff(opaque("p", 1).geometry(), opaque("d", 2).geometry())
    assert {m.kind for m in found} == {"indivisible"}
    assert "units [0, 2) cannot be cut out of this format" in found[0].message


def test_undivided_units_in_another_order_are_refused() -> None:
    # Two units of one state each: divisible or not, other strides would be another order of units moved whole.
    model = [Tensor("layers.0", "kv", axis=2, granule=4, divide=False)]
    heads_first = engine("p", model, layout=Layout("BPUT", pages=4)).geometry()
    tokens_first = engine("d", model, layout=NHD).geometry()
    assert {m.field for m in diff(heads_first, tokens_first)} == {"unit_stride", "token_stride"}


def context(engine_id: str, count: int, interleave: int, granule: int = 1, held: int | None = None) -> EngineGeometry:
    tensor = Tensor("layers.0", "latent", axis=1, granule=granule)
    ranks = tuple(
        Rank((Held(tensor, Interval(0, 1), TokenShard(index, count, interleave)),))
        for index in range(count if held is None else held)
    )
    group = Group("full", block_tokens=48, num_blocks=4)
    return Engine(engine_id, (group,), ranks).geometry()


def test_token_shards_that_no_rank_holds_are_refused() -> None:
    mismatch = only(context("p", 3, 2, held=2), context("d", 1, 1))
    assert mismatch.kind == "uncovered"
    assert "tokens 1 of 3 by 2" in mismatch.source


def test_token_shards_that_tear_a_granule_are_refused() -> None:
    found = diff(context("p", 2, 2, granule=4), context("d", 1, 1, granule=4))
    assert {m.kind for m in found} == {"granule"}
    assert found[0].field == "token_shard"
    assert "4 tokens are one piece" in found[0].message


def test_equal_token_shards_may_be_finer_than_a_granule() -> None:
    assert diff(context("p", 2, 2, granule=4), context("d", 2, 2, granule=4)) == ()


def test_states_that_are_torn_are_no_geometry() -> None:
    plane = context("p", 2, 2).ranks[0].planes[0]
    with pytest.raises(BadGeometry, match="torn apart"):
        replace(plane, tokens_per_state=Fraction(4), block_states=6, page_tokens=6)


def test_a_state_has_no_token_shard() -> None:
    tensor = Tensor("layers.0", "ssm", axis=2, state_rows=1)
    rank = Rank((Held(tensor, Interval(0, 2), TokenShard(0, 2, 1)),))
    with pytest.raises(BadGeometry, match="a state has no tokens to shard"):
        Engine("p", (Group("full", GroupKind.STATE, num_blocks=4),), (rank,)).geometry()


def test_states_with_another_number_of_rows_are_refused() -> None:
    made = [
        grouped(name, Group("full", GroupKind.STATE, num_blocks=4), [Tensor("layers.0", "conv_x", state_rows=rows)])
        for name, rows in (("p", 3), ("d", 4))
    ]
    assert only(*made).field == "block_states"


def test_blocks_with_too_many_cells_are_refused_before_they_fill_the_memory() -> None:
    huge = [Tensor("layers.0", "key", axis=1 << 10, state_bytes=1)]
    group = Group("full", block_tokens=1 << 11, num_blocks=1)
    mismatch = only(grouped("p", group, huge), grouped("d", group, huge))
    assert mismatch.kind == "too_large"


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("MAX_EFFORT", "to share layers.0/{} out among 1 holders takes more than 0 steps"),
        ("MAX_RANK_CELLS", "up to layers.0/{}, blocks have 64 units times states, more than 0"),
        ("MAX_RANK_PLACES", "up to layers.0/{}, blocks are in 2 places, more than 0"),
    ],
)
def test_what_takes_too_much_work_names_its_plane_and_the_limit(
    limit: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, limit, 0)
    mismatch = only(engine("p", GQA, 1).geometry(), engine("d", GQA, 1).geometry())
    assert mismatch.kind == "too_large"
    assert mismatch.where in ("layers.0/key", "layers.0/value")
    assert mismatch.message == says.format(mismatch.where.rpartition("/")[2])


def test_a_rank_that_does_not_exist_is_refused() -> None:
    geometry = engine("p", GQA).geometry()
    with pytest.raises(InvalidField, match="rank"):
        plan_read(geometry, geometry, 3)
