"""The certificates of a node server, which are replaced while the server runs.

The files are read again when they change, and on demand. New connections get the new certificate and are checked
against the new authorities; open connections stay as they are. Files that do not fit each other, as while an operator
writes them, change nothing.
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
    """The TLS files of a node server; `handshakes` counts the TLS handshakes that have begun, over all listeners.
    `wall_clock` returns seconds since 1970. Raises `InvalidField` if the files cannot be used. Thread-safe."""

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
        """The last usable content of the files."""
        return self._current[0]

    @property
    def expiry(self) -> float:
        """When the first certificate of the chain expires, in seconds since 1970."""
        return self._own.validity.end

    @property
    def authorities_expiry(self) -> float | None:
        """When the first authority of client certificates expires, in seconds since 1970; None: clients are not asked
        for a certificate."""
        return None if self._authorities is None else self._authorities.validity.end

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that follow the files. Each gRPC server needs its own."""
        shown = self._current

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # gRPC calls this on one of its threads, for each connection.
            nonlocal shown
            self.handshakes = next(self._begun) + 1
            current = self._current
            if current is shown:
                return None
            shown = current
            return current[1]

        # None means no change, but the type stubs do not allow it.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
        mutual = self._tls.ca is not None
        return grpc.dynamic_ssl_server_credentials(shown[1], fetch, require_client_authentication=mutual)

    def refresh(self) -> bool:
        """Read the files again. If they cannot be used, keep the current certificate, log why, and return False. Blocks
        while reading."""
        with self._reading:
            stamp, self._stamp = tls_stamp(self._tls), None
            try:
                content = read_tls(self._tls)
                valid = validity(content, self._tls)
                # Clients would refuse a new certificate that is not valid now, but still accept the current one. The
                # files are tried again.
                if self._own.validity.start <= self._wall_clock() < self.expiry:
                    check_in_time(self._tls, valid, self._wall_clock())
            except InvalidField as error:
                if error.message != self._problem:
                    logger.error("the certificate stays as it was: %s", error.message)
                self._problem = error.message
                return False
            # Only now: unusable files are tried again without a change, since becoming readable does not change a file.
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
                # Go on whatever the files hold: later files are still to be read.
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
    """Return when all certificates of the chain are valid; raises `InvalidField` if one cannot be read."""
    try:
        chain = x509.load_pem_x509_certificates(content.cert or b"")
    except ValueError:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate chain in PEM") from None
    return Validity(
        max(certificate.not_valid_before_utc.timestamp() for certificate in chain),
        min(certificate.not_valid_after_utc.timestamp() for certificate in chain),
    )


def check_in_time(tls: TlsConfig, valid: Validity, wall: float) -> None:
    """Raise `InvalidField` if the certificate is not valid at `wall` seconds since 1970."""
    if not valid.start <= wall < valid.end:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate that is valid now; look with openssl x509 -dates")
