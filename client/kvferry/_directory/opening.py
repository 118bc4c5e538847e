"""Directories by their URLs.

file:/etc/kvferry/directory.toml
etcd://etcd-0:2379,etcd-1:2379/kvferry?user=kvferry&password_file=/etc/kvferry/etcd-password
etcds://etcd-0:2379/kvferry?ca=/etc/kvferry/etcd-ca.pem   over TLS; with cert= and key= for a client certificate
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvferry._arguments import text
from kvferry._directory.directory import Directory
from kvferry._directory.etcd import EtcdAccess, EtcdDirectory
from kvferry._directory.file import FileDirectory
from kvferry._wire.channel import Address, TlsConfig, parse_address
from kvferry.errors import InvalidField

DEFAULT_PREFIX = "/kvferry"  # Prefix of keys in etcd if the URL has none

MAX_ENDPOINTS = 16
FORMS = "file:/PATH or etcd://HOST:PORT[,HOST:PORT]/PREFIX (etcds:// for TLS)"
OF_ETCD = ("user", "password_file", "ca", "cert", "key")


def open_directory(url: str) -> Directory:
    """Open the directory at a URL. From its first use on it is read in the background.

    Args:
        url: ``file:/etc/kvferry/directory.toml`` or ``etcd://host:port,host:port/prefix``; see
            docs/deployment.md. URLs contain no password: etcd's is read from the file in ``password_file``.

    Raises:
        InvalidField: the URL has another form, or needs a file that is missing.
    """
    given = text("directory", url)
    if not given.isprintable():
        raise InvalidField("directory", ascii(given)[:80], FORMS)
    try:
        parts = urlsplit(given)
    except ValueError:
        raise InvalidField("directory", _shown(given), FORMS) from None
    if parts.username is not None or "@" in parts.netloc:
        # The message does not repeat the URL, which contains a password.
        raise InvalidField("directory", f"{parts.scheme}://…@…", "no password: ?user=NAME&password_file=FILE instead")
    if parts.fragment or (parts.query and parts.scheme not in ("etcd", "etcds")):
        raise InvalidField("directory", given, f"no query and no fragment: {FORMS}")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidField("directory", given, "file:/PATH, an absolute path")
        return FileDirectory(given, Path(unquote(parts.path)))
    if parts.scheme in ("etcd", "etcds"):
        return _etcd(given, parts)
    raise InvalidField("directory", given, FORMS)


def _etcd(url: str, parts: SplitResult) -> Directory:
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in given.items():
        if name not in OF_ETCD or not value:
            raise InvalidField("directory", _shown(url), f"parameters {', '.join(OF_ETCD)} with a value, not {name!r}")
    form = "etcd://HOST:PORT,HOST:PORT/PREFIX"
    endpoints = tuple(str(_address(each, url, form)) for each in parts.netloc.split(",") if each)
    if not 1 <= len(endpoints) <= MAX_ENDPOINTS:
        raise InvalidField("directory", url, f"1 to {MAX_ENDPOINTS} endpoints: {FORMS}")
    files = {name: Path(given[name]) for name in ("ca", "cert", "key") if name in given}
    if parts.scheme == "etcd" and files:
        raise InvalidField("directory", url, "etcds://, because certificates are given")
    if ("user" in given) != ("password_file" in given):
        raise InvalidField("directory", url, "both user and password_file, or neither")
    tls = TlsConfig(**files) if parts.scheme == "etcds" else None
    password_file = Path(given["password_file"]) if "password_file" in given else None
    prefix = "/" + unquote(parts.path).strip("/") if parts.path.strip("/") else DEFAULT_PREFIX
    return EtcdDirectory(url, EtcdAccess(endpoints, tls, given.get("user", ""), password_file), prefix)


def _address(address: str, url: str, expected: str) -> Address:
    try:
        parsed = parse_address(address)
    except InvalidField:
        parsed = Address()
    if parsed.is_unix or not parsed.port:
        raise InvalidField("directory", _shown(url), expected)
    return parsed


def _shown(url: str) -> str:
    """Remove the query, in which somebody may have put a password, for an error."""
    return url.partition("?")[0]
