"""HTML without mistakes: whatever is put into a template is escaped, unless it is `Html`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from string import Formatter


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


class _Escaping(Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        return value if isinstance(value, Html) else escape(format(value, format_spec))


def html(template: str, *values: object, **named: object) -> Html:
    """Fill a template of `str.format`, which is HTML; what is filled in is escaped, unless it is `Html`."""
    return Html(_Escaping().vformat(template, values, named))


def each(template: str, values: Iterable[object]) -> Html:
    """Fill a template with each value, and join the results."""
    return Html("".join(html(template, value) for value in values))
