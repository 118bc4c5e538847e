"""Mistakes in geometry files are refused by path, value and expectation, whatever stands in them."""

import contextlib
import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidField, KvferryError
from kvferry.geometry import file as geometry_file
from tests.geometry.documents import MAMBA, small
from tests.geometry.mistakes import MISTAKES, changed, junk


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


def test_intervals_are_shown_as_the_file_has_them() -> None:
    latent = small(shards=[[0, 2], [2, 4]], model={"layers": 1, "attention": "mla", "latent_dim": 8, "dtype": "uint8"})
    with pytest.raises(InvalidField, match=r"shards is '\[\[0, 2\], \[2, 4\]\]', expected no such field"):
        geometry_file.parse(latent)


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


def test_files_need_pydantic_and_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvferry.geometry.file.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(InvalidField, match=r"pip install 'kvferry\[plan\]'"):
        geometry_file.parse(small())


@given(value=junk, data=st.data())
def test_documents_with_junk_anywhere_are_an_engine_or_a_typed_error(value: object, data: st.DataObject) -> None:
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
