"""TLS files that are replaced while a process runs: their last usable contents, and a warning before these expire.

One `TlsFiles` serves all connections with the same files, so that a connection to a new home does not fail while the
files are being written. No lock is needed: two threads that read at once read the same.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

from kvferry._clock import now
from kvferry._logs import Log
from kvferry._wire.channel import TlsConfig, TlsContent, read_tls, tls_stamp
from kvferry._wire.expiry import ExpiryNotice, authorities_validity, own_validity
from kvferry.errors import InvalidField

logger = Log(__name__)

TLS_POLL = 1.0
"""Least seconds between two checks whether the files have changed."""


class TlsFiles:
    """The files of one `TlsConfig`. Thread-safe. `wall_clock` returns the seconds since 1970."""

    def __init__(self, tls: TlsConfig, wall_clock: Callable[[], float] = time.time) -> None:
        self._tls = tls
        self._wall_clock = wall_clock
        self._notices: list[tuple[str, object, ExpiryNotice]] = []
        self._read: tuple[tuple[object, ...] | None, TlsContent | None] = (None, None)
        self._problem = ""
        self._next_look = -math.inf

    def content(self) -> TlsContent:
        """Return the last usable contents of the files: the same object until the contents change. Raises
        `InvalidField`: the files were never usable."""
        stamp, content = self._read
        if content is None or now() >= self._next_look:
            self._next_look = now() + TLS_POLL
            found = tls_stamp(self._tls)
            if content is None or found != stamp:
                content, usable = self._newer(content)
                # Unusable files are read again each time: a file that becomes readable has an unchanged stamp.
                self._read = found if usable else None, content
            self._warn()
        return content

    def look_soon(self) -> None:
        """Check the files at the next call of `content`, because a connection has failed."""
        self._next_look = -math.inf

    def _newer(self, content: TlsContent | None) -> tuple[TlsContent, bool]:
        """Return the new contents and True, or `content` and False if the files are unusable."""
        try:
            newer = read_tls(self._tls)
        except InvalidField as error:
            if content is None:
                raise
            if error.message != self._problem:
                logger.warning("the TLS files have changed and cannot be used, so the old ones stay: %s", error.message)
            self._problem = error.message
            return content, False
        self._problem = ""
        if newer == content and content is not None:
            return content, True
        self._notices = self._new_notices(newer)
        return newer, True

    def _new_notices(self, content: TlsContent) -> list[tuple[str, object, ExpiryNotice]]:
        own = own_validity(self._tls)
        above = authorities_validity(content.ca) if content.ca is not None else None
        found = (("the certificate", self._tls.cert, own), ("an authority", self._tls.ca, above))
        return [(what, path, ExpiryNotice(valid, TLS_POLL)) for what, path, valid in found if valid is not None]

    def _warn(self) -> None:
        wall = self._wall_clock()
        for what, path, notice in self._notices:
            if notice.due(wall):
                verb = "expired" if notice.expired(wall) else "expires"
                name = f" ({notice.validity.subject!r})" if notice.validity.subject else ""
                logger.warning("%s in %s%s %s on %s: put a new one in place", what, path, name, verb, notice.date())


@functools.cache
def tls_files(tls: TlsConfig) -> TlsFiles:
    """Return the object that all connections of this process with these files share."""
    return TlsFiles(tls)
