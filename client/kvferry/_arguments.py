"""Arguments where they cross the edge of the SDK: of the type that is expected, and the caller's own no longer.

A caller may change a list, a dict or a buffer as soon as the call that it was given to has returned, and much of what
is given is used later, on other threads. So everything is checked and copied before a call returns. A number becomes
Python's own, because sums of numpy's wrap.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import TypeVar

from kvferry.errors import InvalidField

Value = TypeVar("Value")

MOST_SECONDS = 1e8
"""The longest timeout, three years: what the clocks of threads and of gRPC can count to."""


def described(value: object) -> object:
    """What an error shows of a value of the wrong type: a number or short string itself, of everything else its type.
    Never bytes, which may be a secret."""
    if value is None or isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 80):
        return value
    return type(value)


def instance(name: str, value: object, kind: type[Value], expected: str) -> Value:
    """A value of this type; raises `InvalidField`."""
    if not isinstance(value, kind):
        raise InvalidField(name, described(value), expected)
    return value


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """An integer, Python's or numpy's; True and 1.0 are none. Raises `InvalidField`."""
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


def coerce_integers(frozen: object, names: Iterable[str]) -> None:
    """Make these fields of a frozen dataclass Python's own integers; raises `InvalidField`."""
    for name in names:
        value = getattr(frozen, name)
        if type(value) is not int:
            object.__setattr__(frozen, name, integer(name, value))


def flag(name: str, value: object) -> bool:
    """True or False, numpy's too; raises `InvalidField` for what is merely true, such as "no"."""
    if value is not True and value is not False and type(value).__name__ not in ("bool_", "bool"):
        raise InvalidField(name, described(value), "True or False")
    return bool(value)


def seconds(name: str, value: object, *, zero: bool = False) -> float:
    """A time; raises `InvalidField`.

    Args:
        zero: whether it may be 0.
    """
    expected = f"{'0' if zero else 'more than 0'} to {MOST_SECONDS:.0e} seconds"
    try:
        found = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (0 <= found <= MOST_SECONDS) or (found == 0 and not zero):
        raise InvalidField(name, described(value), expected)
    return found


def text(name: str, value: object, expected: str = "a string") -> str:
    """A string that can be sent; raises `InvalidField`."""
    found = str(instance(name, value, str, expected))
    try:
        found.encode()
    except UnicodeEncodeError:
        raise InvalidField(name, ascii(found)[:80], f"{expected} that is Unicode") from None
    return found


def texts(name: str, values: object) -> tuple[str, ...]:
    """Several strings; raises `InvalidField`, also for a single one."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidField(name, described(values), "several strings")
    return tuple(text(name, value) for value in values)


def payload(name: str, value: object) -> bytes:
    """A copy of bytes, a bytearray or a memoryview; raises `InvalidField`."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidField(name, described(value), "bytes")
    return bytes(value)


def mapping(name: str, value: object, expected: str) -> dict[object, object]:
    """A copy of a mapping; raises `InvalidField`."""
    return dict(instance(name, value, Mapping, expected))  # type: ignore[type-abstract]


def string_map(name: str, value: object) -> dict[str, str]:
    """A copy of a mapping of strings to strings; raises `InvalidField`, with the entry that is none."""
    expected = "a mapping of strings to strings"
    found = mapping(name, value, expected)
    return {text(f"{name} key", key): text(f"{name}[{key!r}]", item) for key, item in found.items()}


def integer_map(name: str, value: object) -> dict[str, int]:
    """A copy of a mapping of strings to integers; raises `InvalidField`, with the entry that is none."""
    found = mapping(name, value, "a mapping of strings to integers")
    return {text(f"{name} key", key): integer(f"{name}[{key!r}]", item) for key, item in found.items()}


def several(name: str, values: object, kind: type[Value], expected: str) -> tuple[Value, ...]:
    """A copy of a sequence of values of one type; raises `InvalidField`."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidField(name, described(values), expected)
    return tuple(instance(name, value, kind, expected) for value in values)


def token_range(tokens: object) -> tuple[int, int] | None:
    """Tokens ``[a, b)``, or None; raises `InvalidField`."""
    if tokens is None:
        return None
    if not isinstance(tokens, (tuple, list)) or len(tokens) != 2:
        raise InvalidField("tokens", described(tokens), "two integers, (a, b)")
    begin, end = (integer("tokens", token) for token in tuple(tokens))
    if not 0 <= begin <= end:
        raise InvalidField("tokens", (begin, end), "0 <= a <= b")
    return begin, end
