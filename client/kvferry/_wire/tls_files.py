"""TLS files that are replaced while a process runs: their last usable contents, and warnings before these expire.

Files that do not fit each other, as while an operator writes them, change nothing. In a client one `TlsFiles` serves
all connections with the same files, so that a connection to a new home does not fail meanwhile. A client needs no
lock: two threads that read at once read the same.
"""

from __future__ import annotations

import functools
import math
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, ClassVar

from kvferry._clock import now
from kvferry._logs import Log
from kvferry._wire.channel import TlsConfig, TlsContent, read_tls, tls_stamp
from kvferry.errors import InvalidField

logger = Log(__name__)

EXPIRY_NOTICE = 14 * 86_400.0
EXPIRY_SHARE = 0.25
"""The first warning comes at most so many seconds before a certificate expires, and at most this share of its lifetime:
otherwise certificates that live for an hour would always be warned of."""


@dataclass(frozen=True, slots=True)
class Validity:
    """The time in which certificates are valid, in seconds since 1970; and of the one that ends first the subject
    (empty: this side's own) and the seconds for which it is valid in all (0: the others are valid for no less)."""

    start: float
    end: float
    subject: str = ""
    lifetime: float = 0.0


class ExpiryNotice:
    """Warns that certificates (`what`) expire, and what to do `then`: first some time before, again whenever half of
    the remaining time has passed, until `least` seconds are left, and once when they have expired."""

    def __init__(self, validity: Validity, least: float, what: str, then: str) -> None:
        self.validity = validity
        self._least = least
        self._what, self._then = what, then
        self._below = min(EXPIRY_NOTICE, (validity.lifetime or validity.end - validity.start) * EXPIRY_SHARE)

    def warn(self, wall: float) -> None:
        """Warn if it is time to, at `wall` seconds since 1970."""
        left = self.validity.end - wall
        if left > self._below:
            return
        self._below = left / 2 if left > self._least else 0.0 if left > 0 else float("-inf")
        if left > 0:
            logger.warning("%s expires on %s: %s", self._what, date(self.validity.end), self._then)
        else:
            logger.error("%s expired on %s: %s", self._what, date(self.validity.end), self._then)


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
        """Warn that the certificate or an authority expires, if it is time to; see `ExpiryNotice`."""
        for notice in (self._own, self._authorities):
            if notice is not None:
                notice.warn(self._wall_clock())

    def _changed(self) -> bool:
        return tls_stamp(self._tls) != self._stamp

    def _read(self) -> TlsContent:
        """Read the files again. If they cannot be used, log why, and return the last usable contents."""
        stamp, self._stamp = tls_stamp(self._tls), None
        try:
            content = read_tls(self._tls)
            own = self._validity()
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
            what = f"the certificate in {self._tls.cert}"
            then = "put a new certificate and key in place: they are read without a restart"
            self._own = None if own is None else ExpiryNotice(own, self.POLL, what, then)
            above = None if content.ca is None else authorities_validity(content.ca)
            what = "" if above is None else f"the authority {above.subject!r} in {self._tls.ca}"
            then = "peers whose certificates it has signed are refused from then on; put its successor beside it"
            self._authorities = None if above is None else ExpiryNotice(above, self.POLL, what, then)
        return self._content

    def _validity(self) -> Validity | None:
        """Return when this side's certificate is valid; None: unknown. Raises `InvalidField` for unusable files."""
        return own_validity(self._tls)


tls_files = functools.cache(TlsFiles)
"""Returns the object that all connections of this process with the same files share."""


def authorities_validity(pem: bytes) -> Validity | None:
    """Return the first authority in a file that ends; None if the file has none."""
    return min(_authorities(pem), key=lambda one: one.end, default=None)


def _authorities(pem: bytes) -> Collection[Validity]:
    """Return the authorities in a file. Of certificates with the same subject, the one that ends last counts: an
    authority that was renewed keeps its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        return ()
    last: dict[str, Validity] = {}
    for certificate in context.get_ca_certs():
        found = _validity(certificate)
        if found.subject not in last or found.end > last[found.subject].end:
            last[found.subject] = found
    return last.values()


def own_validity(tls: TlsConfig) -> Validity | None:
    """Return when this side's certificate and the authorities that are sent with it are valid; None if there is no
    certificate. Reads the file."""
    if tls.cert is None:
        return None
    try:
        # Python's only way to read a certificate that is not an authority's, without a package: its own tests use it.
        leaf = _validity(ssl._ssl._test_decode_cert(str(tls.cert)))  # type: ignore[attr-defined]
        chain = (leaf, *_authorities(tls.cert.read_bytes()))
    except (ssl.SSLError, OSError, ValueError):
        return None
    first = min(chain, key=lambda one: one.end)
    # An authority above may be renewed just before the end: the warning of that does not come later for it.
    return Validity(max(each.start for each in chain), first.end, lifetime=first.end - first.start)


def date(seconds: float) -> str:
    """Format a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _validity(certificate: Any) -> Validity:
    names = [str(value) for part in certificate["subject"] for _, value in part]
    start, end = (ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter"))
    return Validity(float(start), float(end), ", ".join(names))
