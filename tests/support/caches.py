"""Caches of engines in memory that the test sees as well, and what reads of them must bring.

A rank's memory is a file, mapped by the rank's process and by the test. The test writes the source's bytes
and checks the destination's with its own indexing, from the definition of a plane.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry import Group, Interval, MemoryKind, Plane

DTYPE = "bfloat16"
ELEMENT = 2
POISON = 0xA5


@dataclass(frozen=True)
class Model:
    """A cache as the tests declare it: HND, key and value apart, one tensor each per layer."""

    layers: int = 2
    heads: int = 4
    head_dim: int = 8
    block_tokens: int = 16
    num_blocks: int = 32
    components: tuple[str, ...] = ("key", "value")
    state_elements: Mapping[str, int] = field(default_factory=dict)

    def group(self) -> Group:
        return Group("full", block_tokens=self.block_tokens, num_blocks=self.num_blocks)

    def state_bytes(self, component: str) -> int:
        return self.state_elements.get(component, self.head_dim) * ELEMENT

    def rank_bytes(self, units: Interval) -> int:
        return sum(self.plane_bytes(component, units) for component in self.components) * self.layers

    def plane_bytes(self, component: str, units: Interval) -> int:
        return self.num_blocks * self.block_tokens * len(units) * self.state_bytes(component)

    def planes(self, units: Interval, base: int) -> list[Plane]:
        """The planes of a rank whose memory begins at `base`."""
        planes = []
        for layer in range(self.layers):
            for component in self.components:
                state = self.state_bytes(component)
                planes.append(
                    Plane(
                        layer=f"layers.{layer}",
                        component=component,
                        group="full",
                        format="plain",
                        dtype=DTYPE,
                        memory_kind=MemoryKind.DRAM,
                        device=0,
                        base=base,
                        num_blocks=self.num_blocks,
                        block_stride=self.block_tokens * len(units) * state,
                        page_tokens=self.block_tokens,
                        page_stride=0,
                        block_states=self.block_tokens,
                        unit_stride=self.block_tokens * state,
                        token_stride=state,
                        state_bytes=state,
                        axis_size=self.heads,
                        units=units,
                    )
                )
                base += self.plane_bytes(component, units)
        return planes


class Memory:
    """A rank's memory as the test sees it."""

    def __init__(self, model: Model, units: Interval, path: Path) -> None:
        self.model, self.units, self.path = model, units, path
        path.write_bytes(bytes([POISON]) * model.rank_bytes(units))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.cells = np.frombuffer(self._map, np.uint8)

    def plane(self, layer: int, component: str, cells: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """``uint8[num_blocks, units, tokens, state_bytes]`` of a plane, by plain reshaping; of other `cells` like these
        if they are given."""
        model, cells = self.model, self.cells if cells is None else cells
        begin = sum(
            model.plane_bytes(c, self.units)
            for index in range(model.layers)
            for c in model.components
            if (index, model.components.index(c)) < (layer, model.components.index(component))
        )
        shape = (model.num_blocks, len(self.units), model.block_tokens, model.state_bytes(component))
        return cells[begin : begin + model.plane_bytes(component, self.units)].reshape(shape)

    def close(self) -> None:
        del self.cells
        self.path.unlink(missing_ok=True)


def kv(model: Model, seed: int, tokens: int) -> dict[tuple[int, str], npt.NDArray[np.uint8]]:
    """The KV of a request, for all heads: ``uint8[heads, tokens, state_bytes]`` by (layer, component). Never the
    poison."""
    random = np.random.default_rng(seed)
    return {
        (layer, component): random.integers(0, POISON, (model.heads, tokens, model.state_bytes(component)), np.uint8)
        for layer in range(model.layers)
        for component in model.components
    }


def write(memory: Memory, request: dict[tuple[int, str], npt.NDArray[np.uint8]], ids: list[int]) -> None:
    """Put a request's KV into a rank's blocks, token by token."""
    size = memory.model.block_tokens
    for (layer, component), values in request.items():
        plane = memory.plane(layer, component)
        for token in range(values.shape[1]):
            plane[ids[token // size], :, token % size] = values[memory.units.begin : memory.units.end, token]


def expect(
    memory: Memory, request: dict[tuple[int, str], npt.NDArray[np.uint8]], ids: list[int], tokens: tuple[int, int]
) -> npt.NDArray[np.uint8]:
    """What a poisoned destination must hold after reading `tokens`: the request's bytes there, poison everywhere
    else."""
    # Not in the memory itself: a read may be writing to it.
    wanted = np.full_like(memory.cells, POISON)
    size = memory.model.block_tokens
    for (layer, component), values in request.items():
        plane = memory.plane(layer, component, wanted)
        for token in range(*tokens):
            plane[ids[token // size - tokens[0] // size], :, token % size] = values[
                memory.units.begin : memory.units.end, token
            ]
    return wanted


def shards(heads: int, tp: int) -> list[Interval]:
    """Heads over `tp` ranks, by the definition: rank r holds [r·H // n, (r+1)·H // n), or one head when that is
    empty."""
    found = []
    for rank in range(tp):
        begin, end = rank * heads // tp, (rank + 1) * heads // tp
        found.append(Interval(begin, max(end, begin + 1)))
    return found
