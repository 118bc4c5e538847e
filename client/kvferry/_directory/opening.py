"""Directories by their URLs.

file:/etc/kvferry/directory.toml
etcd://etcd-0:2379,etcd-1:2379/kvferry?user=kvferry&password_file=/etc/kvferry/etcd-password
etcds://etcd-0:2379/kvferry?ca=/etc/kvferry/etcd-ca.pem   over TLS; with cert= and key= for a client certificate

A file is written by people or by a configuration system. JSON has the same fields as TOML:

    homes = ["10.0.0.7:7423", "10.0.0.8:7423"]

    [engines.prefill-0]
    home = "10.0.0.7:7423"
    labels = { role = "prefill" }

A home need not be in `homes` if an engine names it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvferry._arguments import mapping, string_map, text, texts
from kvferry._directory.directory import Directory, Listed, Listing, checked_home, unavailable
from kvferry._directory.etcd import EtcdAccess, EtcdDirectory
from kvferry._wire.channel import TlsConfig
from kvferry.errors import InvalidField

DEFAULT_PREFIX = "/kvferry"  # Prefix of keys in etcd if the URL has none
MAX_ENDPOINTS = 16
FORMS = "file:/PATH or etcd://HOST:PORT[,HOST:PORT]/PREFIX (etcds:// for TLS)"
OF_ETCD = ("user", "password_file", "ca", "cert", "key")
LOOK_EVERY = 1.0  # Seconds between looks at whether the file has changed
MAX_FILE_BYTES = 16 * 1024 * 1024


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
        raise InvalidField("directory", given.partition("?")[0], FORMS) from None
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
    # Somebody may have put a password into the query, so errors do not show it.
    given, shown = dict(parse_qsl(parts.query, keep_blank_values=True)), url.partition("?")[0]
    for name, value in given.items():
        if name not in OF_ETCD or not value:
            raise InvalidField("directory", shown, f"parameters {', '.join(OF_ETCD)} with a value, not {name!r}")
    try:
        endpoints = tuple(checked_home(each) for each in parts.netloc.split(",") if each)
    except InvalidField:
        raise InvalidField("directory", shown, "etcd://HOST:PORT,HOST:PORT/PREFIX") from None
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


class FileDirectory(Directory):
    """A file, ``.toml`` or else JSON, read again when it changes. Its last good content stays in use."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path = path
        self._seen: object = None

    def _follow(self) -> float:
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen != self._seen:
                self._learn(listed_in(self._path))
                # Only now: a wrong file is read again even if it does not change.
                self._seen = seen
        except (OSError, InvalidField) as error:
            self._seen = None
            problem = error.strerror or "it cannot be read" if isinstance(error, OSError) else error.message
            raise unavailable(self.name, problem) from None
        return LOOK_EVERY


def listed_in(path: Path) -> Listed:
    """Read a file. Raises `InvalidField` if it is not TOML or JSON or has a wrong field, or `OSError`."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidField("directory", f"{path}", f"a file of at most {MAX_FILE_BYTES} bytes")
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        said: Any = parse_toml(content.decode()) if kind == "TOML" else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidField("directory", f"{path}", f"{kind} ({error})") from None
    fields = _table("directory", said, "a table with homes and engines", "homes", "engines")
    homes = frozenset(map(checked_home, texts("homes", fields.get("homes", []))))
    entries = mapping("engines", fields.get("engines", {}), "a table of engines")
    engines = tuple(_listing(text("engine_id", engine_id), entry) for engine_id, entry in entries.items())
    return Listed(homes | {listing.home for listing in engines}, engines)


def _listing(engine_id: str, entry: object) -> Listing:
    where = f"engines.{engine_id}"
    fields = _table(where, entry, 'a table such as { home = "host:port" }', "home", "labels")
    home = text(f"{where}.home", fields.get("home"))
    return Listing(engine_id, home, labels=string_map(f"{where}.labels", fields.get("labels", {})))


def _table(where: str, value: object, expected: str, *names: str) -> dict[object, object]:
    fields = mapping(where, value, expected)
    unknown = sorted(map(str, fields.keys() - set(names)))
    if unknown:
        raise InvalidField(where, unknown[0], " or ".join(names))
    return fields


def parse_toml(content: str) -> dict[str, Any]:
    """Parse a file in TOML; raises `ValueError`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(content)
