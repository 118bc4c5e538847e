"""A system that systemd has booted in a container of systemd-nspawn, with the unit of deploy/systemd."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.deployed.debian import TIMEOUT, Program, child, until
from tests.support.repository import ROOT

FOLDER = ROOT / "deploy" / "systemd"
UNIT = "kvferryd"


class System:
    """A system that boots at `boot`; until then, its files may be changed in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = root / "etc/kvferry"
        self.settings.mkdir()
        (self.settings / "kvferryd.toml").write_text('listen = "127.0.0.1:7423"\n')
        units = root / "etc/systemd/system"
        shutil.copy(FOLDER / f"{UNIT}.service", units)
        shutil.copy(FOLDER / "kvferry.sysusers.conf", root / "usr/lib/sysusers.d/kvferry.conf")
        wants = units / "multi-user.target.wants"
        wants.mkdir(exist_ok=True)
        (wants / f"{UNIT}.service").symlink_to(f"../{UNIT}.service")
        self._nspawn: Program | None = None
        self._init = 0

    def boot(self) -> None:
        """Boot, and wait until systemd has started everything, or failed to."""
        options = ("--boot", "--register=no", "--keep-unit", "--private-network", "--quiet")
        self._nspawn = nspawn = Program(("systemd-nspawn", "-D", self.root, *options), self.root.with_name("console"))
        nspawn.wait_for("login:")
        self._init = child(nspawn.process.pid)
        self.execute("systemctl", "is-system-running", "--wait")

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the system."""
        return subprocess.run(
            ["nsenter", "-t", f"{self._init}", "-a", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            # openssl prints what the server sends of HTTP/2.
            errors="replace",
            timeout=TIMEOUT,
            check=False,
            env={"PATH": "/opt/kvferry/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )

    def health(self, user: str, group: str) -> subprocess.CompletedProcess[str]:
        """What a user of the system hears of kvferryd's health."""
        health = ("kvferry", "health", "--server", "unix:/run/kvferry/node.sock")
        return self.execute("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *health)

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.execute("systemctl", "show", UNIT, "--property", name, "--value").stdout.strip()

    @property
    def pid(self) -> str:
        """kvferryd's process, as the system numbers it."""
        return self.show("MainPID")

    def journal(self) -> str:
        """What kvferryd and systemd have said of the unit."""
        return self.execute("journalctl", "--unit", UNIT, "--output", "cat", "--no-pager").stdout

    @property
    def runtime(self) -> Path:
        """The system's /run/kvferry, seen from the host."""
        return Path(f"/proc/{self._init}/root/run/kvferry")

    def until(self, name: str, value: str) -> None:
        """Wait until a property of the unit has a value."""
        until(lambda: self.show(name) == value, self.journal)

    def close(self) -> None:
        if self._nspawn is not None:
            self._nspawn.close()
