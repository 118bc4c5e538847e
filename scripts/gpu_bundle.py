#!/usr/bin/env python3
"""Pack what a machine with a GPU, Python and torch needs to run `make test-gpu`, where it can reach nothing else.

python scripts/gpu_bundle.py [--python 3.12] [--cuda cu12,cu13] [--packages numpy] [--output FILE] [--limit-mib 64]

The archive holds kvferry, tests/gpu with what these tests import, and wheels. numpy and torch are the machine's own.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "gpu-bundle"
FOLDER = "kvferry-gpu"
"""What the archive unpacks to."""

SEEDS = ("kvferry[server]", "nixl", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
"""What the tests need; `distributions` adds what these need in turn. The last two read pyproject.toml's settings."""
OWN = {"kvferry"}
"""Packed as source."""
OF_THE_MACHINE = {"numpy", "torch"}
"""Not packed unless asked for: torch is large, and numpy comes with nearly every torch."""
FLAVOURS = ("cu12", "cu13")
"""NIXL's builds; `nixl` loads the one that fits torch's CUDA."""

SOURCES = ("client/kvferry", "server/kvferry_server", "tests/gpu", "tests/support")
FILES = ("LICENSE", "pyproject.toml", "tests/__init__.py", "tests/conftest.py")
SUFFIXES = {".py", ".pyi", ".md", ".toml", ".typed", ""}

PLATFORMS = ("2_28_x86_64", "2_27_x86_64", "2_24_x86_64", "2_17_x86_64", "2014_x86_64", "2_5_x86_64", "1_x86_64")
"""glibc of manylinux wheels; pip takes each name literally, not as a least version."""

DOWNLOAD = ("-m", "pip", "--disable-pip-version-check", "-qqq", "download", "--no-deps", "--only-binary=:all:")

UNUSED = re.compile(
    # NIXL's library for mixtures of experts, by far the largest part; programs; UCX's benchmark.
    r"nixl_ep_cu\d+/|nixl_cu\d+\.scripts/|nixl_cu\d+-[^/]+\.data/|nixl_cu\d+\.libs/ucx/libucx_perftest|"
    # Backends other than UCX, which read from files and object stores, and the libraries that only they load.
    r"(nixl_cu\d+\.libs/nixl|\.nixl_cu\d+\.mesonpy\.libs/plugins)/(?!libplugin_UCX\.)|"
    r"nixl_cu\d+\.libs/lib(aws|azure|s2n|gusli|xml2|curl|core|pull)[-_]"
)
"""Files of NIXL's wheels that kvferry never loads."""

RUN = """#!/usr/bin/env bash
# Installs the wheels beside it into a temporary folder, runs the tests and the measures on the GPU, and prints a
# report. It changes nothing on the machine. Arguments go to python -m tests.gpu: --device cpu, --report FILE, or
# pytest's. PYTHON names another Python than python3; it needs torch and numpy.
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
python=${{PYTHON:-python3}}
unset PYTHONHOME PYTHONPATH
"$python" - <<'CHECK'
import sys
if "%d.%d" % sys.version_info[:2] != "{python}":
    sys.exit("this bundle is for Python {python}, and %s is %d.%d: make gpu-bundle GPU_PYTHON=%d.%d"
             % (sys.executable, *sys.version_info[:2], *sys.version_info[:2]))
for name in ("torch", {needs_numpy}):
    try:
        __import__(name)
    except ImportError as error:
        sys.exit("%s has no %s (%s)" % (sys.executable, name, error))
CHECK
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --no-cache-dir \\
        --target "$site" wheels/*.whl
else
    # A wheel is an archive of what lies in site-packages.
    for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
fi
status=0
PYTHONPATH="$PWD/client:$PWD/server:$PWD:$site" "$python" -m tests.gpu --device cuda "$@" || status=$?
exit $status
"""


class TooLarge(Exception):
    """The archive is over its limit."""


def distributions(seeds: Iterable[str], python: str, left_out: set[str]) -> dict[str, str]:
    """Distributions that the seeds need on a version of Python, themselves included, with the versions installed here;
    empty for one that only the other Python needs."""
    found: dict[str, str] = {}
    pending = [Requirement(seed) for seed in seeds]
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        if name not in left_out | OWN:
            found[name] = _version(name)
        for line in _requires(name):
            need = Requirement(line)
            known = canonicalize_name(need.name) in found or canonicalize_name(need.name) in left_out
            applies = need.marker is None or any(
                need.marker.evaluate({**environment, "extra": extra}) for extra in ("", *wanted.extras)
            )
            if applies and not known:
                pending.append(need)
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def wanted(python: str, cuda: Iterable[str], packages: Iterable[str]) -> dict[str, str]:
    """The wheels of a bundle: name and version."""
    builds = {f"nixl-{flavour}" for flavour in FLAVOURS}
    chosen = {f"nixl-{flavour}" for flavour in cuda}
    left_out = (builds - chosen) | (OF_THE_MACHINE - set(packages))
    return dict(sorted(distributions([*SEEDS, *chosen, *packages], python, left_out).items()))


