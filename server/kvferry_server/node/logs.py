"""kvferryd's log: its format, lines of text or of JSON objects, and the lines that native code writes to stderr.

gRPC's library knows neither the format of the log nor a limit, and reports failed TLS handshakes nowhere else. So file
descriptor 2 of kvferryd is a pipe, and a second process logs what comes out of it (`NativeLog`), also the last words of
a crash. The stderr of a process that embeds a node server (`kvferry.serve`) belongs to that process.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import re
import select
import signal
import sys
from pathlib import Path
from typing import NoReturn

from kvferry_server.domain.journal import EventLog
from kvferry_server.domain.times import BOOT

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}
CONTROL |= {0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Escapes of characters that begin a new line or control a terminal. Names in messages come from strangers."""

MOST_LINE = 2048  # Bytes of a line that are logged; longer lines are cut
CLOSE_TIMEOUT = 2.0  # Seconds that `close` waits until the last lines are in the log

GRPC_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ ([\w.]+):\d+\] (.*)", re.DOTALL)
LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}

HANDSHAKE = re.compile(r"Handshake failed with error \S+(?: error:\w+:SSL routines:OPENSSL_internal:(\w+): ?(.*))?")

# Part of gRPC's warning about the verbosity at which it logs handshakes.
OF_VERBOSITY = "Log level INFO is not suitable for production"
UNVERIFIED = "CERTIFICATE_VERIFY_FAILED"

REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "WRONG_VERSION_NUMBER": "not_tls",
    "HTTP_REQUEST": "not_tls",
    "UNSUPPORTED_PROTOCOL": "version",
    "NO_SHARED_CIPHER": "version",
}
ALL_REASONS = ("no_certificate", "untrusted", "expired", "not_tls", "version", "rejected_by_peer", "other")
"""Why handshakes fail, in logs and metrics."""


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr, from a level on; `form` is ``text`` or ``json``."""
    formatter: logging.Formatter = TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")
    if form == "json":
        # Imported here, because only this format needs the package.
        from pythonjsonlogger.json import JsonFormatter

        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        text = "%(asctime)s %(levelname)s %(name)s %(message)s"
        formatter = JsonFormatter(text, rename_fields=names, datefmt="%Y-%m-%dT%H:%M:%S%z")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    # gRPC logs its polling at lower levels, once per call.
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.INFO)


class TextLines(logging.Formatter):
    """One line for each message; the stack of an error follows it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        # No name in the line may end it early.
        return super().formatMessage(record).translate(CONTROL)


class NativeLog:
    """The log of native code, until `close`; with `verbose` also of gRPC's INFO lines. Meanwhile `sys.stderr` is a new
    file for the real stderr. To be made before there are threads, and before gRPC's first use."""

    def __init__(self, level: str, form: str, *, verbose: bool) -> None:
        # The other process counts, in memory that both have.
        self._counts = memoryview(mmap.mmap(-1, 8 * len(ALL_REASONS))).cast("Q")
        if sys.stderr is None:
            # Descriptor 2 was closed when the process began. A connection could get the number.
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
            os.dup2(sys.stderr.fileno(), 2)
        self._before = sys.stderr
        sys.stderr.flush()
        self._real = os.dup(2)
        # Line-buffered and never closed, like Python's own stderr.
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace", closefd=False)
        # To the real stderr: a container ends with its first process, so no second process could write the rest.
        faulthandler.enable(sys.stderr)
        set_up_logging(level, form)
        # gRPC may also read it at its first use. Set any earlier, gRPC would warn about it outside the log.
        os.environ.setdefault("GRPC_VERBOSITY", "INFO")
        lines, writing = os.pipe()
        self._ended, ending = os.pipe()
        try:
            process = os.fork()
        except OSError as error:
            logging.warning("lines of native code are not in the log's format: %s", error.strerror)
        else:
            if not process:
                os.close(writing)
                self._log_until_end(lines, verbose=verbose)
            # A line may be lost, but no thread of gRPC may wait.
            os.set_blocking(writing, False)
            os.dup2(writing, 2)
        for fd in (lines, writing, ending):
            os.close(fd)

    def failed_handshakes(self) -> dict[str, int]:
        """Return the numbers of failed TLS handshakes by reason."""
        return dict(zip(ALL_REASONS, self._counts, strict=True))

    def close(self) -> None:
        """Restore file descriptor 2, and wait until all lines are in the log. Idempotent."""
        real, self._real = self._real, -1
        if real < 0:
            return
        os.dup2(real, 2)
        os.close(real)
        # Not for longer: a reader of stderr that does not read may block the other process.
        select.select([self._ended], [], [], CLOSE_TIMEOUT)
        os.close(self._ended)
        sys.stderr = self._before
        faulthandler.disable()

    def _log_until_end(self, lines: int, *, verbose: bool) -> NoReturn:
        """Log lines until no process has the other end of the pipe, and end the process."""
        try:
            # Signals for kvferryd's process group are for the other process.
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            events, rest_of_line = EventLog(BOOT), False
            with os.fdopen(lines, "rb") as reading:
                while line := reading.readline(MOST_LINE):
                    if not rest_of_line:
                        self._log(line.decode(errors="backslashreplace").rstrip(), events, verbose=verbose)
                    rest_of_line = not line.endswith(b"\n")
        finally:
            os._exit(0)

    def _log(self, text: str, events: EventLog, *, verbose: bool) -> None:
        found = GRPC_LINE.fullmatch(text)
        if found is None:
            if text:
                events.write(logging.WARNING, "stderr", {"text": text})
            return
        level, source, said = found.groups()
        handshake = HANDSHAKE.match(said)
        if handshake is not None:
            # An error of BoringSSL, and its detail, which does not explain most errors.
            error, detail = handshake[1] or "", handshake[2] or ""
            if error == UNVERIFIED:
                reason = "expired" if "expired" in detail or "not yet valid" in detail else "untrusted"
            else:
                reason = REASONS.get(error) or ("rejected_by_peer" if "_ALERT_" in error else "other")
            self._counts[ALL_REASONS.index(reason)] += 1
            fields = {"reason": reason, "problem": detail if error == UNVERIFIED else error or said}
            events.write(logging.WARNING, "handshake_failed", fields, kind=f"handshake_failed {reason}")
        elif OF_VERBOSITY not in said and (verbose or level != "I"):
            events.write(LEVELS[level], "grpc", {"source": source, "text": said}, kind=f"grpc {source}")
