"""All node servers of a fleet are restarted in turn, under load: no read fails and no byte is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.continuous_engine import AT_ONCE, ContinuousEngine
from tests.support.identifiers import unique_id
from tests.support.loaded_processes import LOADED
from tests.support.node_servers import Kvferryd, free_port

pytestmark = pytest.mark.slow

NODES = 3
TIMES = ("--ttl", "4", "--max-ttl", "4")
"""Shorter than the defaults: what a restarted home was told again it releases after max_ttl."""
MORE = 10
"""Reads of an engine that show that it goes on: more than were under way or handed on."""


class Node:
    """kvferryd as a node runs it: a UNIX socket for its engines, TCP for others. Can be started again at its place."""

    def __init__(self, folder: Path) -> None:
        self._flags = ("--unix", str(folder / "node.sock"), "--listen", f"127.0.0.1:{free_port()}", *TIMES)
        folder.mkdir()
        self.server = Kvferryd(*self._flags)

    def stop(self) -> None:
        """As systemd and Kubernetes stop it."""
        self.server.signal()
        assert self.server.wait() == 0, self.server.log

    def start(self) -> None:
        self.server.end()
        self.server = Kvferryd(*self._flags)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    made: list[Node] = []
    try:
        made += (Node(tmp_path / f"node-{index}") for index in range(NODES))
        yield made
    finally:
        for node in made:
            node.server.end()


@pytest.fixture
def engines(nodes: list[Node]) -> Iterator[list[ContinuousEngine]]:
    """One engine on each node; each engine reads the publications of the previous one."""
    queues: list[Any] = [LOADED.Queue(AT_ONCE) for _ in nodes]
    made = [
        ContinuousEngine(node.server.address, unique_id("engine"), queues[index], queues[(index + 1) % NODES])
        for index, node in enumerate(nodes)
    ]
    yield made
    for engine in made:
        engine.close()


def go_on(engines: list[ContinuousEngine]) -> None:
    """Wait until each of them has read more."""
    for engine in engines:
        report = engine.reads_more(MORE)
        assert report.failures == []


def test_reads_survive_a_restart_of_all_node_servers_in_turn(
    nodes: list[Node], engines: list[ContinuousEngine]
) -> None:
    go_on(engines)
    for index, node in enumerate(nodes):
        epoch = node.server.epoch
        node.stop()
        # Publications of this node's engine wait for the node server. All other requests are read, also by that engine.
        waiting = engines[(index + 1) % NODES]
        go_on([engine for engine in engines if engine is not waiting])
        node.start()
        assert node.server.epoch != epoch
        go_on(engines)
    for engine in engines:
        report = engine.stop_publishing()
        assert report.failures == []
        assert report.wrong == 0
        # Also what was read during a drain: its source hears of it before its home ends.
        assert report.released == {"READ": report.published}
