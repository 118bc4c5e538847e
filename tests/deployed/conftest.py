"""The image and the booted system that these tests look at: each is made once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry
from tests.deployed import debian
from tests.deployed.container import Image, build
from tests.deployed.system import System
from tests.support.repository import ROOT

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("KVFERRY_DEPLOYED"):
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip("images and systems are made by make test-deployed"))


@pytest.fixture(scope="session")
def folder() -> Path:
    """Debian."""
    if reason := debian.missing():
        pytest.skip(reason)
    return debian.debian()


@pytest.fixture(scope="session")
def wheels(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `make package`, and those of what it needs by the lock."""
    found = tmp_path_factory.mktemp("wheels")
    wheel = ROOT / "dist" / f"kvferry-{kvferry.__version__}-py3-none-any.whl"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download")
    debian.run(*pip, "-d", found, "-c", ROOT / "requirements.lock", f"{wheel}[server]", timeout=300)
    return found


@pytest.fixture(scope="session")
def image(folder: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image, unpacked."""
    image = build(folder, wheels, tmp_path_factory.mktemp("buildah"))
    yield image
    image.close()


@pytest.fixture
def system(folder: Path, image: Image, tmp_path: Path) -> Iterator[System]:
    """A system with systemd that has the unit and what the image has in /opt/kvferry."""
    root = tmp_path / "root"
    debian.run("cp", "-a", folder, root)
    shutil.copytree(image.root / "opt/kvferry", root / "opt/kvferry", symlinks=True)
    system = System(root)
    yield system
    system.close()
