"""A Debian in a folder, made by debootstrap, which has Python and systemd; and programs that run in such a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

FOLDER = ROOT / "build" / "deployed"
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
PACKAGES = ("ca-certificates", "dbus", "procps", "python3", "python3-venv", "systemd", "systemd-sysv")
WHEELS = "/wheels"
"""Where pip finds the wheels in the folder: a build of an image reaches no index."""
PROGRAMS = ("debootstrap", "buildah", "systemd-nspawn", "nsenter", "unshare")
TIMEOUT = 60.0


def run(*command: str | Path, timeout: float = TIMEOUT, **options: Any) -> str:
    """Run a program to its end; its standard output. Raises with what it said where it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=timeout, **options
    )
    if done.returncode:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def missing() -> str:
    """Why nothing can be deployed on this host; empty if it can."""
    if os.geteuid() != 0:
        return "only root may make a Debian in a folder"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (Debian's buildah, debootstrap, systemd-container)" if absent else ""


def debian() -> Path:
    """The folder, made where it is not there yet."""
    folder = FOLDER / "debian"
    if not (FOLDER / "made").exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        command = ("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, folder, MIRROR)
        run(*command, timeout=900)
        (folder / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        (folder / "etc/pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {WHEELS}\n")
        (FOLDER / "made").touch()
    return folder


def read(runtime: Path) -> str:
    """Let two engines of this host read through the node server of a folder that is another's /run/kvferry; what they
    print. They see it where the home says that it is."""
    shell = f'mount -t tmpfs tmpfs /run && ln -s {runtime} /run/kvferry && exec "$@"'
    command = (sys.executable, ROOT / "tests/deployed/two_engines.py", "unix:/run/kvferry/node.sock")
    return run("unshare", "--mount", "sh", "-c", shell, "sh", *command)


def until(condition: Callable[[], bool], said: Callable[[], str]) -> None:
    """Wait until a condition holds; raises with what was `said` if it does not."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


class Program:
    """A program with a log, whose processes end with it at `close`."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until the program has said something; raises if it ends before."""

        def there() -> bool:
            assert self.process.poll() is None, self.said()
            return text in self.said()

        until(there, self.said)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(TIMEOUT)


def child(parent: int) -> int:
    """The one child process of a process."""
    (found,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(found)
