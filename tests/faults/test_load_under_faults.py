"""Requests go on arriving while processes are killed, stopped and restarted, one fault after another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvferry import NixlOptions
from tests.support import etcd
from tests.support.faults.fault_world import World
from tests.support.faults.interruptions import Storm

pytestmark = pytest.mark.slow

FAULTS = 3
LASTS = (0.5, 4.0)
"""Seconds: less than a lease and the engine ttl there, and more."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["plain", "relayed", "listed"])
def test_requests_under_faults_end_with_right_bytes_or_a_typed_error(tmp_path: Path, kind: str) -> None:
    """`make soak` plays hundreds, and longer ones."""
    url, members = etcd.cluster(tmp_path / "etcd") if kind == "listed" else ("", [])
    fence = NixlOptions().fence_time
    world = World(tmp_path / "world", relayed=kind == "relayed", directory=url, reading_agents=2, fence_time=fence)
    try:
        storm = Storm(world.ready(), random.Random(kind), FAULTS, LASTS, members)
        for _ in storm.play():
            pass
    finally:
        world.close()
        for member in members:
            member.stop()
    assert len(storm.recovered) == FAULTS
    assert storm.traffic.outcomes["right bytes"] > 0
