"""kvferryd's log: its format, lines of text or of JSON objects, and the lines that native code writes to stderr.

gRPC's library knows neither the format of the log nor a limit, and reports failed TLS handshakes nowhere else. So
kvferryd replaces file descriptor 2 by a socket, which a thread reads and logs (`NativeLog`). A second process writes to
the real stderr what the thread has not read when kvferryd ends: the last words of a crash. This is for kvferryd only:
the stderr of a process that embeds a node server (`kvferry.serve`) belongs to that process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from pathlib import Path

from kvferry_server.domain.journal import EventLog
from kvferry_server.domain.times import BOOT

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
"""Escapes of characters that begin a new line or control a terminal. Names in messages come from strangers."""

MOST_LINE = 2048  # Bytes of a line that are logged; longer lines are cut
CLOSE_TIMEOUT = 2.0  # Seconds that `close` waits for the thread to read the rest

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

    return JsonFormatter(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )


class NativeLog:
    """Reads from file descriptor 2, from construction until `close`. Meanwhile `sys.stderr` is a new file for the real
    stderr. `failed_handshakes` counts failed TLS handshakes by reason."""

    def __init__(self) -> None:
        self.failed_handshakes: Counter[str] = Counter(dict.fromkeys(ALL_REASONS, 0))
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
        self._reading, writing = socket.socketpair()
        with writing:
            # A line may be lost, but no thread of gRPC may wait.
            writing.setblocking(False)
            self._keeper = _keep_last_words(self._reading, writing, self._real)
            os.dup2(writing.fileno(), 2)
        self._thread: threading.Thread | None = None

    def start(self, *, verbose: bool) -> None:
        """Begin to write lines to the log, which must be set up; with `verbose` also gRPC's INFO lines. Strangers cause
        lines, so the rate is bounded."""
        self._thread = threading.Thread(target=self._read, args=(verbose,), name="kvferry-native-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore file descriptor 2, and wait until all lines have been read. Idempotent."""
        real, self._real = self._real, -1
        if real < 0:
            return
        os.dup2(real, 2)
        os.close(real)
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT)
        if self._keeper is not None:
            # Not waited for: a reader of stderr that does not read may block the process.
            os.close(self._keeper)
        sys.stderr = self._before
        faulthandler.disable()

    def _read(self, verbose: bool) -> None:
        events = EventLog(BOOT)
        rest, cut = b"", False
        while got := self._reading.recv(1 << 16, socket.MSG_PEEK):
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                if not cut:
                    self._write(line, events, verbose=verbose)
                cut = False
            if len(rest) > MOST_LINE:
                # The end of the line is still to come.
                if not cut:
                    self._write(rest, events, verbose=verbose)
                rest, cut = b"", True
            # Taken only now that the text is in the log: if this process ends earlier, the second process writes it.
            self._reading.recv(len(got), socket.MSG_WAITALL)
        self._write(rest, events, verbose=verbose)
        self._reading.close()

    def _write(self, line: bytes, events: EventLog, *, verbose: bool) -> None:
        text = line[:MOST_LINE].decode(errors="backslashreplace").rstrip()
        found = GRPC_LINE.fullmatch(text)
        if found is None:
            if text:
                events.write(logging.WARNING, "stderr", {"text": text})
            return
        level, source, said = found.groups()
        handshake = HANDSHAKE.match(said)
        if handshake is not None:
            error, detail = handshake[1] or "", handshake[2] or ""
            reason = handshake_reason(error, detail)
            self.failed_handshakes[reason] += 1
            # The detail of most other errors does not explain them.
            fields = {"reason": reason, "problem": detail if error == UNVERIFIED else error or said}
            events.write(logging.WARNING, "handshake_failed", fields, kind=f"handshake_failed {reason}")
        elif OF_VERBOSITY not in said and (verbose or level != "I"):
            events.write(LEVELS[level], "grpc", {"source": source, "text": said}, kind=f"grpc {source}")


def _keep_last_words(unread: socket.socket, writing: socket.socket, stderr: int) -> int | None:
    """Start a process that writes unread bytes to `stderr` when this process has ended: native code writes them while
    it aborts, when no thread of this process can read them. Call before there are threads. Returns the descriptor whose
    close the new process waits for; None: the system refused a process."""
    ended, held = os.pipe()
    try:
        process = os.fork()
    except OSError:
        os.close(ended)
        os.close(held)
        return None
    if process:
        os.close(ended)
        return held
    try:
        os.close(held)
        writing.close()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.read(ended, 1)
        while left := unread.recv(1 << 16, socket.MSG_DONTWAIT):
            os.write(stderr, left)
    finally:
        os._exit(0)


def handshake_reason(error: str, detail: str) -> str:
    """Return one of `ALL_REASONS` for an error of BoringSSL; both arguments may be empty."""
    if error == UNVERIFIED:
        return "expired" if "expired" in detail or "not yet valid" in detail else "untrusted"
    return REASONS.get(error) or ("rejected_by_peer" if "_ALERT_" in error else "other")
