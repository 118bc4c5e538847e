"""The output of commands: JSON for programs (see `kvferry._summaries`), tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvferry._summaries import RECOVERING, Row, as_dict
from kvferry.errors import Incompatible, KvferryError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table


def complete(message: Message) -> dict[str, Any]:
    """Return a complete list as JSON's values: there is no next page."""
    found = as_dict(message)
    found.pop("next_page_token", None)
    return found


def print_json(message: Message) -> None:
    print(json.dumps(complete(message), indent=2))


def console() -> Console:
    """Make the console for tables. When a program reads the output, it is not cut to 80 columns."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def table(*columns: str, rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """Make a table of plain text; a column whose name starts with ``>`` is aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        made.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(safe(str(cell))) for cell in row))
    return made


def listing(rows: Sequence[Row], title: str = "") -> Table:
    """Make a table of rows with equal columns; at least one."""
    return table(*rows[0], rows=(tuple(row.values()) for row in rows), title=title)


def facts(rows: Iterable[tuple[str, object]]) -> Table:
    made = table("", "", rows=rows)
    made.show_header = False
    return made


def safe(text: str) -> str:
    """Escape characters that would control the terminal, in text from a peer."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def recovering(server: str) -> str:
    """Return the line about a node server that says `recovering` in its lists."""
    return f"{safe(server)} {RECOVERING}."


def sentences(error: KvferryError) -> str:
    """Return an error as text for a terminal, with a line for each mismatch of two engines."""
    if not isinstance(error, Incompatible):
        return safe(error.message)
    return "\n  ".join(["the destination cannot read the source's cache:", *map(safe, error.lines)])
