"""How a client reaches node servers and other ranks' memory: by gRPC and NIXL, unless its address is that of a
`kvferry.testing.Fabric` of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry._transport.agents import NIXL, Agents
from kvferry._wire.channel import Dial, connect
from kvferry.errors import InvalidField
from kvferry.planner.path_choice import Costs

FABRICS = ".fabric.kvferry.invalid:7423"
"""What addresses of fabrics end in. No name below ``.invalid`` ever resolves (RFC 6761)."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """What one client talks over.

    Attributes:
        dial: makes a channel to a node server.
        agents: makes the agents of its caches.
        costs: what reads cost, where nothing is to be gained from measuring it; None: measured.
    """

    dial: Dial = connect
    agents: Agents = NIXL
    costs: Costs | None = None


_fabrics: dict[str, Callable[[], Network]] = {}


def network_of(address: str) -> Network:
    """The network of a new client of the node server at this address.

    Raises:
        InvalidField: it is the address of a fabric that is not open in this process.
    """
    make = _fabrics.get(address)
    if make is None and address.endswith(FABRICS):
        raise InvalidField("address", address, "the address of a Fabric that is open in this process")
    return Network() if make is None else make()


def add_fabric(address: str, make: Callable[[], Network]) -> None:
    """From now on clients with this address get their network from `make`."""
    _fabrics[address] = make


def remove_fabric(address: str) -> None:
    """There is no such fabric any more. Idempotent."""
    _fabrics.pop(address, None)
