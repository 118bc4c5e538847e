"""The certificates of a node server, which are replaced while it serves.

Its files are read again when they change, and on demand. Later connections get the new certificate and are checked
against the new authorities; connections that are open stay as they are. Files that do not fit each other, as when
somebody is writing them, change nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import cast

import grpc
from cryptography import x509

from kvferry._wire.channel import TlsConfig, TlsContent, read_tls, server_certificates, tls_stamp
from kvferry.errors import InvalidField
from kvferry_server.node.times import CERTIFICATE_POLL, EXPIRY_NOTICE, EXPIRY_SHARE

logger = logging.getLogger(__name__)


class Certificates:
    """The TLS files of a node server. Thread-safe.

    Args:
        tls: the files, with a certificate and its key.
        wall_clock: returns the seconds since 1970.

    Raises:
        InvalidField: the files cannot be used.
    """

    def __init__(self, tls: TlsConfig, wall_clock: Callable[[], float] = time.time) -> None:
        self._tls = tls
        self._wall_clock = wall_clock
        self._reading = threading.Lock()
        self._stamp: tuple[object, ...] | None = tls_stamp(tls)
        self._problem = ""
        content = read_tls(tls)
        self._current = content, server_certificates(content)
        self._validity = validity(content, tls)
        self._warn_below = self._first_warning()

    @property
    def content(self) -> TlsContent:
        """What the files held when they could last be used."""
        return self._current[0]

    @property
    def expiry(self) -> float:
        """When the certificate, or one that it needs, expires: seconds since 1970."""
        return self._validity[1]

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a listener, which follow the files. Each gRPC server needs its own."""
        shown = self._current

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # gRPC asks on a thread of its own, for each connection.
            nonlocal shown
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
                if self._in_time(self._validity):
                    check_in_time(self._tls, self._in_time(valid))
            except InvalidField as error:
                if error.message != self._problem:
                    logger.error("the certificate stays as it was: %s", error.message)
                self._problem = error.message
                return False
            # Only now: what cannot be used is tried again, since a file that becomes readable has not changed.
            self._stamp, self._problem = stamp, ""
            if content != self.content:
                self._current = content, server_certificates(content)
                self._validity = valid
                self._warn_below = self._first_warning()
                logger.info("new certificate from %s, valid until %s", self._tls.cert, _date(valid[1]))
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
        """Warn when the certificate is about to expire, again whenever half of the remaining time has passed, and once
        when it has expired."""
        left = self.expiry - self._wall_clock()
        if left > self._warn_below:
            return
        self._warn_below = left / 2 if left > CERTIFICATE_POLL else 0.0 if left > 0 else float("-inf")
        then = "put a new certificate and key in place: they are read without a restart"
        if left > 0:
            logger.warning("the certificate in %s expires on %s: %s", self._tls.cert, _date(self.expiry), then)
        else:
            logger.error("the certificate in %s expired on %s: %s", self._tls.cert, _date(self.expiry), then)

    def _in_time(self, valid: tuple[float, float]) -> bool:
        return valid[0] <= self._wall_clock() < valid[1]

    def _follow(self) -> None:
        if tls_stamp(self._tls) != self._stamp:
            self.refresh()

    def _first_warning(self) -> float:
        start, end = self._validity
        return min(EXPIRY_NOTICE, (end - start) * EXPIRY_SHARE)


def validity(content: TlsContent, tls: TlsConfig) -> tuple[float, float]:
    """Return from when until when a certificate is valid, with those that it was sent with: seconds since 1970.

    Raises:
        InvalidField: a certificate cannot be read.
    """
    try:
        chain = x509.load_pem_x509_certificates(content.cert or b"")
    except ValueError:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate chain in PEM") from None
    return (
        max(certificate.not_valid_before_utc.timestamp() for certificate in chain),
        min(certificate.not_valid_after_utc.timestamp() for certificate in chain),
    )


def check_in_time(tls: TlsConfig, in_time: bool) -> None:
    """Raise `InvalidField` for a certificate that is not `in_time`: expired, or not valid yet."""
    if not in_time:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate that is valid now; look with openssl x509 -dates")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
