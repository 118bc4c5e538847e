"""R13: sequences of valid calls by a hostile peer, beside a source and a destination at the same home."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.peer import HostilePeer
from tests.fuzz.victims import Victims
from tests.support.node_servers import NodeServerProcess

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "5"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
CALLS = 120
"""Calls of the hostile peer in each round."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[NodeServerProcess]:
    # After a restart, nothing is released for a max_ttl.
    with NodeServerProcess(tmp_path, tcp=True, drain=0, ttl=3, max_ttl=3) as running:
        yield running


def test_peer_that_sends_anything_harms_no_other(home: NodeServerProcess) -> None:
    victims, peer = Victims(home.address), HostilePeer(home.address, random.Random(SEED))
    try:
        for _ in range(ROUNDS):
            victims.begin()
            peer.act(CALLS)
            victims.finish()
        assert not peer.known.holds(victims.secrets())
        # The peer's own engines have no agent.
        assert not peer.known.named["metadata"].all(of=lambda value: isinstance(value, bytes))
    finally:
        peer.close()
        victims.close()


def test_peer_that_comes_first_after_a_restart_takes_no_other_identity(home: NodeServerProcess) -> None:
    victims, peer = Victims(home.address), HostilePeer(home.address, random.Random(SEED))
    try:
        for _ in range(max(1, ROUNDS // 5)):
            victims.begin()
            peer.act(CALLS)
            home.stop()
            peer.rush()
            home.start()
            peer.act(CALLS)
            victims.finish(restarted=True)
            peer.rest()
            victims.begin()
            victims.finish()
    finally:
        peer.close()
        victims.close()
