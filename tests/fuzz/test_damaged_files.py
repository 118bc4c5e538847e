"""Geometry files from strangers: an engine or a typed error, in bounded time and memory."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import KvferryError
from kvferry.geometry.file import load, parse
from tests.fuzz.bounded import bounded
from tests.fuzz.conftest import FUZZ
from tests.support.repository import EXAMPLES

FILES = sorted(EXAMPLES.glob("*.json"))
SMALL: dict[str, Any] = {
    "engine_id": "e",
    "block_size": 16,
    "num_blocks": 64,
    "model": {"layers": 2, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"},
}

NUMBERS = [0, -1, 1, 2**20, 2**31, 2**48, 2**63, 2**64, 10**400, 0.5, float("inf"), float("nan")]
TEXTS = ["", "x", "\0", "\ud800", "{}", "full", "x" * 300]
strange: st.SearchStrategy[Any] = st.sampled_from([*NUMBERS, *TEXTS, None, True, [], {}, [[]], [[0, 2**40]], {"": {}}])


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of all values in a document."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [path, *(found for key, item in items for found in places(item, (*path, key)))]


def put(value: Any, path: tuple[str | int, ...], new: object) -> Any:
    """Return the document with another value at one path."""
    if not path:
        return new
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return value


@FUZZ
@given(data=st.data())
def test_documents_with_strange_values_end_in_a_typed_error(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(FILES)).read_text()
    document = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        document = put(document, data.draw(st.sampled_from(places(document))), copy.deepcopy(data.draw(strange)))
    with bounded(), suppress(KvferryError):
        parse(document)


@FUZZ
@given(data=st.data())
def test_damaged_files_end_in_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(FILES)).read_bytes())
    at = data.draw(st.integers(0, len(raw)))
    raw[at : at + data.draw(st.integers(0, 20))] = data.draw(
        st.binary(max_size=8)
        | st.sampled_from([b"[" * 200_000, b"9" * 5000, b"1e999", b"NaN", b'{"a":' * 50_000, b"\xff"])
    )
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(raw)
    with bounded(), suppress(KvferryError):
        load(path)


HUGE: dict[str, dict[str, Any]] = {
    "ranks times layers": {"tp_size": 4096, "model": {**SMALL["model"], "layers": 4096, "kv_heads": 4096}},
    "stages times layers": {
        "pp_size": 4096,
        "groups": [{"name": f"{n}", "layer_name": f"{n}.{{}}"} for n in range(8)],
        "model": {**SMALL["model"], "layers": 4096},
    },
    "groups": {"groups": [{"name": f"{n}"} for n in range(20_000)]},
    "groups times layers": {
        "groups": [{"name": f"{n}", "layer_name": f"{n}.{{}}"} for n in range(300)],
        "model": {**SMALL["model"], "layers": 4096},
    },
    "components": {
        "groups": [{"name": "full", "components": [{"name": f"{n}", "units": 1, "content": 1} for n in range(20_000)]}]
    },
    "layers given one by one": {
        "groups": [{"name": "full", "layer_name": "x{}", "layers": [[n, n + 1] for n in range(4096)]}]
    },
    "paddings": {"block_padding": 2**48, "page_padding": 2**48, "num_blocks": 2**31 - 1},
    "heads": {"model": {**SMALL["model"], "kv_heads": 2**20, "head_dim": 2**24}},
    "identity": {"identity": {f"{n}": "x" for n in range(100_000)}},
}


@pytest.mark.parametrize("case", HUGE)
def test_small_file_does_not_expand_to_a_large_engine(case: str) -> None:
    with bounded(), suppress(KvferryError):
        parse({**SMALL, **HUGE[case]})
