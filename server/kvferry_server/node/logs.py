"""The format of kvferryd's log: lines of text, or of JSON objects."""

from __future__ import annotations

import logging
import sys
from typing import Any

from kvferry_server.domain.event_log import FIELDS

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
"""Escapes of characters that begin a new line or control a terminal. Names in messages come from strangers."""


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr, from a level on; `form` is ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json_lines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    # gRPC logs its polling at lower levels, once per call.
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.INFO)


class TextLines(logging.Formatter):
    """One line for each message; the stack of an error follows it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Escape control characters, so that no name in the line ends it early."""
        return super().formatMessage(record).translate(CONTROL)


def _json_lines() -> logging.Formatter:
    # Imported here, because only this format needs the package.
    from pythonjsonlogger.json import JsonFormatter

    class JsonLines(JsonFormatter):
        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            super().add_fields(log_data, record, message_dict)
            log_data.pop(FIELDS, None)
            for key, value in getattr(record, FIELDS, {}).items():
                # No field replaces one that every line has.
                log_data.setdefault(key, value)

    return JsonLines(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )
