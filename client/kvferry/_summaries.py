"""What a node server lists of engines, requests and reads: as rows of tables for people, and as JSON for programs. The
command line and the node server's page show the same.

A row has the cells by the titles of their columns; a title that starts with ``>`` is of a column aligned to the right.
JSON is the protobuf JSON mapping of the response, with the names of the .proto files (snake_case), fields of value zero
included: enums are their names, 64-bit integers are strings, durations are like ``"1.5s"``. Bytes are hexadecimal
digits, not base64: all are ids, which tables, errors, logs and agents' names write so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from kvferry.errors import InvalidField

# Nothing here imports gRPC or protobuf before it is called: `kvferry --help` has to be quick.
if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.message import Message

    from kvferry.v1 import introspection_pb2 as ipb

Row: TypeAlias = "dict[str, object]"

RECOVERING = "waits for engines that it had, or for their snapshots: lists may lack some"
"""What a node server does that says `recovering` in its lists."""


def engine_row(summary: ipb.EngineSummary) -> Row:
    return {
        "Engine": summary.engine.engine_id,
        "Incarnation": summary.engine.incarnation.hex()[:8],
        "State": engine_state(summary),
        ">Ranks": f"{summary.num_ranks - summary.num_missing}/{summary.num_ranks}",
        ">Requests": summary.publications,
        ">Leases": summary.leases,
        ">Cache": size(summary.cache_bytes),
    }


def request_row(request: ipb.RequestSummary) -> Row:
    from kvferry._wire.status import reason_name

    state = enum_name(request)
    failure = reason_name(request.last_failure)
    return {
        "Engine": request.engine.engine_id,
        ">Publication": request.publication,
        "Request": request.request_id,
        "State": f"{state}, a read failed: {failure}" if failure else state,
        ">Blocks": request.blocks,
        ">Reads": f"{request.reads_valid}/{request.expected_reads}",
        ">Leases": request.leases,
        ">Age": lasting(request.age),
    }


def transfer_row(transfer: ipb.TransferSummary) -> Row:
    read = transfer.read
    # For a publication under a router's key, without a lease.
    waits = transfer.HasField("waited")
    return {
        "Source": transfer.source.engine_id,
        ">Publication": "none yet" if waits else transfer.publication,
        "Request": f"router key {transfer.router_key}" if waits else transfer.request_id,
        "Reader": read.reader.engine_id,
        ">Lease": "" if waits else read.lease_number,
        "State": read_state(transfer),
        ">Ranks done": f"{read.reported}/{read.parties}",
        ">Bytes": size(read.bytes),
        ">Remaining": f"waits for {lasting(transfer.waited)}" if waits else lasting(transfer.lease_remaining, "ended"),
    }


def engine_state(summary: ipb.EngineSummary) -> str:
    """Return the state of an engine, with its missing ranks."""
    name = enum_name(summary)
    missing, left = summary.missing_ranks, summary.num_missing - len(summary.missing_ranks)
    more = f" and {left} more" if left else ""
    return f"{name} (missing {'rank' if len(missing) == 1 else 'ranks'} {ranges(missing)}{more})" if missing else name


def read_state(transfer: ipb.TransferSummary) -> str:
    """Return the state of a read, with the parts that its reader may have moved so far, and its ranks' failures."""
    from kvferry._wire.status import failures_of

    state = enum_name(transfer.read)
    if transfer.parts:
        state += f", {transfer.parts} part{'s' * (transfer.parts > 1)} so far"
    failures = failures_of(transfer.reports)
    return f"{state}: {failures}" if failures else state


def enum_name(message: Message, field: str = "state") -> str:
    """Return ``ready`` for a field with the value ``ENGINE_STATE_READY``; the number of an unknown value."""
    number = getattr(message, field)
    kind: Any = message.DESCRIPTOR.fields_by_name[field].enum_type
    if number not in kind.values_by_number:
        return str(number)
    prefix = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.name).upper() + "_"
    return str(kind.values_by_number[number].name).removeprefix(prefix).lower().replace("_", " ")


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


def as_dict(message: Message) -> dict[str, Any]:
    """Return a message as JSON's values; raises `InvalidField` if it has none, as for a duration of a million years."""
    from google.protobuf.json_format import Error, MessageToDict

    # protobuf 5.26 renamed the option.
    accepted = inspect.signature(MessageToDict).parameters
    zeros = "always_print_fields_with_no_presence"
    options: dict[str, Any] = {zeros if zeros in accepted else "including_default_value_fields": True}
    try:
        found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, **options)
    except Error as error:
        raise InvalidField(message.DESCRIPTOR.name, str(error), "a message that JSON can hold") from None
    _write_bytes_in_hex(message, found)
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
