"""An operator's settings of a connector, from JSON or from text, checked before the engine starts. By pydantic, which
vLLM and SGLang need themselves."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from kvferry.errors import InvalidField

Made = TypeVar("Made")

Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""Up to the longest timeout of the SDK, about three years."""
PrefixShare = Annotated[float, Field(ge=0, le=1)]
PrefixWait = Annotated[float, Field(ge=0.001, le=2)]


def made(kind: type[Made], given: Mapping[str, object], *, text: bool = False) -> Made:
    """Make a dataclass of settings from JSON's values; `text`: all values are strings. Raises `InvalidField`: a name is
    unknown, or a value is wrong; `field` is the name, with dots inside objects."""
    adapter = TypeAdapter(kind)
    try:
        if text:
            return adapter.validate_strings(given)
        return adapter.validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError as refused:
        # Unknown names first: they say why another one is missing.
        error = max(refused.errors(), key=lambda each: each["type"] == "unexpected_keyword_argument")
    place, cause = [*map(str, error["loc"])], error.get("ctx", {}).get("error")
    if isinstance(cause, InvalidField):
        # Of the class itself, which has written the value into its message already.
        place.append(cause.values["field"])
        raise InvalidField(".".join(place), _Said(cause.values["value"]), cause.values["expected"])
    if error["type"] == "unexpected_keyword_argument":
        raise InvalidField(".".join(place), shown(error["input"]), _instead(kind, place))
    expected = re.sub("^(Input|String) should (be )?", "", error["msg"])
    raise InvalidField(".".join(place), shown(error["input"]), expected)


def _instead(kind: Any, place: list[str]) -> str:
    """Return the text of an error about an unknown name: a likely replacement, or all names."""
    for name in place[:-1]:
        hint = get_type_hints(kind)[name]
        kind = next(each for each in (hint, *get_args(hint)) if is_dataclass(each))
    known = sorted(each.name for each in fields(kind))
    near = difflib.get_close_matches(place[-1], known, 1, 0.5)
    return f"{near[0]!r}, perhaps: there is no such name" if near else f"one of {', '.join(known)}"


def shown(value: object) -> object:
    """Return a number or short string as it is, and the type of any other value, for errors."""
    short = value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 80)
    return value if short else type(value)


class _Said(str):
    """A value that an error has described already."""

    def __repr__(self) -> str:
        return str(self)
