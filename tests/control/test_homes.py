"""The connections that a client keeps to homes."""

from __future__ import annotations

import gc
import weakref

from kvferry._control.homes import MOST, Homes
from kvferry._loop import Loop


def test_connections_of_a_client_are_bounded_whatever_references_name() -> None:
    """Clients of an engine choose the homes in references, and the host has as many addresses of loopback as one
    likes."""
    homes = Homes("127.0.0.1:1", Loop(), None, ())
    homes.known_as("node.example:1")
    used = homes.get("127.0.0.2:1")
    made = [weakref.ref(homes.get(f"127.1.{index // 250}.{index % 250 + 1}:1")) for index in range(2 * MOST)]
    gc.collect()
    assert sum(each() is not None for each in made) <= MOST
    # What a read uses goes on, and its own node server is never forgotten.
    assert not used._closed
    assert homes.get("127.0.0.1:1") is homes.get("node.example:1") is homes.own
    homes.close()
    assert used._closed


def test_the_calls_of_a_home_that_is_not_kept_stay_counted() -> None:
    homes = Homes("127.0.0.1:1", Loop(), None, ())
    homes.get("127.0.0.2:1")._calls = 7
    for index in range(MOST):
        homes.get(f"127.1.{index // 250}.{index % 250 + 1}:1")
    assert homes.stats().calls == 7
    homes.close()
