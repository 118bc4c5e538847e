"""Chooses the network of a client: gRPC and NIXL, or a `kvferry.testing.Fabric` of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry._clock import now
from kvferry._loop import Loop
from kvferry._wire.channel import Dial, connect
from kvferry.errors import InvalidField
from kvferry.planner.path_choice import Costs

FABRICS = ".fabric.kvferry.invalid:7423"
"""Suffix of the addresses of fabrics. No name below ``.invalid`` ever resolves (RFC 6761)."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """The connections and agents of one client.

    Attributes:
        dial: makes a channel to a node server.
        binding: called in place of NIXL's own by the agents of the client's caches; None: NIXL.
        costs: fixed costs of reads; None: costs are measured.
        clock: the time of all deadlines, in seconds.
        looping: called with the client's event loop.
    """

    dial: Dial = connect
    binding: Any = None
    costs: Costs | None = None
    clock: Callable[[], float] = now
    looping: Callable[[Loop], object] | None = None


fabrics: dict[str, Callable[[], Network]] = {}
"""What makes the network of each client of a fabric, by address; `kvferry.testing.Fabric` adds and removes itself."""


def network_of(address: str) -> Network:
    """Return the network for a new client of the node server at this address; raises `InvalidField` for a fabric that
    is not open in this process."""
    make = fabrics.get(address)
    if make is None and address.endswith(FABRICS):
        raise InvalidField("address", address, "the address of a Fabric that is open in this process")
    return Network() if make is None else make()
