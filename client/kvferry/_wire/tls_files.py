"""TLS files that are replaced while a process runs: their last usable contents, and a warning before these expire.

Files that do not fit each other, as while an operator writes them, change nothing. In a client one `TlsFiles` serves
all connections with the same files, so that a connection to a new home does not fail meanwhile. A client needs no
lock: two threads that read at once read the same.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import ClassVar

from kvferry._clock import now
from kvferry._logs import Log
from kvferry._wire.channel import TlsConfig, TlsContent, read_tls, tls_stamp
from kvferry._wire.expiry import ExpiryNotice, Validity, authorities_validity, own_validity
from kvferry.errors import InvalidField

logger = Log(__name__)


class TlsFiles:
    """The files of one `TlsConfig`. Thread-safe. `wall_clock` returns the seconds since 1970."""

    POLL: ClassVar[float] = 1.0
    """Least seconds between two checks whether the files have changed."""

    def __init__(self, tls: TlsConfig, wall_clock: Callable[[], float] = time.time) -> None:
        self._tls = tls
        self._wall_clock = wall_clock
        self._content: TlsContent | None = None
        self._own: ExpiryNotice | None = None
        self._authorities: ExpiryNotice | None = None
        self._stamp: tuple[object, ...] | None = None
        self._problem = ""
        self._next_look = -math.inf

    def content(self) -> TlsContent:
        """Return the last usable contents of the files: the same object until the contents change. Raises
        `InvalidField`: the files were never usable."""
        content = self._content
        if content is None or now() >= self._next_look:
            self._next_look = now() + self.POLL
            if content is None or self._changed():
                content = self._read()
            self.warn()
        return content

    def look_soon(self) -> None:
        """Check the files at the next call of `content`, because a connection has failed."""
        self._next_look = -math.inf

    @property
    def expiry(self) -> float | None:
        """When the first certificate of this side's chain expires, in seconds since 1970; None: unknown."""
        return None if self._own is None else self._own.validity.end

    @property
    def authorities_expiry(self) -> float | None:
        """When the first authority of the peers' certificates expires, in seconds since 1970; None: there is none."""
        return None if self._authorities is None else self._authorities.validity.end

    def warn(self) -> None:
        """Warn when the certificate or an authority is about to expire, again whenever half of the remaining time has
        passed, and once when it has expired."""
        if self._own is not None:
            then = "put a new certificate and key in place: they are read without a restart"
            self._warn_of(self._own, f"the certificate in {self._tls.cert}", then)
        if self._authorities is not None:
            what = f"the authority {self._authorities.validity.subject!r} in {self._tls.ca}"
            then = "peers whose certificates it has signed are refused from then on; put its successor beside it"
            self._warn_of(self._authorities, what, then)

    def _changed(self) -> bool:
        return tls_stamp(self._tls) != self._stamp

    def _read(self) -> TlsContent:
        """Read the files again. If they cannot be used, log why, and return the last usable contents."""
        stamp, self._stamp = tls_stamp(self._tls), None
        try:
            content = read_tls(self._tls)
            own = self._validity(content)
        except InvalidField as error:
            if self._content is None:
                raise
            if error.message != self._problem:
                logger.error("the TLS files cannot be used; the certificate stays as it was: %s", error.message)
            self._problem = error.message
            return self._content
        # Only now: unusable files are read again each time, since becoming readable changes no stamp.
        self._stamp, self._problem = stamp, ""
        if self._content is None or content != self._content:
            self._content = content
            above = None if content.ca is None else authorities_validity(content.ca)
            self._own, self._authorities = (
                None if valid is None else ExpiryNotice(valid, self.POLL) for valid in (own, above)
            )
        return self._content

    def _validity(self, content: TlsContent) -> Validity | None:
        """Return when this side's certificate is valid; None: unknown. Raises `InvalidField` for contents that are not
        to be used."""
        return own_validity(self._tls)

    def _warn_of(self, notice: ExpiryNotice, what: str, then: str) -> None:
        wall = self._wall_clock()
        if not notice.due(wall):
            return
        if notice.expired(wall):
            logger.error("%s expired on %s: %s", what, notice.date(), then)
        else:
            logger.warning("%s expires on %s: %s", what, notice.date(), then)


@functools.cache
def tls_files(tls: TlsConfig) -> TlsFiles:
    """Return the object that all connections of this process with these files share."""
    return TlsFiles(tls)
