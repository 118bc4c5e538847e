"""`kvferry version`."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated

import typer

from kvferry import __version__

SHOWN = ("grpcio", "protobuf", "nixl", "torch")
"""Packages whose versions a bug report needs."""


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: versions by package, null if missing.")] = False,
) -> None:
    """Show the versions of kvferry and of the packages it uses."""
    found: dict[str, str | None] = {"kvferry": __version__, "python": platform.python_version()}
    for package in SHOWN:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, number in found.items():
        print(f"{name:<10} {number or 'not installed'}")
