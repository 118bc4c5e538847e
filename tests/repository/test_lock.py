"""requirements.lock names a version of everything that CI and the container install, and no place to get it from."""

from __future__ import annotations

import re
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.repository import ROOT

LINES = (ROOT / "requirements.lock").read_text().splitlines()
PINNED = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^ ;]+)(?: ; (?P<marker>.+))?$")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("server", "otel-server", "nixl", "test", "dev", "package")


def pins() -> dict[str, list[Version]]:
    found: dict[str, list[Version]] = {}
    for line in LINES:
        pinned = PINNED.match(line)
        assert pinned is not None, line
        found.setdefault(pinned["name"], []).append(Version(pinned["version"]))
    return found


def test_lock_has_only_versions_and_no_urls() -> None:
    assert pins()
    assert not any(re.search(r"https?:|file:|--", line) for line in LINES)


def test_lock_pins_the_packages_of_pyproject_within_their_ranges() -> None:
    """`make lock` mends it."""
    pinned = pins()
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]:
        asked = Requirement(text)
        versions = pinned.get(canonicalize_name(asked.name), [])
        assert versions, f"{asked.name} is not in requirements.lock: make lock"
        assert all(asked.specifier.contains(version) for version in versions), asked


def test_torch_is_not_pinned() -> None:
    """Another build of it has other parts: make setup TORCH=..."""
    assert [name for name in pins() if re.match(r"torch$|nvidia-|cuda-|triton", name)] == []
