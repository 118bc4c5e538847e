"""A directory in a file, written by people or by a configuration system.

    homes = ["10.0.0.7:7423", "10.0.0.8:7423"]

    [engines.prefill-0]
    home = "10.0.0.7:7423"
    labels = { role = "prefill" }

JSON has the same fields. A home need not be in `homes` if an engine names it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvferry._arguments import mapping, string_map, text, texts
from kvferry._directory.directory import Directory, Listed, Listing, checked_home, unavailable
from kvferry.errors import InvalidField

LOOK_EVERY = 1.0  # Seconds between looks at whether the file has changed

MAX_FILE_BYTES = 16 * 1024 * 1024


class FileDirectory(Directory):
    """A file, ``.toml`` or else JSON, read again when it changes. While the file cannot be read or is wrong, its last
    good content stays in use."""

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
    engines = tuple(
        _listing(text("engine_id", engine_id), entry)
        for engine_id, entry in mapping("engines", fields.get("engines", {}), "a table of engines").items()
    )
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
