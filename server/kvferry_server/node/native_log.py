"""What native code of this process writes to stderr: gRPC's own library, which knows neither the format of the log nor
a limit, and tells nobody else of a TLS handshake that failed.

kvferryd puts a socket in the place of file descriptor 2, reads it on a thread, and writes what it reads to its log. A
second process writes what the thread has not got to when kvferryd ends: its last words, if it crashes. Only kvferryd:
the stderr of a process that embeds a node server (`kvferry.serve`) is that process's own.
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

from kvferry_server.domain.clock import BootClock
from kvferry_server.domain.event_log import EventLog

MOST_LINE = 2048
"""Bytes of a line that are read; longer ones are cut."""

CLOSE_TIMEOUT = 2.0
"""Seconds that the thread has to read the rest."""

GRPC_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ ([\w.]+):\d+\] (.*)", re.DOTALL)
LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}

HANDSHAKE = re.compile(r"Handshake failed with error \S+(?: error:\w+:SSL routines:OPENSSL_internal:(\w+): ?(.*))?")

OF_VERBOSITY = "Log level INFO is not suitable for production"
"""Part of what gRPC says of the verbosity at which it tells of handshakes."""

UNVERIFIED = "CERTIFICATE_VERIFY_FAILED"

REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "WRONG_VERSION_NUMBER": "not_tls",
    "HTTP_REQUEST": "not_tls",
    "UNSUPPORTED_PROTOCOL": "version",
    "NO_SHARED_CIPHER": "version",
}
ALL_REASONS = ("no_certificate", "untrusted", "expired", "not_tls", "version", "rejected_by_peer", "other")
"""Why handshakes fail, for people and metrics."""


class NativeLog:
    """Reads what is written to file descriptor 2, from its construction until `close`. Meanwhile `sys.stderr` is a new
    file for the real stderr.

    Attributes:
        failed_handshakes: TLS handshakes that failed, by reason.
    """

    def __init__(self) -> None:
        self.failed_handshakes: Counter[str] = Counter(dict.fromkeys(ALL_REASONS, 0))
        if sys.stderr is None:
            # It was closed when the process began. A connection could get its number.
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
            os.dup2(sys.stderr.fileno(), 2)
        self._before = sys.stderr
        sys.stderr.flush()
        self._real = os.dup(2)
        # Line by line, and never closed, as Python's own stderr.
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace", closefd=False)
        # Directly, because a container ends with its first process: no second one could write what is left.
        faulthandler.enable(sys.stderr)
        self._reading, writing = socket.socketpair()
        with writing:
            # Better a line is lost than that one of gRPC's threads waits.
            writing.setblocking(False)
            self._keeper = _keep_last_words(self._reading, writing, self._real)
            os.dup2(writing.fileno(), 2)
        self._thread: threading.Thread | None = None

    def start(self, *, verbose: bool) -> None:
        """Begin to write lines to the log, which is set up; `verbose`: also those that gRPC counts as no problem.
        Strangers cause lines, so the rate is bounded."""
        self._thread = threading.Thread(target=self._read, args=(verbose,), name="kvferry-native-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give file descriptor 2 back, when all that was written has been read. Idempotent."""
        real, self._real = self._real, -1
        if real < 0:
            return
        os.dup2(real, 2)
        os.close(real)
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT)
        if self._keeper is not None:
            # Not waited for: somebody who does not read stderr may keep it from writing.
            os.close(self._keeper)
        sys.stderr = self._before
        faulthandler.disable()

    def _read(self, verbose: bool) -> None:
        events = EventLog(BootClock())
        rest, cut = b"", False
        while got := self._reading.recv(1 << 16, socket.MSG_PEEK):
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                if not cut:
                    self._write(line, events, verbose=verbose)
                cut = False
            if len(rest) > MOST_LINE:
                # Its end is still to come.
                if not cut:
                    self._write(rest, events, verbose=verbose)
                rest, cut = b"", True
            # Only now: it is in the log. If this process ends before, the other one writes it.
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
            # Of most errors, the detail is about something else.
            fields = {"reason": reason, "problem": detail if error == UNVERIFIED else error or said}
            events.write(logging.WARNING, "handshake_failed", fields, kind=f"handshake_failed {reason}")
        elif OF_VERBOSITY not in said and (verbose or level != "I"):
            events.write(LEVELS[level], "grpc", {"source": source, "text": said}, kind=f"grpc {source}")


def _keep_last_words(unread: socket.socket, writing: socket.socket, stderr: int) -> int | None:
    """Start a process that writes what is unread to stderr when this one has ended: what native code says when it
    aborts. No thread of this process could. To be called before there are threads. Returns a descriptor whose end the
    process waits for; None: there may be no further process."""
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
    """Return which of `ALL_REASONS` BoringSSL's error means; empty ones are unknown."""
    if error == UNVERIFIED:
        return "expired" if "expired" in detail or "not yet valid" in detail else "untrusted"
    return REASONS.get(error) or ("rejected_by_peer" if "_ALERT_" in error else "other")
