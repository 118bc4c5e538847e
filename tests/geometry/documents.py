"""Geometry files that tests begin with."""

from __future__ import annotations

import copy
import json
from typing import Any

from tests.support.repository import EXAMPLES

FILES = sorted(EXAMPLES.glob("*.json"))
LLAMA: dict[str, Any] = json.loads((EXAMPLES / "llama3-8b-tp4.json").read_text())
MAMBA: dict[str, Any] = json.loads((EXAMPLES / "mamba-hybrid-tp2.json").read_text())


def document(**changes: Any) -> dict[str, Any]:
    """Llama-3-8B's file with some fields changed; None leaves one out."""
    changed = {**copy.deepcopy(LLAMA), **changes}
    return {name: value for name, value in changed.items() if value is not None}


def small(**changes: Any) -> dict[str, Any]:
    """A file whose planes a test can visit byte by byte."""
    model = {"layers": 2, "kv_heads": 4, "head_dim": 3, "dtype": "float16", "attention": "gqa"}
    base = {"engine_id": "small", "tp_size": 2, "block_size": 4, "num_blocks": 3, "model": model}
    return {**base, **changes}
