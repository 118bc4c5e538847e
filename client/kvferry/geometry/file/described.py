"""JSON objects described by their fields: a description gives the check and errors with the path. The JSON schema comes
from it, too: `scripts/geometry_schema.py`."""

from __future__ import annotations

import difflib
import re
import reprlib
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvferry.errors import InvalidField

D = TypeVar("D", bound="Described")


@dataclass(frozen=True, slots=True)
class Never:
    """Fields that an object must not have if `field` is given or, with a `value`, if `field` has (with `unless`, has
    not) that value."""

    names: tuple[str, ...]
    because: str
    field: str
    value: str | None = None
    unless: bool = False

    def broken_by(self, found: Described) -> str:
        """The first field that the rule forbids; empty: there is none."""
        given = found.model_fields_set
        holds = self.field in given if self.value is None else getattr(found, self.field) == self.value
        return next((name for name in self.names if name in given), "") if holds != self.unless else ""


class Described(BaseModel):
    """An object of a file. An unknown field is an error, because a typing mistake must not mean the default. The
    docstring of a field is its description in the schema."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)
    never: ClassVar[tuple[Never, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, value: object) -> object:
        known = sorted(field.alias or name for name, field in cls.model_fields.items())
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f'"{near[0]}"?' if near else f"one of {', '.join(known)}"
                raise PydanticCustomError("field", "a known field: {hint}", {"field": name, "hint": hint})
        return value

    @model_validator(mode="after")
    def _has_no_refused_field(self: D) -> D:
        for rule in self.never:
            if name := rule.broken_by(self):
                raise PydanticCustomError("field", "no such field {why}", {"field": name, "why": rule.because})
        return self

    def given(self, kind: type[Described]) -> dict[str, Any]:
        """The fields of `kind` that the file gives in this object."""
        return {name: getattr(self, name) for name in kind.model_fields if name in self.model_fields_set}

    @classmethod
    def read(cls: type[D], document: object) -> D:
        """Check a document; raises `InvalidField` for a mistake."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise _refusal(error, document) from None


_PHRASES = {
    "model_type": "an object",
    "dict_type": "an object",
    "tuple_type": "a list of two integers",
    "missing": "a value: this field has no default",
    "string_pattern_mismatch": "a name with {} for the layer's index",
}
_AROUND = re.compile(r"^\w+ should (be |have )?|^Value error, | after validation, not \d+")


def _refusal(error: ValidationError, document: object) -> InvalidField:
    """The first mistake. A field that may have several types has an error for each type, at the same path."""
    found: dict[str, tuple[object, list[str]]] = {}
    for detail in error.errors(include_url=False):
        value, path = document, ""
        field = detail.get("ctx", {}).get("field")
        for part in (*detail["loc"], *([] if field is None else [field])):
            known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
            if part not in known:
                if detail["type"] == "missing":
                    value, path = None, at(path, part)
                break  # The rest of the location names the attempted type.
            value, path = value[part], at(path, part)  # type: ignore[index]
        phrase = _PHRASES.get(detail["type"], _AROUND.sub("", detail["msg"]))
        phrase = phrase.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
        found.setdefault(path, (value, []))[1].append(phrase)
    path, (value, phrases) = next(iter(found.items()))
    return InvalidField(path or "the document", short(value), " or ".join(dict.fromkeys(phrases)))


def at(path: str, name: str | int) -> str:
    """The JSON path of a field or an item."""
    return f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}" if path else name


def short(value: object) -> object:
    """The value for an error message; a long value is shortened."""
    return reprlib.repr(value) if isinstance(value, (dict, list)) else value


def integer(default: Any, low: int, high: int) -> Any:
    """An integer field in ``[low, high]``."""
    return Field(default, ge=low, le=high)


def text(default: Any, high: int, **more: Any) -> Any:
    """A string field of 1 to `high` characters."""
    return Field(default, min_length=1, max_length=high, **more)