def download(wheels: dict[str, str], python: str) -> list[Path]:
    """Get the wheels of CPython on Linux x86-64; those that are here already are not fetched again."""
    folder = BUILD / f"wheels-{python}"
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [part for name in PLATFORMS for part in ("--platform", f"manylinux{_joined(name)}")]
    found = []
    for name, release in wheels.items():
        pattern = f"{name.replace('-', '[-_.]')}-{release or '*'}-*.whl"
        if not list(_matching(folder, pattern)):
            pinned = f"=={release}" if release else ""
            subprocess.run(
                [sys.executable, *DOWNLOAD, "--python-version", python, *platforms, "-d", folder, name + pinned],
                check=True,
            )
        found.append(next(_matching(folder, pattern)))
    return found


def _joined(name: str) -> str:
    return f"_{name}" if name.startswith("2_") else name


def _matching(folder: Path, pattern: str) -> Iterator[Path]:
    # Some wheels are called by the name as written (uvloop), some in another case (SQLAlchemy).
    return iter(
        path for path in sorted(folder.iterdir()) if path.match(pattern) or Path(path.name.lower()).match(pattern)
    )


def trimmed(wheel: Path, folder: Path) -> Path:
    """A copy of a wheel without what kvferry never loads; other wheels than NIXL's are only copied."""
    copy = folder / wheel.name
    with zipfile.ZipFile(wheel) as whole:
        if not any(UNUSED.match(name) for name in whole.namelist()):
            shutil.copyfile(wheel, copy)
            return copy
        with zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as kept:
            for entry in whole.infolist():
                if UNUSED.match(entry.filename):
                    continue
                content = whole.read(entry)
                if entry.filename.endswith(".dist-info/RECORD"):
                    lines = content.decode().splitlines(keepends=True)
                    content = "".join(line for line in lines if not UNUSED.match(line)).encode()
                kept.writestr(entry, content)
    return copy


def sources() -> list[Path]:
    """The files of the repository that are packed."""
    found = [ROOT / name for name in FILES]
    for folder in SOURCES:
        found += [
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.is_file() and path.suffix in SUFFIXES and not {"__pycache__", "nodejs"} & set(path.parts)
        ]
    return found


def pack(output: Path, wheels: list[Path], python: str, packages: list[str]) -> list[tuple[str, int]]:
    """Write the archive; its parts and their bytes."""
    sizes = {"run.sh": 0, **dict.fromkeys(SOURCES, 0)}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(output, "w:gz") as archive:
        needs_numpy = '"numpy",' if "numpy" not in packages else ""
        script = RUN.format(python=python, needs_numpy=needs_numpy).encode()
        entry = tarfile.TarInfo(f"{FOLDER}/run.sh")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script))
        sizes["run.sh"] = len(script)
        for path in sources():
            name = path.relative_to(ROOT).as_posix()
            archive.add(path, f"{FOLDER}/{name}", filter=_anonymous)
            part = next((folder for folder in SOURCES if name.startswith(f"{folder}/")), name)
            sizes[part] = sizes.get(part, 0) + path.stat().st_size
        for wheel in wheels:
            archive.add(wheel, f"{FOLDER}/wheels/{wheel.name}", filter=_anonymous)
            sizes[wheel.name] = wheel.stat().st_size
    return sorted(sizes.items(), key=lambda part: -part[1])


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def bundle(output: Path, python: str, cuda: list[str], packages: list[str], limit: int) -> None:
    """Make the archive, and print the size of each part.

    Raises:
        TooLarge: it has more than `limit` bytes; it is removed.
    """
    folder = BUILD / "trimmed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheels = [trimmed(wheel, folder) for wheel in download(wanted(python, cuda, packages), python)]
    parts = pack(output, wheels, python, packages)
    size = output.stat().st_size
    for name, taken in parts:
        print(f"{taken / 2**20:8.2f} MiB  {name}")
    print(f"{size / 2**20:8.2f} MiB  {output} (compressed; at most {limit / 2**20:g})")
    if size > limit:
        output.unlink()
        raise TooLarge(f"{size:,} bytes are more than {limit:,}: leave out a flavour of CUDA or a package")


def main() -> int:
    """Read the command line; the exit code."""
    parser = argparse.ArgumentParser(description="Pack the tests of GPUs for a machine that can reach nothing.")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--cuda", default=",".join(FLAVOURS), help="NIXL's builds: cu12, cu13 or both")
    parser.add_argument("--packages", default="", help="more packages, separated by commas: numpy, if torch came alone")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / f"{FOLDER}.tar.gz", help="the archive")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="the most that it may take")
    options = parser.parse_args()
    cuda = [flavour for flavour in options.cuda.split(",") if flavour]
    unknown = sorted(set(cuda) - set(FLAVOURS))
    if unknown or not cuda:
        parser.error(f"--cuda {options.cuda}: one of {', '.join(FLAVOURS)}, or both")
    packages = [name for name in options.packages.split(",") if name]
    try:
        bundle(options.output, options.python, cuda, packages, int(options.limit_mib * 2**20))
    except TooLarge as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
