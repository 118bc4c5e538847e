"""The certificates of a node server, which are replaced while it serves.

Its files are read again when they change, and on demand. Later connections get the new certificate and are checked
against the new authorities; connections that are open stay as they are. Files that do not fit each other, as when
somebody is writing them, change nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import cast

import grpc
from cryptography import x509

from kvferry._wire.channel import TlsConfig, TlsContent, read_tls, server_certificates, tls_stamp
from kvferry._wire.expiry import ExpiryNotice, Validity, authorities_validity, date
from kvferry.errors import InvalidField
from kvferry_server.node.times import CERTIFICATE_POLL

logger = logging.getLogger(__name__)


class Certificates:
    """The TLS files of a node server. Thread-safe.

    Args:
        tls: the files, with a certificate and its key.
        wall_clock: returns the seconds since 1970.

    Attributes:
        handshakes: connections whose handshake has begun, over all listeners.

    Raises:
        InvalidField: the files cannot be used.
    """

    def __init__(self, tls: TlsConfig, wall_clock: Callable[[], float] = time.time) -> None:
        self._tls = tls
        self._wall_clock = wall_clock
        self._reading = threading.Lock()
        self._stamp: tuple[object, ...] | None = tls_stamp(tls)
        self._problem = ""
        self._begun = itertools.count()
        self.handshakes = 0
        content = read_tls(tls)
        self._current = content, server_certificates(content)
        self._watch_expiry(validity(content, tls))

    @property
    def content(self) -> TlsContent:
        """What the files held when they could last be used."""
        return self._current[0]

    @property
    def expiry(self) -> float:
        """When the certificate, or one that it needs, expires: seconds since 1970."""
        return self._own.validity.end

    @property
    def authorities_expiry(self) -> float | None:
        """When the first of the authorities expires that clients are checked against: seconds since 1970; None: clients
        are not asked for a certificate."""
        return None if self._authorities is None else self._authorities.validity.end

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a listener, which follow the files. Each gRPC server needs its own."""
        shown = self._current

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # gRPC asks on a thread of its own, for each connection.
            nonlocal shown
            self.handshakes = next(self._begun) + 1
            current = self._current
            if current is shown:
                return None
            shown = current
            return current[1]

        # The stubs do not know that None stands for no change.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
        mutual = self._tls.ca is not None
        return grpc.dynamic_ssl_server_credentials(shown[1], fetch, require_client_authentication=mutual)

    def refresh(self) -> bool:
        """Read the files again. If they cannot be used, keep what there is and log why. Returns whether they can be.
        Blocks while it reads."""
        with self._reading:
            stamp, self._stamp = tls_stamp(self._tls), None
            try:
                content = read_tls(self._tls)
                valid = validity(content, self._tls)
                # Clients would refuse it, and do not yet refuse the current one. It is tried again.
                if self._own.validity.start <= self._wall_clock() < self.expiry:
                    check_in_time(self._tls, valid, self._wall_clock())
            except InvalidField as error:
                if error.message != self._problem:
                    logger.error("the certificate stays as it was: %s", error.message)
                self._problem = error.message
                return False
            # Only now: what cannot be used is tried again, since a file that becomes readable has not changed.
            self._stamp, self._problem = stamp, ""
            if content != self.content:
                self._current = content, server_certificates(content)
                self._watch_expiry(valid)
                logger.info("new certificate from %s, valid until %s", self._tls.cert, date(valid.end))
            return True

    async def run(self) -> None:
        """Follow the files, and warn before the certificate expires, until cancelled."""
        while True:
            self.warn()
            await asyncio.sleep(CERTIFICATE_POLL)
            try:
                await asyncio.to_thread(self._follow)
            except Exception:
                # Whatever the files hold, later ones are still to be read.
                logger.exception("the TLS files could not be read; the certificate stays as it was")

    def warn(self) -> None:
        """Warn when the certificate or an authority is about to expire, again whenever half of the remaining time has
        passed, and once when it has expired."""
        then = "put a new certificate and key in place: they are read without a restart"
        self._warn_of(self._own, f"the certificate in {self._tls.cert}", then)
        if self._authorities is not None:
            what = f"the authority {self._authorities.validity.subject!r} in {self._tls.ca}"
            then = "clients whose certificates it has signed are refused from then on; put its successor beside it"
            self._warn_of(self._authorities, what, then)

    def _warn_of(self, notice: ExpiryNotice, what: str, then: str) -> None:
        wall = self._wall_clock()
        if not notice.due(wall):
            return
        if notice.expired(wall):
            logger.error("%s expired on %s: %s", what, notice.date(), then)
        else:
            logger.warning("%s expires on %s: %s", what, notice.date(), then)

    def _follow(self) -> None:
        if tls_stamp(self._tls) != self._stamp:
            self.refresh()

    def _watch_expiry(self, valid: Validity) -> None:
        self._own = ExpiryNotice(valid, CERTIFICATE_POLL)
        above = None if self.content.ca is None else authorities_validity(self.content.ca)
        self._authorities = ExpiryNotice(above, CERTIFICATE_POLL) if above is not None else None


def validity(content: TlsContent, tls: TlsConfig) -> Validity:
    """Return from when until when a certificate is valid, with those that it was sent with; raises `InvalidField` if
    one cannot be read."""
    try:
        chain = x509.load_pem_x509_certificates(content.cert or b"")
    except ValueError:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate chain in PEM") from None
    return Validity(
        max(certificate.not_valid_before_utc.timestamp() for certificate in chain),
        min(certificate.not_valid_after_utc.timestamp() for certificate in chain),
    )


def check_in_time(tls: TlsConfig, valid: Validity, wall: float) -> None:
    """Raise `InvalidField` for a certificate that is expired, or not valid yet, at `wall` seconds since 1970."""
    if not valid.start <= wall < valid.end:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate that is valid now; look with openssl x509 -dates")
