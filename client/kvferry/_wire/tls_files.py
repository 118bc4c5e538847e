"""TLS files that are replaced while a process runs: what they held when they could last be used.

One `TlsFiles` serves all connections with the same files, so that a connection to a new home does not fail because the
files are being written just then. It has no lock: two threads that read at once read the same.
"""

from __future__ import annotations

import functools
import logging
import math

from kvferry._clock import now
from kvferry._wire.channel import TlsConfig, TlsContent, read_tls, tls_stamp
from kvferry.errors import InvalidField

logger = logging.getLogger(__name__)

TLS_POLL = 1.0
"""At least between two looks at whether the files have changed, in seconds."""


class TlsFiles:
    """The files of one `TlsConfig`. Thread-safe. See the module."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._read: tuple[tuple[object, ...] | None, TlsContent | None] = (None, None)
        self._problem = ""
        self._next_look = -math.inf

    def content(self) -> TlsContent:
        """Return what the files held when they could last be used: the same object as long as that is the same.

        Raises:
            InvalidField: they could never be used.
        """
        stamp, content = self._read
        if content is None or now() >= self._next_look:
            self._next_look = now() + TLS_POLL
            found = tls_stamp(self._tls)
            if content is None or found != stamp:
                content, usable = self._newer(content)
                # What cannot be used is tried again: a file that becomes readable has not changed.
                self._read = found if usable else None, content
        return content

    def look_soon(self) -> None:
        """Look at the files with the next call of `content`: a connection has failed."""
        self._next_look = -math.inf

    def _newer(self, content: TlsContent | None) -> tuple[TlsContent, bool]:
        """Return what the files hold, or else `content`, and whether they can be used."""
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
        return (content if newer == content and content is not None else newer), True


@functools.cache
def tls_files(tls: TlsConfig) -> TlsFiles:
    """Return what all connections of this process with these files share."""
    return TlsFiles(tls)
