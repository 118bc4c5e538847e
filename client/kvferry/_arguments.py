"""Checks and copies the arguments of public calls.

A caller may change a list, a dict or a buffer as soon as a call has returned, while other threads still use the values.
So each public call checks and copies its arguments first. Integers of numpy become Python's, because numpy's sums wrap.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from kvferry.errors import InvalidField

Caller = TypeVar("Caller")
Given = ParamSpec("Given")
Result = TypeVar("Result")
Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=Enum)

MOST_SECONDS = 1e8
"""The longest timeout in seconds, about three years: no wait is without a deadline (R5), and more would overflow the
timeouts of threads and gRPC."""

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def takes(
    value: Callable[Given, Value],
) -> Callable[[Callable[[Caller, Value], Result]], Callable[Concatenate[Caller, Given], Result]]:
    """Make a method that takes a value of this class take the arguments of the class instead."""

    def decorate(method: Callable[[Caller, Value], Result]) -> Callable[Concatenate[Caller, Given], Result]:
        def call(self: Caller, /, *given: Given.args, **options: Given.kwargs) -> Result:
            return method(self, value(*given, **options))

        made: Any = functools.update_wrapper(call, method)
        # `inspect.signature` returns the arguments of the class, and not the parameter of the method.
        del made.__wrapped__
        of: Any = value
        parameters, own = inspect.signature(of).parameters, inspect.signature(method)
        made.__signature__ = own.replace(parameters=(next(iter(own.parameters.values())), *parameters.values()))
        # The fields of a dataclass may come from several modules. The class has their hints, its constructor has not.
        hints = get_type_hints(of if is_dataclass(of) else of.__init__)
        made.__annotations__ = {name: hints[name] for name in parameters}
        made.__annotations__["return"] = get_type_hints(method)["return"]
        return call

    return decorate


def described(value: object) -> object:
    """Return a number or short string as it is, and the type of any other value: for errors, which never show bytes,
    because they may be a secret."""
    if value is None or isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 80):
        return value
    return type(value)


def instance(name: str, value: object, kind: type[Value], expected: str) -> Value:
    """Return the value if it has this type; raises `InvalidField`."""
    if not isinstance(value, kind):
        raise InvalidField(name, described(value), expected)
    return value


def choice(name: str, value: object, kind: type[Choice]) -> Choice:
    """Convert the value of an enum's member to the member; raises `InvalidField`."""
    for each in kind:
        if each.value == value:
            return each
    *most, last = (repr(each.value) for each in kind)
    raise InvalidField(name, described(value), f"{', '.join(most)} or {last}")


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Convert an integer of Python or numpy, ``least <= value <= most``; raises `InvalidField`, also for True and
    1.0."""
    expected = "an integer" if least is None else f"an integer of at least {least}"
    if most is not None:
        expected = f"an integer of {least} to {most}"
    try:
        found = int(operator.index(value)) if not isinstance(value, bool) else None  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        raise InvalidField(name, described(value), expected)
    return found


def fraction(name: str, value: object) -> Fraction:
    """Convert an integer of Python or numpy to a Fraction; raises `InvalidField`."""
    return value if isinstance(value, Fraction) else Fraction(integer(name, value))


def check_fields(frozen: object) -> None:
    """Check the fields of a frozen dataclass that are declared as a class, or as a class or None. Integers and flags
    become Python's, and integers Fractions where these are declared. Raises `InvalidField`."""
    dataclass: Any = type(frozen)
    for name, kind, optional, check in _checks(dataclass):
        value = getattr(frozen, name)
        # Any value of the very class is valid, except strings that UTF-8 may not be able to encode.
        if (type(value) is kind and (kind is not str or value.isascii())) or (value is None and optional):
            continue
        found = check(name, value)
        if found is not value:
            object.__setattr__(frozen, name, found)


@functools.cache
def _checks(dataclass: type) -> tuple[tuple[str, Any, bool, Callable[[str, object], object]], ...]:
    """Name and class of each such field, whether None is allowed, and the check."""
    own: dict[type, Callable[[str, object], object]] = {str: text, int: integer, bool: flag, Fraction: fraction}
    found = []
    for name, hint in get_type_hints(dataclass).items():
        kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
        if len(kinds) > 1 or get_origin(hint) not in (None, UnionType):
            continue
        expected = f"{'an' if kinds[0].__name__[0] in 'AEIOU' else 'a'} {kinds[0].__name__}"
        check = own.get(kinds[0]) or functools.partial(instance, kind=kinds[0], expected=expected)
        found.append((name, kinds[0], kinds[0] is not hint, check))
    return tuple(found)


