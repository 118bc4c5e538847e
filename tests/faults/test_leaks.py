"""After many requests, some of which ended badly, everybody holds what they held before."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from kvferry import NixlOptions
from kvferry._clock import now
from kvferry_server.domain.journal import LAST_READS
from kvferry_server.domain.times import Times
from tests.support.faults.fault_world import World
from tests.support.faults.load import serve_mixed
from tests.support.faults.playing import nothing_left
from tests.support.faults.processes import SOON
from tests.support.faults.reports import Held

pytestmark = pytest.mark.slow

WARM_UP = 2 * LAST_READS
"""Requests before the first look. A home keeps its last reads on purpose, so many and no more; it has them all by then,
as seven or eight of ten requests are read."""
REQUESTS = int(os.environ.get("KVFERRY_LEAK_REQUESTS", "1000"))
"""`make soak` asks for 10,000."""
CHANCE = 10
"""Threads, files, or objects of one type that may come and go while nothing is asked. Of a leak there would be one for
each request, or for each tenth."""
TIMES = Times(ttl=10.0, max_ttl=10.0, engine_ttl=10.0, hold=10.0, final=20.0, max_wait=20.0)
"""Longer than ten requests at once take on a busy machine, and short enough that what they hold ends within `SOON`."""
GROWTH = 24 << 20
"""Bytes by which a process may grow: allocators keep some of what was freed. 1,000 requests that leaked 32 KiB each
would be found, and 10,000 that leaked 3."""


# 10,000 requests take a minute and a half on two idle cores.
@pytest.mark.timeout(400)
def test_requests_in_large_numbers_leave_nothing(tmp_path: Path) -> None:
    options = NixlOptions()
    world = World(
        tmp_path, times=TIMES, chunk_descriptors=options.chunk_descriptors, bytes_in_flight=options.bytes_in_flight
    ).ready()
    try:
        serve_mixed(world, WARM_UP)
        before = _held(world)
        serve_mixed(world, REQUESTS)
        nothing_left(world)
        # What a deadline still refers to goes when that is due: leases, holds.
        end = now() + SOON
        while more := _more(before, _held(world)):
            assert now() < end, f"left after {REQUESTS} requests: {'; '.join(more)}"
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
        f"{name}: {kind}: {count}, {counts[kind]} before"
        for name, held in after.items()
        for counts in [_counts(before[name])]
        for kind, count in _counts(held).items()
        if count > counts[kind] + CHANCE
    ]


def _counts(held: Held) -> Counter[str]:
    return Counter({"threads": held.threads, "files": held.files, **held.objects})
