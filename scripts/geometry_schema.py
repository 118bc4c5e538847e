"""Writes docs/geometry.schema.json from the fields of a geometry file. `make schema` runs it."""

import json
from pathlib import Path

from kvferry.geometry.file.described import schema
from kvferry.geometry.file.fields import GeometryFile

PAGE = Path(__file__).parents[1] / "docs" / "geometry.schema.json"


def text() -> str:
    """Return the schema as the file has it."""
    return json.dumps(schema(GeometryFile), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
