"""Explains a failed connection by the TLS settings of both sides, as far as gRPC's text shows them.

A server that rejects a caller closes the connection without a reason. The settings are those of three places:
``tls.ca`` is `TlsConfig.ca` of a client and of the vLLM connector, ``--tls-ca`` the flag of `kvferry` and kvferryd.
"""

from __future__ import annotations

import re

from kvferry._wire.channel import MAX_CLIENT_CHAIN_BYTES, TlsConfig, chain_bytes

# Also if a server accepts a connection and closes it before it has sent anything.
_NEVER_CONNECTED = "failed to connect"
# "Wrap failed": the connection was closed while gRPC was writing.
_CLOSED = re.compile(r"Socket closed|Connection reset|Broken pipe|Wrap failed")
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ?([^:]*)")

_NOT_TRUSTED = (
    "TLS settings differ: the caller does not trust the node server's certificate ({}). The caller's tls.ca (--tls-ca) "
    "has to hold the authority that signed --tls-cert of kvferryd there (not given: the system's authorities count). "
    "Where a certificate has expired, put new files in place, which kvferryd reads by itself"
)
_OTHER_NAME = (
    "TLS settings differ: the node server's certificate is for other names than this address. Use an address that it "
    "is for (--advertise of kvferryd there is what references say), or give kvferryd a --tls-cert that has this one as "
    "subjectAltName"
)
_NOT_TLS = (
    "TLS settings differ: it does not speak TLS, and the caller does. Start kvferryd there with --tls-cert and "
    "--tls-key, or leave out the caller's tls (--tls-ca, --tls-cert, --tls-key)"
)
_TOO_LARGE = (
    "it closed the connection. The caller's tls.cert (--tls-cert), {}, has {} bytes of certificates without the PEM "
    f"encoding, and gRPC's servers take at most {MAX_CLIENT_CHAIN_BYTES} from a client. Give the caller a certificate "
    "with fewer names"
)
_REJECTED = (
    "it closed the connection of a caller {}. TLS settings are likely to differ: kvferryd with --tls-cert needs the "
    "caller's tls.ca (--tls-ca), and with --tls-ca of its own the caller's tls.cert and tls.key (--tls-cert, "
    "--tls-key), signed by an authority in --tls-ca of kvferryd and not expired (openssl x509 -noout -issuer -enddate "
    "-in FILE). A node server with as many connections as its --max-connections closes further ones, too"
)
_CLOSED_AGAIN = (
    "it closes connections at once, and has answered before: kvferryd there is likely to be restarting behind a proxy. "
    "If it lasts, look whether kvferryd runs, has as many connections as its --max-connections, or has other TLS "
    "settings since"
)


def tls_failure(text: str, address: str, tls: TlsConfig | None, *, answered: bool = False) -> str:
    """Return the problem of the TLS settings, with the settings to look at; empty if TLS did not fail.

    `text` is gRPC's text for a call that ended with UNAVAILABLE. `answered`: the node server has answered this caller
    before, so a connection that is closed without a reason does not point to TLS.
    """
    if address.startswith("unix:"):
        return ""
    untrusted, cut = _UNTRUSTED.search(text), _CLOSED.search(text) is not None
    closed = cut and _NEVER_CONNECTED in text
    if answered and closed and not untrusted:
        return _CLOSED_AGAIN
    if tls is None:
        return _REJECTED.format("without TLS") if closed else ""
    if untrusted:
        return _NOT_TRUSTED.format(untrusted[1])
    if "Hostname Verification" in text or "is not in peer certificate" in text:
        return _OTHER_NAME
    if "WRONG_VERSION_NUMBER" in text:
        return _NOT_TLS
    if (cut or "andshake" in text) and (size := _shown_bytes(tls)) > MAX_CLIENT_CHAIN_BYTES:
        return _TOO_LARGE.format(tls.cert, size)
    if closed or "andshake" in text:
        return _REJECTED.format("that has no certificate to show" if tls.cert is None else "with a certificate")
    return ""


def _shown_bytes(tls: TlsConfig) -> int:
    try:
        return 0 if tls.cert is None else chain_bytes(tls.cert.read_bytes())
    except OSError:
        return 0
