"""Writes docs/geometry.schema.json from the fields of a geometry file. `make schema` runs it."""

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from kvferry.geometry.file.fields import Described, GeometryFile, Never

PAGE = Path(__file__).parents[1] / "docs" / "geometry.schema.json"


class Schema(GenerateJsonSchema):
    """Knows the rules of `Described`. Omits titles, which repeat the names, and null as the default of optional
    fields."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """An object has no unknown fields, and obeys its rules."""
        kind: type[Described] = schema["cls"]
        rules = [rule_schema(rule) for rule in kind.never]
        found = super().model_schema(schema)
        for field in found["properties"].values():
            if "description" in field:
                field["description"] = field["description"].replace("\n", " ")
        return {**found, "additionalProperties": False, **({"allOf": rules} if rules else {})}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return {name: value for name, value in super().default_schema(schema).items() if value is not None}


def rule_schema(rule: Never) -> dict[str, Any]:
    """Return the schema of a rule."""
    has_value = {} if rule.value is None else {"properties": {rule.field: {"const": rule.value}}}
    never = {"not": {"anyOf": [{"required": [name]} for name in rule.names]}}
    return {"if": {"required": [rule.field], **has_value}, "else" if rule.unless else "then": never}


def text() -> str:
    """Return the schema as the file has it."""
    schema = GeometryFile.model_json_schema(schema_generator=Schema)
    schema = {"$schema": GenerateJsonSchema.schema_dialect, **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
