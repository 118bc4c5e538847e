"""Checked reading of a JSON document: every mistake names its path, the value, and what was expected."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeVar, cast

from kvferry.errors import InvalidField
from kvferry.geometry.plane import Interval

T = TypeVar("T")

BIG = 1 << 48
"""No size in a file is larger: products of a few of them still fit an address or are refused by the plane."""


class Required:
    """Stands for "there is no default"."""


REQUIRED = Required()


class _Missing:
    """The value of a field that is not there, in errors."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


class Fields:
    """The fields of one JSON object. Each is taken once, by name; `finish` refuses those nobody took.

    All methods raise `InvalidField` with the JSON path of the field.
    """

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise InvalidField(path or "the document", short(value), "an object")
        self.path = path
        self._values: dict[str, object] = value
        self._known: list[str] = []

    def at(self, name: str) -> str:
        """The JSON path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Whether the object has this field; knows it from now on."""
        self._known.append(name)
        return name in self._values

    def value(self, name: str) -> object:
        """The field as it stands; None if there is none."""
        return self._values.get(name)

    def integer(self, name: str, default: T | Required = REQUIRED, low: int = 0, high: int = BIG) -> int | T:
        """An integer in ``[low, high]``."""
        if not self.has(name):
            return self._default(name, default, _range(low, high))
        return checked_integer(self._values[name], self.at(name), low, high)

    def text(self, name: str, default: T | Required = REQUIRED, high: int = 256) -> str | T:
        """A string of 1 to `high` bytes."""
        expected = f"a string of 1 to {high} bytes"
        if not self.has(name):
            return self._default(name, default, expected)
        value = self._values[name]
        if not isinstance(value, str) or not 1 <= _utf8_bytes(value) <= high:
            raise InvalidField(self.at(name), short(value), expected)
        return value

    def choice(self, name: str, options: Iterable[str], default: T | Required = REQUIRED) -> str | T:
        """One of a few strings."""
        options = list(options)
        expected = " or ".join(f'"{option}"' for option in options)
        if not self.has(name):
            return self._default(name, default, expected)
        value = self._values[name]
        if not isinstance(value, str) or value not in options:
            raise InvalidField(self.at(name), short(value), expected)
        return value

    def flag(self, name: str, default: T | Required = REQUIRED) -> bool | T:
        """True or false."""
        if not self.has(name):
            return self._default(name, default, "true or false")
        value = self._values[name]
        if not isinstance(value, bool):
            raise InvalidField(self.at(name), short(value), "true or false")
        return value

    def ratio(self, name: str, default: T | Required = REQUIRED) -> Fraction | T:
        """A positive rational number: an integer, or ``[numerator, denominator]``."""
        expected = "an integer of at least 1, or [numerator, denominator]"
        if not self.has(name):
            return self._default(name, default, expected)
        value = self._values[name]
        if isinstance(value, list):
            if len(value) != 2:
                raise InvalidField(self.at(name), short(value), expected)
            parts = [checked_integer(v, f"{self.at(name)}[{i}]", 1, 1 << 31) for i, v in enumerate(value)]
            return Fraction(parts[0], parts[1])
        return Fraction(checked_integer(value, self.at(name), 1, 1 << 31, expected))

    def array(self, name: str, expected: str) -> list[tuple[str, object]] | None:
        """The items of a list, each with its path; None if there is no such field."""
        if not self.has(name):
            return None
        value = self._values[name]
        if not isinstance(value, list) or not value:
            raise InvalidField(self.at(name), short(value), expected)
        return [(f"{self.at(name)}[{index}]", item) for index, item in enumerate(value)]

    def intervals(self, name: str, count: int, of: str, high: int) -> tuple[Interval, ...] | None:
        """A list of `count` half-open intervals within ``[0, high)``; None if there is no such field.

        Args:
            name: the field.
            count: how many there must be.
            of: what there is one of each for, e.g. "tp_rank".
            high: end of the axis.
        """
        expected = f"a list of {count} intervals [begin, end], one for each {of}"
        items = self.array(name, expected)
        if items is None:
            return None
        if len(items) != count:
            raise InvalidField(self.at(name), f"{len(items)} intervals", expected)
        return tuple(checked_interval(item, path, high) for path, item in items)

    def object(self, name: str) -> Fields | None:
        """A nested object, or None."""
        return Fields(self._values[name], self.at(name)) if self.has(name) else None

    def strings(self, name: str) -> dict[str, str]:
        """An object of strings; empty if there is no such field."""
        if not self.has(name):
            return {}
        value = self._values[name]
        if not isinstance(value, dict):
            raise InvalidField(self.at(name), short(value), "an object of strings")
        for key, item in value.items():
            if not isinstance(item, str) or _utf8_bytes(key) < 0 or _utf8_bytes(item) < 0:
                raise InvalidField(f"{self.at(name)}.{key}", short(item), "a string")
        return cast("dict[str, str]", dict(value))

    def refuse(self, names: Iterable[str], because: str) -> None:
        """Refuse fields that make no sense here."""
        for name in names:
            if self.has(name):
                raise InvalidField(self.at(name), short(self._values[name]), f"no such field {because}")

    def finish(self) -> None:
        """Refuse fields that nobody took: a typing mistake must not silently mean the default."""
        for name in self._values:
            if name not in self._known:
                near = difflib.get_close_matches(name, self._known, 1)
                hint = f'"{near[0]}"?' if near else f"one of {', '.join(sorted(set(self._known)))}"
                raise InvalidField(self.at(name), short(self._values[name]), f"a known field: {hint}")

    def _default(self, name: str, default: T | Required, expected: str) -> T:
        if isinstance(default, Required):
            raise InvalidField(self.at(name), MISSING, expected)
        return default


def checked_integer(value: object, path: str, low: int, high: int, expected: str = "") -> int:
    """An integer in ``[low, high]``; JSON's true and 1.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidField(path, short(value), expected or _range(low, high))
    return value


def checked_interval(value: object, path: str, high: int) -> Interval:
    """``[begin, end]`` within ``[0, high)``, not empty."""
    expected = f"[begin, end] with 0 <= begin < end <= {high}"
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidField(path, short(value), expected)
    begin, end = (checked_integer(edge, path, 0, high, expected) for edge in value)
    if begin >= end:
        raise InvalidField(path, value, expected)
    return Interval(begin, end)


def indices(items: Sequence[tuple[str, object]], high: int) -> tuple[int, ...]:
    """Indices below `high`, given one by one or as intervals; in the order given, each once."""
    found: dict[int, None] = {}
    for path, item in items:
        if isinstance(item, list):
            interval = checked_interval(item, path, high)
            more = range(interval.begin, interval.end)
        else:
            index = checked_integer(item, path, 0, high - 1, f"an index below {high}, or [begin, end]")
            more = range(index, index + 1)
        twice = [index for index in more if index in found]
        if twice:
            raise InvalidField(path, short(item), f"each index once; {min(twice)} is given twice")
        found.update(dict.fromkeys(more))
    return tuple(found)


def short(value: object) -> object:
    """The value for an error message: long ones shortened."""
    return reprlib.repr(value) if isinstance(value, (dict, list)) else value


def _utf8_bytes(text: str) -> int:
    """Its length on the wire; -1 for what JSON can spell but UTF-8 cannot (half a surrogate pair)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1


def _range(low: int, high: int) -> str:
    return f"an integer of at least {low}" if high == BIG else f"an integer from {low} to {high}"
