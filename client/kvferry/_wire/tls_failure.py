"""Explains a failed connection by the TLS settings of both sides, as far as gRPC's text shows them.

gRPC's text names the caller's objection to a server's certificate. A server that rejects a caller closes the connection
without a reason, so these messages name the likely cause. The settings are those of three places: ``tls.ca`` is
`TlsConfig.ca` of a client and of the vLLM connector, ``--tls-ca`` the flag of `kvferry` and kvferryd.
"""

from __future__ import annotations

import re

from kvferry._wire.channel import MAX_CLIENT_CHAIN_BYTES, TlsConfig, chain_bytes

# Also if a server accepts a connection and closes it before it has sent anything.
_NEVER_CONNECTED = "failed to connect"
# "Wrap failed": the connection was closed while gRPC was writing.
_CLOSED = re.compile(r"Socket closed|Connection reset|Broken pipe|Wrap failed")
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ?([^:]*)")


def tls_failure(text: str, address: str, tls: TlsConfig | None, *, answered: bool = False) -> str:
    """Return the problem of the TLS settings, with the settings to look at; empty if TLS did not fail.

    `text` is gRPC's text for a call that ended with UNAVAILABLE. `answered`: the node server has answered this caller
    before, so a connection that is closed without a reason does not point to TLS.
    """
    if address.startswith("unix:"):
        return ""
    closed = _NEVER_CONNECTED in text and _CLOSED.search(text) is not None
    if answered and closed and not _UNTRUSTED.search(text):
        return _CLOSED_AGAIN
    if tls is None:
        return _WITHOUT_TLS if closed else ""
    if found := _UNTRUSTED.search(text):
        given = "" if tls.ca is not None else ", and is not given, so that the system's authorities count"
        return (_EXPIRED if "expired" in found[1] else _NOT_TRUSTED).format(reason=found[1], given=given)
    if "Hostname Verification" in text or "is not in peer certificate" in text:
        return _OTHER_NAME
    if "WRONG_VERSION_NUMBER" in text:
        return _NOT_TLS
    if "andshake" in text and _shown_bytes(tls) <= MAX_CLIENT_CHAIN_BYTES:
        why = "the connection was closed" if _CLOSED.search(text) else text.rpartition("last error: ")[2]
        return _HANDSHAKE.format(why=why)
    if _CLOSED.search(text) and (size := _shown_bytes(tls)) > MAX_CLIENT_CHAIN_BYTES:
        return _TOO_LARGE.format(cert=tls.cert, size=size)
    if closed:
        return _NO_CERTIFICATE if tls.cert is None else _CERTIFICATE_REJECTED
    return ""


def _shown_bytes(tls: TlsConfig) -> int:
    try:
        return 0 if tls.cert is None else chain_bytes(tls.cert.read_bytes())
    except OSError:
        return 0


_EXPIRED = (
    "TLS settings: the certificate of the node server, or of its authority, is not valid any more ({reason}). Put new "
    "files in place there (--tls-cert, --tls-key), which kvferryd reads by itself; if it is the authority's, also "
    "renew the caller's tls.ca (--tls-ca)"
)
_NOT_TRUSTED = (
    "TLS settings differ: the caller does not trust the node server's certificate ({reason}). The caller's tls.ca "
    "(--tls-ca) has to hold the authority that signed --tls-cert of kvferryd there{given}"
)
_TOO_LARGE = (
    "it closed the connection. The caller's tls.cert (--tls-cert), {cert}, has {size} bytes of certificates without "
    f"the PEM encoding, and gRPC's servers take at most {MAX_CLIENT_CHAIN_BYTES} from a client. Give the caller a "
    "certificate with fewer names"
)
_HANDSHAKE = (
    "TLS settings are likely to differ: the handshake failed ({why}). Compare the caller's tls.ca, tls.cert and "
    "tls.key (--tls-ca, --tls-cert, --tls-key) with those of kvferryd there. A node server that has as many "
    "connections as its --max-connections closes further ones too"
)
_CLOSED_AGAIN = (
    "it closes connections at once, and has answered before: kvferryd there is likely to be restarting behind a proxy. "
    "If it lasts, look whether kvferryd runs, has as many connections as its --max-connections, or has other TLS "
    "settings since"
)
_WITHOUT_TLS = (
    "it closed a connection that the caller had opened without TLS. TLS settings are likely to differ: if kvferryd "
    "there has --tls-cert, set the caller's tls.ca (--tls-ca), and if it has --tls-ca too, tls.cert and tls.key "
    "(--tls-cert, --tls-key). A node server that has as many connections as its --max-connections closes further ones "
    "too"
)
_NO_CERTIFICATE = (
    "it closed the connection of a caller that has no certificate to show. TLS settings are likely to differ: if "
    "kvferryd there has --tls-ca, set the caller's tls.cert and tls.key (--tls-cert, --tls-key)"
)
_CERTIFICATE_REJECTED = (
    "it closed the connection when it had seen the caller's certificate. TLS settings are likely to differ: the "
    "caller's tls.cert (--tls-cert) has to be signed by an authority in --tls-ca of kvferryd there and must not have "
    "expired; `openssl x509 -noout -issuer -enddate -in FILE` shows both"
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
