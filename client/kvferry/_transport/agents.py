"""Makes the agents of a rank: the seam between the transport and the binding that moves the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._transport.nixl_agent import ReadingAgent, ServingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry.geometry.model import MemoryRegion


@dataclass(frozen=True, slots=True)
class Agents:
    """Makes agents. `binding` is called in place of NIXL's own, e.g. memory of this process in `kvferry.testing`; None:
    NIXL, loaded with the first agent."""

    binding: Any = None

    def serving(self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions) -> ServingAgent:
        """An agent that makes memory readable. Raises the errors of `ServingAgent`."""
        return ServingAgent(name, regions, options, self.binding)

    def reading(self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions) -> ReadingAgent:
        """An agent that reads into memory, owned by the calling thread. Raises the errors of `ReadingAgent`."""
        return ReadingAgent(name, regions, options, self.binding)


NIXL = Agents()
"""The agents of every client outside tests."""