def flag(name: str, value: object) -> bool:
    """Convert a bool of Python or numpy; raises `InvalidField`, also for other true values such as "no"."""
    if value is not True and value is not False and type(value).__name__ not in ("bool_", "bool"):
        raise InvalidField(name, described(value), "True or False")
    return bool(value)


def seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Convert a timeout in seconds, at most `MOST_SECONDS`, and 0 only with `zero`; raises `InvalidField`."""
    expected = f"{'0' if zero else 'more than 0'} to {MOST_SECONDS:.0e} seconds"
    try:
        found = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (0 <= found <= MOST_SECONDS) or (found == 0 and not zero):
        raise InvalidField(name, described(value), expected)
    return found


def text(name: str, value: object, expected: str = "a string") -> str:
    """Return a string that UTF-8 can encode; raises `InvalidField`."""
    found = str(instance(name, value, str, expected))
    try:
        found.encode()
    except UnicodeEncodeError:
        raise InvalidField(name, ascii(found)[:80], f"{expected} that is Unicode") from None
    return found


SHOWABLE = "no line ends and other control characters"
"""The expectation of `showable`, for errors."""


def showable(name: str) -> bool:
    """Whether a name has no control characters, which begin new lines or turn the text around, so that a printed name
    cannot look like another. Python's own `isprintable` also refuses text that people write: the spaces of Japanese,
    and emoji that are joined, or newer than the interpreter."""
    return name.isprintable() or _CONTROLS.search(name) is None


def label(name: str, value: object, most: int = 256) -> str:
    """Return a name of 1 to `most` bytes that can be shown (`showable`); raises `InvalidField`."""
    found = text(name, value)
    size = len(found.encode())
    if not 1 <= size <= most:
        raise InvalidField(name, found[:most], f"1 to {most} bytes")
    if not showable(found):
        raise InvalidField(name, ascii(found)[:most], SHOWABLE)
    return found


def texts(name: str, values: object) -> tuple[str, ...]:
    """Copy several strings; raises `InvalidField`, also for a single string."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidField(name, described(values), "several strings")
    return tuple(text(name, value) for value in values)


def payload(name: str, value: object) -> bytes:
    """Copy bytes, a bytearray or a memoryview; raises `InvalidField`."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidField(name, described(value), "bytes")
    return bytes(value)


def mapping(name: str, value: object, expected: str) -> dict[object, object]:
    """Copy a mapping; raises `InvalidField`."""
    return dict(instance(name, value, Mapping, expected))  # type: ignore[type-abstract]


def string_map(name: str, value: object) -> dict[str, str]:
    """Copy a mapping of strings to strings; raises `InvalidField`, which names the wrong entry."""
    found = mapping(name, value, "a mapping of strings to strings")
    return {text(f"{name} key", key): text(f"{name}[{key!r}]", item) for key, item in found.items()}


def integer_map(name: str, value: object) -> dict[str, int]:
    """Copy a mapping of strings to integers; raises `InvalidField`, which names the wrong entry."""
    found = mapping(name, value, "a mapping of strings to integers")
    return {text(f"{name} key", key): integer(f"{name}[{key!r}]", item) for key, item in found.items()}


def several(name: str, values: object, kind: type[Value], expected: str) -> tuple[Value, ...]:
    """Copy several values of one type; raises `InvalidField`."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidField(name, described(values), expected)
    return tuple(instance(name, value, kind, expected) for value in values)


def token_range(tokens: object) -> tuple[int, int] | None:
    """Copy a token range ``[a, b)``, or None; raises `InvalidField`."""
    if tokens is None:
        return None
    if not isinstance(tokens, (tuple, list)) or len(tokens) != 2:
        raise InvalidField("tokens", described(tokens), "two integers, (a, b)")
    begin, end = (integer("tokens", token) for token in tuple(tokens))
    if not 0 <= begin <= end:
        raise InvalidField("tokens", (begin, end), "0 <= a <= b")
    return begin, end
