"""The dates at which certificates expire, and when to warn of them.

Python's `ssl` shows the dates of authorities' certificates and of a peer's, not those of this side's own certificate.
So the own certificate is read at the other end of a handshake in memory, which saves every engine a package.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvferry._wire.channel import TlsConfig

EXPIRY_NOTICE = 14 * 86_400.0
EXPIRY_SHARE = 0.25
"""The first warning comes at most so many seconds before a certificate expires, and at most this share of its lifetime:
otherwise certificates that live for an hour would always be warned of."""


@dataclass(frozen=True, slots=True)
class Validity:
    """The time in which certificates are valid, in seconds since 1970, and the subject of the certificate that ends
    first; empty: this side's own."""

    start: float
    end: float
    subject: str = ""


class ExpiryNotice:
    """The times of the warnings that certificates expire: first some time before, again whenever half of the remaining
    time has passed, and once when they have expired. With less than `least` seconds left, only the last warning
    follows."""

    def __init__(self, validity: Validity, least: float) -> None:
        self.validity = validity
        self._least = least
        self._below = min(EXPIRY_NOTICE, (validity.end - validity.start) * EXPIRY_SHARE)

    def due(self, wall: float) -> bool:
        """Return whether to warn now, at `wall` seconds since 1970; True once for each warning."""
        left = self.validity.end - wall
        if left > self._below:
            return False
        self._below = left / 2 if left > self._least else 0.0 if left > 0 else float("-inf")
        return True

    def expired(self, wall: float) -> bool:
        return wall >= self.validity.end

    def date(self) -> str:
        return date(self.validity.end)


def authorities_validity(pem: bytes) -> Validity | None:
    """Return until when all authorities in a file are valid; None if the file has none. Of certificates with the same
    subject, the one that ends last counts: an authority that was renewed keeps its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        return None
    last: dict[str, Validity] = {}
    for certificate in context.get_ca_certs():
        found = _validity(certificate)
        if found.subject not in last or found.end > last[found.subject].end:
            last[found.subject] = found
    return min(last.values(), key=lambda one: one.end, default=None)


def own_validity(tls: TlsConfig) -> Validity | None:
    """Return until when this side's certificate, with the authorities that are sent with it, is valid; None if there is
    no certificate, or the certificate cannot be used now. Reads the files."""
    if tls.cert is None or tls.key is None:
        return None
    try:
        chain = tls.cert.read_bytes()
        leaf = _shown_to_a_peer(tls.cert, tls.key)
    except (ssl.SSLError, OSError, ValueError):
        return None
    above = authorities_validity(chain)
    end = min(leaf.end, above.end) if above is not None else leaf.end
    return Validity(leaf.start, end)


def date(seconds: float) -> str:
    """Format a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _shown_to_a_peer(cert: Path, key: Path) -> Validity:
    """Make a handshake between two ends of this process. Raises `ssl.SSLError` for a certificate that no peer would
    take: expired, not valid yet, or not for clients."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    # Any signer will do: only the dates matter.
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    server.load_verify_locations(cadata=cert.read_bytes().decode("ascii", "ignore"))
    for context in (client, server):
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.load_cert_chain(cert, key, password=b"")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = ends[1].getpeercert()
    if not certificate:
        raise ValueError("no certificate was shown")
    return _validity(certificate)


def _validity(certificate: Any) -> Validity:
    names = [str(value) for part in certificate["subject"] for _, value in part]
    start, end = (ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter"))
    return Validity(float(start), float(end), ", ".join(names))
