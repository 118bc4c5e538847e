"""What the checks look at: this host's files and environment, and what the caller asked about."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """The files of the system, the environment, and what is asked.

    Attributes:
        root: the folder in which ``proc``, ``sys`` and ``dev`` are; another one in tests, for hardware that is not
            there.
        environ: the environment variables.
        pid: a process of this host to look at, such as an engine; None: none.
        peer: address of a node server to look at; empty: none.
        tls: the PEM files to reach it with, by field of `TlsConfig`.
        timeout: seconds to wait for an answer of the peer.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    pid: int | None = None
    peer: str = ""
    tls: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 5.0

    def path(self, path: str) -> Path:
        """Return where an absolute path of the system is."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str:
        """Return what is in a file, without the last line's end; empty if it cannot be read. Files of sysfs "
        "may refuse."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; none if it cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def chosen(self, path: str) -> str:
        """Return the word in brackets of a file like ``always [madvise] never``; empty if there is none."""
        _, bracket, rest = self.text(path).partition("[")
        return rest.partition("]")[0] if bracket else ""

    def status(self, pid: int | str = "self") -> dict[str, str]:
        """Return the fields of /proc/PID/status; none if there is no such process."""
        lines = (line.partition(":") for line in self.text(f"/proc/{pid}/status").splitlines())
        return {name: value.strip() for name, _, value in lines}
