"""HTML without mistakes: whatever is not `Html` is escaped."""

from __future__ import annotations

from html import escape
from typing import TypeAlias


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | None"

VOID = frozenset({"img", "input", "link", "meta", "rect"})
"""Elements without an end."""


def element(tag: str, *children: Child, **attributes: Child) -> Html:
    """Return an element.

    Args:
        tag: its name.
        children: what it contains: `Html` as it is, other text escaped; None is left out.
        attributes: by name; a final underscore is dropped, and others become hyphens. None is left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in VOID and not children:
        return Html(f"<{tag}{given}>" if tag != "rect" else f"<{tag}{given}/>")
    return Html(f"<{tag}{given}>{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """Return several children after one another."""
    parts = (child if isinstance(child, Html) else escape(str(child)) for child in children if child is not None)
    return Html("".join(parts))


def table(headings: tuple[str, ...], rows: list[tuple[Child, ...]], **attributes: Child) -> Html:
    """Return a table."""
    head = element("thead", element("tr", *(element("th", heading) for heading in headings)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element("table", head, body, **attributes)
