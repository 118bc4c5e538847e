"""After many requests, some of which ended badly, everybody holds what they held before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry import NixlOptions
from tests.support.faults.fault_world import World
from tests.support.faults.load import AT_ONCE, serve_mixed
from tests.support.faults.playing import nothing_left
from tests.support.faults.processes import SOON
from tests.support.faults.reports import Held
from tests.support.waiting import until

REQUESTS = int(os.environ.get("KVFERRY_LEAK_REQUESTS", "3000"))
"""`make soak` asks for 10,000."""
CHANCE = 10
"""Threads, files, or objects of one type that may come and go while nothing is asked. Of a leak there would be one for
each request, or for each tenth."""
GROWTH = 24 << 20
"""Bytes by which a process may grow: allocators keep some of what was freed. 1,000 requests that leaked 32 KiB each
would be found, 3,000 that leaked 9, and 10,000 that leaked 3."""


# 10,000 requests take a minute and a half on two idle cores.
@pytest.mark.timeout(400)
def test_nothing_is_left_of_many_requests(tmp_path: Path) -> None:
    options = NixlOptions()
    world = World(
        tmp_path, chunk_descriptors=options.chunk_descriptors, bytes_in_flight=options.bytes_in_flight
    ).ready()
    try:
        serve_mixed(world, 10 * AT_ONCE)
        before = _held(world)
        serve_mixed(world, REQUESTS)
        nothing_left(world)
        # What a deadline still refers to goes when that is due: leases, holds.
        until(lambda: not _more(before, _held(world)), SOON)
        for name, held in _held(world).items():
            assert held.resident - before[name].resident < GROWTH, name
    finally:
        world.close()


def _held(world: World) -> dict[str, Held]:
    return {
        "source": world.source.scheduler.call("held"),
        "source's rank": world.source.second.call("held"),
        "destination": world.reader.process.call("held"),
        "source's node server": world.home.held(),
        "destination's node server": world.node.held(),
    }


def _more(before: dict[str, Held], after: dict[str, Held]) -> list[str]:
    """What there is more of than before, by more than chance."""
    return [
        f"{name}: {kind}"
        for name, held in after.items()
        for kind, count in {"threads": held.threads, "files": held.files, **held.objects}.items()
        if count
        > {"threads": before[name].threads, "files": before[name].files, **before[name].objects}.get(kind, 0) + CHANCE
    ]
