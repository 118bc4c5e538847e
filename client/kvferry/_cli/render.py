"""The output of commands: JSON for programs, tables for people.

JSON is the protobuf JSON mapping of the response, with the names of the .proto files (snake_case), fields of
value zero included: enums are their names, 64-bit integers are strings, durations are like ``"1.5s"``. Bytes are
hexadecimal digits, not base64: all are ids, which tables, errors, logs and agents' names write so. Lists are complete,
without pages.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.errors import Incompatible, KvferryError

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table

    from kvferry.v1 import introspection_pb2


def as_dict(message: Message) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    # protobuf 5.26 renamed the option.
    accepted = inspect.signature(MessageToDict).parameters
    zeros = "always_print_fields_with_no_presence"
    options: dict[str, Any] = {zeros if zeros in accepted else "including_default_value_fields": True}
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, **options)
    _write_bytes_in_hex(message, found)
    # Lists are complete: there is no next page.
    found.pop("next_page_token", None)
    return found


def _write_bytes_in_hex(message: Message, found: dict[str, Any]) -> None:
    """Replace base64 by hexadecimal digits in the plain values of a message."""
    for field, value in message.ListFields():
        plain = found[field.name]
        if field.type == field.TYPE_BYTES:
            found[field.name] = [each.hex() for each in value] if isinstance(plain, list) else value.hex()
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            pairs = zip(value, plain, strict=True) if isinstance(plain, list) else [(value, plain)]
            for each, inside in pairs:
                # Durations are strings.
                if isinstance(inside, dict):
                    _write_bytes_in_hex(each, inside)


def print_json(message: Message) -> None:
    print(json.dumps(as_dict(message), indent=2))


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


def facts(rows: Iterable[tuple[str, object]]) -> Table:
    made = table("", "", rows=rows)
    made.show_header = False
    return made


def safe(text: str) -> str:
    """Escape characters that would control the terminal, in text from a peer."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def sentences(error: KvferryError) -> str:
    """Return an error as text for a terminal, with a line for each mismatch of two engines."""
    if not isinstance(error, Incompatible):
        return safe(error.message)
    return "\n  ".join(["the destination cannot read the source's cache:", *map(safe, error.lines)])


def enum_name(message: Message, field: str = "state") -> str:
    """Return ``ready`` for a field with the value ``ENGINE_STATE_READY``; the number of an unknown value."""
    number = getattr(message, field)
    kind: Any = message.DESCRIPTOR.fields_by_name[field].enum_type
    if number not in kind.values_by_number:
        return str(number)
    prefix = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.name).upper() + "_"
    return str(kind.values_by_number[number].name).removeprefix(prefix).lower().replace("_", " ")


def read_state(transfer: introspection_pb2.TransferSummary) -> str:
    """Return the state of a read, with the number of parts that its reader may have moved if it waits for more, and
    with the failures that its ranks report."""
    from kvferry._wire.status import failures_of

    state = enum_name(transfer.read)
    if transfer.parts:
        state += f", {transfer.parts} part{'s' * (transfer.parts > 1)} so far"
    failures = failures_of(transfer.reports)
    return f"{state}: {failures}" if failures else state


def duration(seconds: float, none: str = "") -> str:
    """Return seconds as ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min`` or ``3 d 4 h``; `none` for 0, if given."""
    if none and not seconds:
        return none
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    for size, unit, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rest >= size:
            more = rest % size // smaller
            return f"{rest // size} {unit} {more} {below}" if more else f"{rest // size} {unit}"
    return f"{rest} s"


def lasting(value: Duration, none: str = "") -> str:
    from kvferry._clock import from_duration

    return duration(from_duration(value), none)


def size(count: int) -> str:
    """Return bytes as ``17.2 GB``."""
    from rich.filesize import decimal

    return decimal(count)


def ranges(numbers: Iterable[int]) -> str:
    """Return rising numbers as ``0-3, 6``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
