"""Geometry files: an engine's whole cache geometry in a few lines of JSON, for planning without running engines. ::

    {"engine_id": "prefill", "tp_size": 4, "layout": "HND", "block_size": 16, "num_blocks": 1024,
     "model": {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "attention": "gqa"}}

``docs/geometry.schema.json`` describes every field; ``examples/geometry`` has a file for each kind of engine. An
unknown field is an error, never ignored. Reading files needs pydantic (``kvferry[plan]`` or ``kvferry[server]``).

Addresses are made up but consistent: each rank's planes lie in one allocation, as in an engine, so that a plan from a
file merges the same reads as a plan of the running engine. `rebase` moves a rank to memory that exists.
"""

from __future__ import annotations

import json
from dataclasses import replace
from os import PathLike
from pathlib import Path

from kvferry.errors import BadGeometry, InvalidField
from kvferry.geometry.model import EngineGeometry, RankGeometry

__all__ = ["load", "parse", "rank_bytes", "rebase"]


def load(path: str | PathLike[str]) -> EngineGeometry:
    """The engine that a geometry file describes.

    Raises:
        InvalidField: the file cannot be read, is no JSON, or a field is wrong: `.values` name its JSON path, the value,
            what was expected, and the file.
        BadGeometry: fields that are valid singly contradict each other; `.values` name the file.
    """
    try:
        return _load(path)
    except (InvalidField, BadGeometry) as error:
        name = str(path)
        message = error.message if name in error.message else f"{name}: {error.message}"
        raise type(error).rebuilt(message, {**error.values, "file": name}) from None


def _load(path: str | PathLike[str]) -> EngineGeometry:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InvalidField("geometry file", str(path), f"a readable file ({error.strerror})") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidField):
            raise
        raise InvalidField("geometry file", str(path), f"JSON ({error})") from None
    return parse(value)


def parse(value: object) -> EngineGeometry:
    """The engine that a geometry document, the value of `json.loads`, describes. Raises the errors of `load`."""
    try:
        from pydantic import ValidationError

        from kvferry.geometry.file.build import build_engine
        from kvferry.geometry.file.fields import GeometryFile, refusal
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        raise InvalidField("geometry file", "not read", "pydantic, from: pip install 'kvferry[plan]'") from None
    try:
        file = GeometryFile.model_validate(value)
    except ValidationError as error:
        raise refusal(error, value) from None
    return build_engine(file)


def rank_bytes(rank: RankGeometry) -> int:
    """Bytes from the first to one past the last byte of a rank's planes; 0 if the rank has no planes."""
    return max((plane.extent[1] for plane in rank.planes), default=0) - _first_address(rank)


def rebase(rank: RankGeometry, base: int) -> RankGeometry:
    """The same rank with its first byte at `base`; raises `BadGeometry` if addresses would reach past 2**63."""
    by = base - _first_address(rank)
    return replace(rank, planes=tuple(replace(plane, base=plane.base + by) for plane in rank.planes))


def _first_address(rank: RankGeometry) -> int:
    return min((plane.base for plane in rank.planes), default=0)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object; raises `InvalidField` for a repeated field name, of which JSON parsers silently keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise InvalidField(twice, "two values", "each field of an object once")
    return found
