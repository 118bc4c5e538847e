"""Mistakes in geometry files are refused by path, value and expectation, whatever stands in them."""

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidField, KvferryError
from kvferry.geometry import file as geometry_file
from tests.geometry.hurry import unhurried
from tests.geometry.test_geometry_files import LLAMA, MAMBA, document, small


def changed(path: str, value: object, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A file with one value changed, added or (with `...`) removed; list indices are numbers."""
    found = copy.deepcopy(LLAMA if base is None else base)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = found
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return found


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (changed("engine_id", ...), "engine_id"),
    (changed("engine_id", ""), "engine_id"),
    (changed("engine_id", "\ud800"), "engine_id"),
    (changed("model", ...), "model"),
    (changed("model", []), "model"),
    (changed("model.layers", 0), "model.layers"),
    (changed("model.kv_heads", ...), "model.kv_heads"),
    (changed("model.head_dim", ...), "model.head_dim"),
    (changed("model.head_dim", 128.0), "model.head_dim"),
    (changed("model.dtype", ...), "model.dtype"),
    (changed("model.dtype", "bf16"), "model.dtype"),
    (changed("model.attention", "mqa"), "model.attention"),
    (changed("model.attention", "mla"), "model.kv_heads"),
    (changed("model.latent_dim", 512), "model.latent_dim"),
    (changed("model.heads", 8), "model.heads"),
    (changed("tp_size", 0), "tp_size"),
    (changed("tp_size", "4"), "tp_size"),
    (changed("tp_size", True), "tp_size"),
    (changed("pp_size", 33), "pp_size"),
    (changed("pp_size", 2000), "pp_size"),
    (changed("layout", "hnd"), "layout"),
    (changed("block_size", ...), "block_size"),
    (changed("num_blocks", ...), "num_blocks"),
    (changed("num_blocks", 2**31), "num_blocks"),
    (changed("num_block", 10), "num_block"),
    (changed("kv", "together"), "kv"),
    (changed("tensors", "one"), "tensors"),
    (changed("shards", [[0, 4], [4, 8]]), "shards"),
    (changed("shards", [[0, 2], [2, 4], [4, 6], [6, 9]]), "shards[3]"),
    (changed("shards", [[0, 2], [2, 4], [4, 4], [6, 8]]), "shards[2]"),
    (changed("stages", [[0, 33]]), "stages[0]"),
    (changed("stages", []), "stages"),
    (document(layout=None, order=["layer", "block", "unit", "token"]), "order"),
    (changed("order", ["layer", "block", "unit", "token", "kv"]), "layout"),
    (changed("page_size", 5), "page_size"),
    (changed("page_size", 32), "page_size"),
    (changed("token_shard", {"count": 3}), "token_shard.count"),
    (changed("token_shard", {"count": 2, "step": 1}), "token_shard.step"),
    (changed("tokens_per_state", 0), "tokens_per_state"),
    (changed("tokens_per_state", [1, 2, 3]), "tokens_per_state"),
    (changed("tokens_per_state", 3), "block_size"),
    ({**changed("tokens_per_state", 8), "page_size": 4}, "page_size"),
    (changed("kind", "sliding"), "kind"),
    (changed("kind", "window"), "window"),
    (changed("window", 128), "window"),
    (changed("kind", "state"), "block_size"),
    (changed("null_block", 1024), "null_block"),
    (changed("layers", [32]), "layers[0]"),
    (changed("layers", [[0, 4], 3]), "layers[1]"),
    (changed("layers", []), "layers"),
    (changed("layer_name", "layer"), "layer_name"),
    (changed("granule", "block"), "granule"),
    (changed("optional", 1), "optional"),
    (changed("memory", "hbm"), "memory"),
    (changed("identity", {"model": 8}), "identity.model"),
    (changed("rows", "rows_first"), "rows"),
    (changed("components", []), "components"),
    (changed("components", [{"content": 4}]), "components[0].name"),
    (changed("components", [{"name": "key"}, {"name": "key"}]), "components[0].name"),
    (changed("components", [{"name": "key", "rows": 3}]), "components[0].rows"),
    (changed("components", [{"name": "key", "unit": 3}]), "components[0].unit"),
    (changed("components", [{"name": "key", "layers": [40]}]), "components[0].layers"),
    (changed("groups", []), "groups"),
    (changed("groups", [{}]), "groups[0].name"),
    (changed("groups", [{"name": "a"}, {"name": "a"}]), "groups[0].name"),
    (changed("groups", [{"name": "a", "tp_size": 2}]), "groups[0].tp_size"),
    ({**changed("groups", [{"name": "a"}]), "pool": "x"}, "pool"),
    (changed("groups.1.components", ..., MAMBA), "groups[1].components"),
    (changed("groups.1.components.0.units", ..., MAMBA), "groups[1].components[0].units"),
    (changed("groups.1.block_size", 16, MAMBA), "groups[1].block_size"),
    (changed("groups.1.kv", "packed", MAMBA), "groups[1].kv"),
    (changed("groups.1.num_blocks", ..., MAMBA), "groups[1].num_blocks"),
    (changed("groups.1.components.1.tokens_per_state", 2, MAMBA), "groups[1].components[1].tokens_per_state"),
    (
        {**changed("shards", [[0, 2], [2, 4], [4, 6], [6, 8]]), "groups": [{"name": "a", "kv_heads": 4}]},
        "groups[0].shards",
    ),
]


@pytest.mark.parametrize(("mistaken", "path"), MISTAKES, ids=[f"{i}-{path}" for i, (_, path) in enumerate(MISTAKES)])
def test_mistakes_are_refused_by_path_value_and_expectation(mistaken: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        geometry_file.parse(mistaken)
    assert caught.value.values["field"] == path
    assert caught.value.values["expected"]
    assert caught.value.values["value"] in str(caught.value)


def test_misspelt_fields_get_the_right_one_suggested() -> None:
    with pytest.raises(InvalidField, match=r'num_block is 10, expected a known field: "num_blocks"'):
        geometry_file.parse(changed("num_block", 10))


@pytest.mark.parametrize("value", [None, 3, "x", [], [1], True, math.nan])
def test_documents_that_are_no_objects_are_refused(value: object) -> None:
    with pytest.raises(InvalidField, match="an object"):
        geometry_file.parse(value)


@pytest.mark.parametrize(
    "text", ["", "{", "[1", "nul", '{"a": ' * 100_000, "\x00", '{"engine_id": "a", "engine_id": "b"}', "9" * 10_000]
)
def test_files_that_are_no_json_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InvalidField):
        geometry_file.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="No such file"):
        geometry_file.load(tmp_path / "missing.json")
    with pytest.raises(InvalidField):
        geometry_file.load(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"engine_id": "\xff"}')
    with pytest.raises(InvalidField):
        geometry_file.load(tmp_path / "latin.json")


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@unhurried
@given(value=junk, data=st.data())
def test_any_junk_anywhere_is_an_engine_or_a_typed_error(value: object, data: st.DataObject) -> None:
    mistaken = small(groups=[{"name": "full", "layers": [0], "components": [{"name": "key"}]}, *MAMBA["groups"][1:]])
    mistaken, value = copy.deepcopy(mistaken), copy.deepcopy(value)
    target: Any = mistaken
    for _ in range(data.draw(st.integers(0, 4))):
        inner = target.values() if isinstance(target, dict) else target
        containers = [child for child in inner if isinstance(child, (dict, list)) and child]
        if not containers:
            break
        target = data.draw(st.sampled_from(containers))
    key = data.draw(st.sampled_from(list(target) if isinstance(target, dict) else range(len(target))))
    target[key] = value
    with contextlib.suppress(KvferryError):
        geometry_file.parse(mistaken)
