"""What a machine is booted from: Debian's kernel, an initrd, and packages that only the machine has."""

from __future__ import annotations

import gzip
import hashlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

FOLDER = ROOT / "build" / "rdma"
KERNEL = "linux-image-amd64"
"""Depends on the newest kernel."""
TOOLS = ("busybox-static", "iproute2", "libbpf1", "libcap2", "libelf1", "libmnl0")
"""`ip`, `rdma` and `tc` are of iproute2, which needs the libraries."""
VERBS = ("ibverbs-providers", "libibverbs1")
VERBS_LIBRARY = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
VERBS_OF_WHEELS = "/opt/nixl"
"""Where the machine has the libraries that links replace, each in a folder by the name of its wheel's."""
PACKAGES = (*TOOLS, *VERBS)
MODULES = ("virtio_pci", "virtio_net", "9p", "9pnet_virtio", "overlay", "crc32_generic", "rdma_rxe", "ib_uverbs")
MORE_MODULES = ("rdma_ucm", "sch_netem", "veth")
EMULATOR = "qemu-system-x86_64"
HERE = Path(__file__).parent


class NoMachine(Exception):
    """No machine can be made on this host; says why."""


@dataclass(frozen=True)
class Image:
    """What qemu is given.

    Attributes:
        kernel, initrd: files.
        layer: a folder whose files lie above this host's in the machine.
    """

    kernel: Path
    initrd: Path
    layer: Path


def image() -> Image:
    """The image, made where it is not there yet; raises `NoMachine`."""
    if platform.machine() != "x86_64":
        raise NoMachine(f"only x86_64 is emulated, and this host is {platform.machine()}")
    for program in (EMULATOR, "apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise NoMachine(f"{program} is not installed (on Debian: apt-get install qemu-system-x86)")
    kernels = re.findall(r"Depends: (linux-image-\S+)", _run(["apt-cache", "depends", KERNEL]))
    if not kernels:
        raise NoMachine(f"apt knows no {KERNEL}: run apt-get update")
    sources = b"".join(file.read_bytes() for file in (Path(__file__), HERE / "init.sh"))
    name = hashlib.sha256(sources + " ".join((*kernels, *PACKAGES, sys.prefix)).encode()).hexdigest()[:16]
    folder = FOLDER / name
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _make(folder, (kernels[0], *PACKAGES))
        (folder / "made").touch()
    kernel = next((folder / "layer" / "boot").glob("vmlinuz-*"))
    return Image(kernel, folder / "initrd", folder / "layer")


def _make(folder: Path, packages: Sequence[str]) -> None:
    downloaded = folder / "packages"
    downloaded.mkdir(parents=True)
    _run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *packages], downloaded)
    unpacked, layer = folder / "unpacked", folder / "layer"
    for package in sorted(downloaded.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(unpacked)])
    # This host's /bin, /lib and /sbin are links, which a folder of the same name would hide.
    for part in unpacked.iterdir():
        place = layer / "usr" / part.name if part.name in ("bin", "lib", "lib64", "sbin") else layer / part.name
        shutil.copytree(part, place, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(unpacked)
    shutil.rmtree(downloaded)
    _use_verbs_of_distribution(layer)
    _write_initrd(folder, layer)


def _use_verbs_of_distribution(layer: Path) -> None:
    """Put the distribution's libibverbs in the place of that of NIXL's wheel, which knows cards of NVIDIA alone.

    By a link: a copy would be loaded beside it, and the providers would make themselves known
    to the one that UCX does not ask.
    """
    for theirs in Path(sys.prefix).glob("lib/python*/site-packages/nixl*.libs/libibverbs-*.so*"):
        place = layer / theirs.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(VERBS_LIBRARY)
        kept = layer / VERBS_OF_WHEELS.lstrip("/") / theirs.parent.name / theirs.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(theirs, kept)


def _write_initrd(folder: Path, layer: Path) -> None:
    modules = next((layer / "usr/lib/modules").iterdir())
    busybox = layer / "usr/bin/busybox"
    _run([str(busybox), "depmod", "-b", str(layer / "usr"), modules.name])
    root = folder / "root"
    for name in ("bin", "dev", "host", "layer", "memory", "modules", "proc", "root", "sys"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin")
    (root / "bin" / "sh").symlink_to("busybox")
    for number, module in enumerate(_in_order(modules)):
        shutil.copy(module, root / "modules" / f"{number:02}-{module.name}")
    shutil.copy(HERE / "init.sh", root / "init")
    (root / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    archive = subprocess.run(
        [str(busybox), "cpio", "-o", "-H", "newc"], cwd=root, input=names.encode(), capture_output=True, check=True
    ).stdout
    (folder / "initrd").write_bytes(gzip.compress(archive, 1))
    shutil.rmtree(root)
    shutil.rmtree(modules)


def _in_order(modules: Path) -> list[Path]:
    """The files of the modules that a machine loads, each after those that it needs."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        file, _, others = line.partition(":")
        needs[_stem(file)] = [file, *others.split()]
    found: dict[str, None] = {}

    def add(name: str) -> Iterator[str]:
        for other in needs[name][1:]:
            yield from add(_stem(other))
        yield needs[name][0]

    for name in (*MODULES, *MORE_MODULES):
        found.update(dict.fromkeys(add(name)))
    return [modules / file for file in found]


def _stem(file: str) -> str:
    return Path(file).name.split(".")[0].replace("-", "_")


def _run(command: Sequence[str], folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoMachine(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
