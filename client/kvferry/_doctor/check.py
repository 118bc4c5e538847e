"""What checks take and return: this host, with the options of the command, and findings."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FINDINGS = Path(__file__).with_name("findings.md")  # The texts of the findings, in one table for each check


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check, with the fields of `kvferry doctor --json`."""

    finding: str  # Name in the table
    level: str  # `ok`, `warning`, `problem` or `unknown`; see docs/doctor.md
    found: str  # What the check saw, with numbers
    means: str  # The consequence for kvferry; empty: none
    do: str  # The remedy; empty: there is nothing to do


@functools.cache
def table() -> dict[str, tuple[str, str, str]]:
    """Return level, meaning and remedy of each finding, by name."""
    text = FINDINGS.read_text(encoding="utf-8")
    rows = (re.split(r" ?\| ?", line) for line in text.splitlines() if line.startswith("| `"))
    return {name.strip("`"): (level, means, remedy) for _, name, level, means, remedy, _ in rows}


def finding(name: str, found: str, do: str = "") -> Finding:
    """Make the finding of that name in the table; `do` replaces the table's remedy where it depends on the case."""
    level, means, remedy = table()[name]
    return Finding(name, level, found, means, do or remedy)


@dataclass(frozen=True)
class Host:
    """The files of the system, the environment, and the options of the command."""

    root: Path = Path("/")  # The folder with proc, sys and dev; in tests another, for hardware that is not there
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    pid: int | None = None  # A process of this host to check, such as an engine
    peer: str = ""  # Address of a node server to check; empty: none
    tls: Mapping[str, Path | None] = field(default_factory=dict)  # The PEM files for the peer, by field of `TlsConfig`
    timeout: float = 5.0  # Seconds to wait for an answer of the peer

    def path(self, path: str) -> Path:
        """Return the place of an absolute path of the system."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str:
        """Return the stripped text of a file; empty if it cannot be read, as is the case with some files of sysfs."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; empty if it cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def status(self, pid: int | str = "self") -> dict[str, str]:
        """Return the fields of /proc/PID/status; empty if there is no such process."""
        lines = (line.partition(":") for line in self.text(f"/proc/{pid}/status").splitlines())
        return {name: value.strip() for name, _, value in lines}

    def capable(self, capability: int) -> bool:
        """Whether this process has a capability, by its number in linux/capability.h."""
        return bool(int(self.status().get("CapEff", "0"), 16) >> capability & 1)

    def rdma_devices(self) -> list[str]:
        """Return the names of RDMA devices, such as ``mlx5_0``."""
        return self.names("/sys/class/infiniband")

    def gpus(self) -> list[str]:
        """Return the GPUs that the system knows: NVIDIA's by model, and whether there is an AMD GPU."""
        found = []
        for name in self.names("/proc/driver/nvidia/gpus"):
            lines = self.text(f"/proc/driver/nvidia/gpus/{name}/information").splitlines()
            found.append(next((line.partition(":")[2].strip() for line in lines if line.startswith("Model")), name))
        # Without /proc/driver, as some sandboxes are, the device files remain.
        files = [name for name in self.names("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
        return found or files or (["an AMD GPU (/dev/kfd)"] if self.path("/dev/kfd").exists() else [])


def python(code: str, *arguments: str) -> list[str]:
    """Return the command that runs lines of Python. Any user may put modules into the current folder, such as /tmp."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = filter(None, sys.path); {code}", *arguments]


def ended(code: int) -> str:
    """Describe how a process ended, given the return code of `subprocess`: negative for a signal."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
