"""These tests need dist and the tools that made it: `make package`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.repository import ROOT

collect_ignore_glob = [] if find_spec("uv") and find_spec("build") else ["test_*.py"]

Clean = Callable[[str], Path]


def pytest_report_header(config: pytest.Config) -> str:
    """Explain why nothing is collected."""
    return "tests/package: left out, the tools are not installed here (make package)" if collect_ignore_glob else ""


def only(pattern: str) -> Path:
    """The only file in dist that matches."""
    (found,) = (ROOT / "dist").glob(pattern)
    return found


@pytest.fixture(scope="session")
def wheel() -> Path:
    return only("kvferry-*.whl")


@pytest.fixture(scope="session")
def sdist() -> Path:
    return only("kvferry-*.tar.gz")


@pytest.fixture(scope="session")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The programs of a clean environment with the wheel and these extras; the same environment for the same extras."""
    made: dict[str, Path] = {}

    def make(extras: str) -> Path:
        if extras not in made:
            folder = made[extras] = tmp_path_factory.mktemp("clean")
            uv("venv", "--python", sys.executable, "--clear", str(folder))
            uv("pip", "install", "--python", str(folder), f"{wheel}{extras}")
        return made[extras] / "bin"

    return make


def uv(*arguments: str) -> str:
    """Run uv, and return its output."""
    command = [sys.executable, "-m", "uv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
