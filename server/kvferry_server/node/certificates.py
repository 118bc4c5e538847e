"""The certificates of a node server. The files are read again when they change, and on demand. New connections get the
new certificate and are checked against the new authorities; open connections stay as they are."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import cast

import grpc

from kvferry._wire.channel import TlsConfig, TlsContent, server_certificates
from kvferry._wire.tls_files import TlsFiles, Validity, date, own_validity
from kvferry.errors import InvalidField
from kvferry_server.node.limits import CERTIFICATE_POLL

logger = logging.getLogger(__name__)


class Certificates(TlsFiles):
    """The TLS files of a node server. Raises `InvalidField` if they cannot be used. Thread-safe."""

    POLL = CERTIFICATE_POLL

    def __init__(self, tls: TlsConfig, wall_clock: Callable[[], float] = time.time) -> None:
        super().__init__(tls, wall_clock)
        # Otherwise a reading that began earlier could put back older contents.
        self._reading = threading.Lock()
        self._read()

    def content(self) -> TlsContent:
        """Return the last usable contents of the files. Only `run` and `refresh` read them again."""
        return self._content or self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return a gRPC server's credentials, which follow the files."""
        shown = self.content()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # gRPC calls this on one of its threads, for each connection.
            nonlocal shown
            current = self.content()
            if current is shown:
                return None
            shown = current
            return server_certificates(current)

        # None means no change, but the type stubs do not allow it.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
        mutual = self._tls.ca is not None
        first = server_certificates(shown)
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=mutual)

    def refresh(self) -> bool:
        """Read the files again, and block meanwhile. Unusable files are logged, change nothing, and give False."""
        with self._reading:
            before = self.content()
            if self._read() is not before and self.expiry is not None:
                logger.info("new certificate from %s, valid until %s", self._tls.cert, date(self.expiry))
            return not self._problem

    async def run(self) -> None:
        """Follow the files, and warn before the certificate expires, until cancelled."""
        while True:
            self.warn()
            await asyncio.sleep(CERTIFICATE_POLL)
            try:
                if await asyncio.to_thread(self._changed):
                    await asyncio.to_thread(self.refresh)
            except Exception:
                # Go on whatever the files hold: later files are still to be read.
                logger.exception("the TLS files could not be read; the certificate stays as it was")

    def _validity(self) -> Validity:
        wall = self._wall_clock()
        # Clients would refuse a new certificate that is not valid now, but accept the current one. It is tried again.
        if self._own is not None and self._own.validity.start <= wall < self._own.validity.end:
            return check_in_time(self._tls, wall)
        return _known_validity(self._tls)


def _known_validity(tls: TlsConfig) -> Validity:
    """Return when the certificate is valid. Raises `InvalidField` if it does not tell: nothing would warn of its end;
    or, as openssl's BEGIN TRUSTED CERTIFICATE, it is one that only OpenSSL can read, and gRPC would refuse each
    connection with it."""
    valid = own_validity(tls)
    if valid is None:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate chain in PEM (BEGIN CERTIFICATE)")
    return valid


def check_in_time(tls: TlsConfig, wall: float) -> Validity:
    """Return when the certificate is valid; raises `InvalidField` if not at `wall` seconds since 1970, or if it does
    not tell."""
    valid = _known_validity(tls)
    if not valid.start <= wall < valid.end:
        raise InvalidField("tls_cert", str(tls.cert), "a certificate that is valid now; look with openssl x509 -dates")
    return valid
