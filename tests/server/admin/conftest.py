"""A node server with an admin listener, and an engine with one publication that is leased."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from kvferry._wire.channel import connect
from tests.support.node_servers import Kvferryd
from tests.support.raw_parties import Party


@dataclass(frozen=True)
class Watched:
    """The node server under test, and its addresses."""

    server: Kvferryd
    party: Party

    @property
    def admin(self) -> str:
        return self.server.admin


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    path = tmp_path_factory.mktemp("admin") / "node.sock"
    flags = ["--unix", str(path), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain", "0"]
    # Longer than all tests of a module take.
    flags += ["--ttl", "600", "--max-ttl", "600", "--hold", "1200", "--final", "1200"]
    with ExitStack() as stack:
        server = stack.enter_context(Kvferryd(*flags, "--log-level", "debug"))
        party = Party(stack.enter_context(connect(server.addresses[1])), "engine")
        stack.callback(party.close)
        party.works()
        yield Watched(server, party)
