"""Reads over verbs: every byte, and none beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults.fault_world import World
from tests.support.faults.playing import nothing_left, works


@pytest.mark.timeout(300)
def test_a_read_over_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the environment, which comes before the options: a list of transports cannot be an option.
    monkeypatch.setenv("UCX_TLS", "rc_verbs,ud_verbs")
    world = World(tmp_path).ready()
    try:
        works(world)
        nothing_left(world)
    finally:
        world.close()
