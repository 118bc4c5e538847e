"""Where the repository is."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "geometry"
"""Geometry files."""


@cache
def syntax(path: Path) -> ast.Module:
    """The syntax tree of a Python file; do not change it."""
    text = path.read_text()
    while True:
        try:
            return ast.parse(text)
        except SystemError:
            # "AST constructor recursion depth mismatch": another thread of this process made a tree at the same time
            # (python/cpython#106905).
            continue
