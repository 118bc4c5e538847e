"""The schema in docs/ is current and true: it takes every file the loader takes, and refuses mistakes that the loader
refuses."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import BadGeometry, InvalidField
from kvferry.geometry import file as geometry_file
from scripts import geometry_schema
from tests.geometry.documents import FILES, LLAMA
from tests.geometry.mistakes import MISTAKES, junk
from tests.support.examples import examples
from tests.support.repository import ROOT

SCHEMA = json.loads((ROOT / "docs" / "geometry.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
DOCUMENTS = [json.loads(path.read_text()) for path in FILES]

# What only the loader refuses: inherited fields, arithmetic over several fields, and what names and lengths must be.
BEYOND_THE_SCHEMA = {
    *("shards", "shards[2]", "shards[3]", "stages", "stages[0]", "pp_size", "page_size", "token_shard.count"),
    *("null_block", "layers[0]", "layers[1]", "engine_id", "block_size", "num_blocks", "window"),
    *("model.kv_heads", "model.head_dim", "model.dtype", "model.latent_dim", "model.rope_dim"),
    *("components[0].name", "components[0].layers", "components[0].rows", "groups[0].name", "groups[0].shards"),
    *("groups[1].num_blocks", "groups[1].kv", "groups[1].components", "groups[1].components[0].units"),
    "groups[1].components[1].tokens_per_state",
}


def test_schema_in_the_documentation_is_current() -> None:
    assert geometry_schema.PAGE.read_text() == geometry_schema.text(), "make schema"


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_fit_the_schema(path: Path) -> None:
    VALIDATOR.validate(json.loads(path.read_text()))


@pytest.mark.parametrize(("mistaken", "path"), MISTAKES, ids=[f"{i}-{path}" for i, (_, path) in enumerate(MISTAKES)])
def test_schema_refuses_mistakes_within_a_field(mistaken: dict[str, Any], path: str) -> None:
    assert not VALIDATOR.is_valid(mistaken) or path in BEYOND_THE_SCHEMA


def test_schema_describes_every_field() -> None:
    for object_schema in (SCHEMA, *SCHEMA["$defs"].values()):
        for name, field in object_schema["properties"].items():
            assert "description" in {**SCHEMA["$defs"].get(field.get("$ref", "").rpartition("/")[2], {}), **field}, name


def containers(node: object) -> list[Any]:
    """Every object and non-empty list of a document."""
    inner = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return ([node] if inner else []) + [found for child in inner for found in containers(child)]


def known_fields() -> list[str]:
    found: set[str] = set(SCHEMA["properties"])
    for definition in SCHEMA["$defs"].values():
        found |= set(definition.get("properties", {}))
    return sorted(found)


WORDS = ("page", "plain", "opaque", "state", "window", "full", "mla", "gqa", "packed", "apart", "NHD", "cross_layer")
NUMBERS = (1, 2, 3, 4, 8, 16, True, False)
LISTS = (
    [0],
    [0, 1],
    [[0, 1], [1, 2]],
    [{"name": "key"}],
    [{"name": "a"}],
    ["layer", "block", "unit", "component", "token"],
)
values = st.sampled_from((*WORDS, *NUMBERS, *LISTS, "layers.{}.x", "rows_first", "bfloat16", {"count": 2}, {"a": "b"}))


@settings(max_examples=examples(200))
@given(data=st.data())
def test_schema_takes_every_document_that_the_loader_takes(data: st.DataObject) -> None:
    document = copy.deepcopy(data.draw(st.sampled_from([LLAMA, *DOCUMENTS])))
    document["num_blocks"] = 2
    for _ in range(data.draw(st.integers(1, 3))):
        target = data.draw(st.sampled_from(containers(document)))
        if isinstance(target, list):
            target[data.draw(st.integers(0, len(target) - 1))] = copy.deepcopy(data.draw(values | junk))
            continue
        name = data.draw(st.sampled_from(known_fields()) | st.sampled_from(sorted(target)))
        if data.draw(st.booleans()):
            target[name] = copy.deepcopy(data.draw(values | junk))
        else:
            target.pop(name, None)
    try:
        geometry_file.parse(document)
    except (BadGeometry, InvalidField):
        return
    VALIDATOR.validate(document)
