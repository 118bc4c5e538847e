"""docs/architecture.md shows the house as it is."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = (ROOT / "client" / "kvferry", ROOT / "server" / "kvferry_server")


def test_the_picture_is_drawn_from_the_imports() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "draw_house.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_names_on_the_page_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_]+)`", PAGE)) - {"client/kvferry", "server/kvferry_server"}
    assert len(named) > 20
    missing = [name for name in named if not any((package / f"{name}.py").is_file() for package in PACKAGES)]
    assert missing == []


def test_page_names_every_folder() -> None:
    for package in PACKAGES:
        for path in package.iterdir():
            if path.is_dir() and path.name not in ("v1", "__pycache__"):
                assert f"`{path.name}`" in PAGE, path
