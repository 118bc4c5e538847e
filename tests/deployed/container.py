"""The image of deploy/container, built by buildah and unpacked, and a container of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.deployed.debian import WHEELS, Program, child, run
from tests.support.repository import ROOT

FILE = ROOT / "deploy" / "container" / "Containerfile"
BASE = "localhost/python"


class Image:
    """An image: its settings, and its files in `root`."""

    def __init__(self, buildah: tuple[str, ...], name: str) -> None:
        self._buildah = buildah
        self.config: dict[str, Any] = json.loads(run(*buildah, "inspect", "--type", "image", name))["Docker"]["config"]
        self._unpacked = run(*buildah, "from", "--pull-never", name).strip()
        self.root = Path(run(*buildah, "mount", self._unpacked).strip())

    def close(self) -> None:
        run(*self._buildah, "rm", self._unpacked)


def build(debian: Path, wheels: Path, storage: Path) -> Image:
    """Build the image, from a Debian where Docker's registry would give the image of Python."""
    buildah = ("buildah", "--root", f"{storage}/root", "--runroot", f"{storage}/run")
    base = run(*buildah, "from", "scratch").strip()
    run(*buildah, "add", "-q", base, debian, "/", timeout=300)
    run(*buildah, "commit", "-q", "--rm", base, BASE, timeout=300)
    built = ("--build-arg", f"PYTHON={BASE}", "-f", FILE, "-t", "kvferry", ROOT)
    # Without Docker's format there is no health check.
    options = ("--format", "docker", "--pull-never", "--isolation", "chroot", "-v", f"{wheels}:{WHEELS}:ro")
    run(*buildah, "bud", *options, *built, timeout=600)
    return Image(buildah, "localhost/kvferry")


class Container:
    """A running container: namespaces of its own, files that it cannot change, no capability; as in the first lines of
    the Containerfile, with `run` for the host's /run/kvferry."""

    def __init__(self, image: Image, folder: Path) -> None:
        self._image = image
        self.run = folder / "run"
        shutil.copytree(image.root / "run/kvferry", self.run)
        made = (image.root / "run/kvferry").stat()
        os.chown(self.run, made.st_uid, made.st_gid)
        root = str(image.root)
        mounts = (
            f"mount --bind {root} {root}",
            f"mount -o remount,bind,ro {root}",
            f"mount --bind {self.run} {root}/run/kvferry",
            f"mount -t proc proc {root}/proc",
            "ip link set lo up",
        )
        user, _, group = image.config["User"].partition(":")
        entry = ("chroot", root, *self._as(user, group), *image.config["Entrypoint"], "--listen", "")
        script = " && ".join((*mounts, 'exec "$@"'))
        namespaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
        self.program = Program(("unshare", *namespaces, "sh", "-c", script, "sh", *entry), folder / "log")
        try:
            self.program.wait_for("ready")
            self.pid = child(self.program.process.pid)
        except BaseException:
            self.program.close()
            raise

    def _as(self, user: str, group: str) -> tuple[str, ...]:
        rights = ("--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs", "--bounding-set=-all")
        return ("setpriv", *rights, "--inh-caps=-all", "env", "-i", *self._image.config["Env"])

    def execute(self, *command: str, user: str, group: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the container."""
        inside = ("nsenter", "-t", f"{self.pid}", "-m", "-p", "-n", "-i", "-u", f"--root=/proc/{self.pid}/root")
        return subprocess.run(
            [*inside, *self._as(user, group), *command], capture_output=True, text=True, timeout=30, check=False
        )
