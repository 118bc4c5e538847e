"""The release works in a clean environment, and holds its files and no others."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvferry
from tests.package.conftest import Clean, uv
from tests.support.node_servers import environment
from tests.support.repository import ROOT

NOT_SHIPPED = {".ci/run", ".editorconfig"}
"""Tracked files that only a checkout needs."""
MADE = {"PKG-INFO"}
STRAYS = (
    ".env",
    ".venv/bin/python",
    "client/kvferry/node.key",
    "deploy/fleet-ca.pem",
    "server/kvferry_server/.env",
    "tests/support/nodejs/node_modules/buf/index.js",
)
"""Untracked files that may be in a checkout."""


def run(program: Path, *arguments: str, code: int = 0) -> str:
    """Run a program outside of the checkout, and return its output."""
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=60, cwd="/", env=environment(), check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def in_sdist(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def in_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def build(folder: Path, kind: str, into: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(into), str(folder)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    (made,) = into.iterdir()
    return made


def test_sdist_holds_the_tracked_files(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert in_sdist(sdist) == set(listed.splitlines()) - NOT_SHIPPED | MADE


def test_untracked_files_of_a_checkout_are_not_shipped(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkout,) = tmp_path.iterdir()
    for stray in STRAYS:
        path = checkout / stray
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    assert in_sdist(build(checkout, "sdist", tmp_path / "sdist")) == in_sdist(sdist)
    assert in_wheel(build(checkout, "wheel", tmp_path / "wheel")).keys() == in_wheel(wheel).keys()


def test_wheel_from_the_sdist_is_the_one_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    assert in_wheel(build(ROOT, "wheel", tmp_path / "wheel")) == in_wheel(wheel)


def test_wheel_holds_the_packages_and_their_types(wheel: Path) -> None:
    held = in_wheel(wheel)
    info = f"kvferry-{kvferry.__version__}.dist-info"
    assert {name.partition("/")[0] for name in held} == {"kvferry", "kvferry_server", info}
    assert {"kvferry/py.typed", "kvferry_server/py.typed", "kvferry/v1/kv_transfer_pb2.pyi"} <= held.keys()
    assert held[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_base_install_has_the_client_and_names_missing_packages(clean: Clean) -> None:
    programs = clean("")
    assert "Usage: kvferry" in run(programs / "kvferry", "--help")
    assert run(programs / "python", "-c", "import kvferry; print(kvferry.__version__)") == f"{kvferry.__version__}\n"
    geometry = str(ROOT / "examples" / "geometry" / "llama3-8b-tp2.json")
    assert "descriptors" in run(programs / "kvferry", "plan", "--source", geometry, "--destination", geometry)
    said = run(programs / "kvferryd", "--listen", "127.0.0.1:0", code=1)
    assert said.startswith("kvferryd: ")
    assert said.endswith(" is missing. Install the server with: pip install 'kvferry[server]'\n")


def test_connector_is_found_by_vllm(clean: Clean) -> None:
    program = """
from importlib.metadata import entry_points
(found,) = entry_points(group="vllm.general_plugins")
print(found.name, found.load().__name__)
"""
    assert run(clean("") / "python", "-c", program) == "kvferry register\n"


REGISTER = """
import numpy as np, kvferry
group = kvferry.Group("full", block_tokens=16, num_blocks=4)
with kvferry.serve() as server, kvferry.Client(server.address) as client:
    spec = kvferry.EngineSpec("engine", (group,))
    try:
        tensors = {"layer": np.zeros((2, 4, 1, 16, 8), np.uint8)}
        client.register_cache(spec, tensors=tensors, axes=("kv", "block", "head", "token", "content"))
    except kvferry.errors.KvferryError as error:
        print(error)
"""


def test_server_runs_without_nixl_and_ranks_report_it_missing(clean: Clean) -> None:
    programs = clean("[server]")
    assert run(programs / "kvferryd", "--version") == f"kvferryd {kvferry.__version__}\n"
    assert "pip install 'kvferry[nixl]'" in run(programs / "python", "-c", REGISTER)


def test_extra_for_ranks_can_be_installed(wheel: Path, clean: Clean) -> None:
    """Found by the resolver, and not downloaded: torch and NIXL are gigabytes."""
    found = uv(*("pip", "install", "--dry-run", "--python", str(clean("[server]").parent), f"{wheel}[nixl,server]"))
    assert " + nixl==1." in found
    assert " + torch==2." in found


def test_installed_wheel_moves_bytes(clean: Clean) -> None:
    """NIXL is that of .venv: the test is about kvferry's part."""
    programs = clean("[server]")
    (nixl,) = (ROOT / ".venv" / "lib").glob("python3.*/site-packages")
    (site,) = (programs.parent / "lib").glob("python3.*/site-packages")
    borrowed = f"import sys, kvferry; sys.path.append({str(nixl)!r}); assert kvferry.__file__.startswith({str(site)!r})"
    example = (ROOT / "examples" / "one_process.py").read_text()
    assert "request-1 was released: READ" in run(programs / "python", "-c", f"{borrowed}\n{example}")


def test_list_of_parts_matches_an_environment_by_the_lock(wheel: Path, tmp_path: Path) -> None:
    """The versions of the lock, not the newest: the list describes the release."""
    uv("venv", "--python", sys.executable, str(tmp_path))
    uv("pip", "install", "--python", str(tmp_path), "-c", str(ROOT / "requirements.lock"), f"{wheel}[server]")
    parts = json.loads((ROOT / "dist" / "sbom.cdx.json").read_text())
    listed = {(part["name"].lower(), part["version"]) for part in parts["components"]}
    frozen = uv("pip", "freeze", "--python", str(tmp_path)).splitlines()
    installed = {(name.lower(), version) for name, _, version in (line.partition("==") for line in frozen) if version}
    assert {(name.replace("_", "-"), version) for name, version in listed} == {
        (name.replace("_", "-"), version) for name, version in installed
    }
    assert parts["metadata"]["component"]["name"] == "kvferry"
    assert str(ROOT) not in json.dumps(parts)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_version_matches_the_code(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    assert path.name.startswith(f"kvferry-{kvferry.__version__}")
