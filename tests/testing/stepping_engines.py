"""A source that publishes in steps, and a destination on the ports whose steps a test makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry import Blocks, EngineSpec, Group, Publication, Read
from kvferry.engine import GrantStep, ReadEnd, SchedulerPort, WorkerPort
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import AXES, BLOCK, BLOCKS, DIM, HEADS, LAYERS, Engine, kv

TOKENS = 22
VALUES = kv(TOKENS)
THEIRS, MINE = [3, 1, 9, 4, 7, 2], [5, 6, 11, 12, 13, 10]


class Prefill(Engine):
    """A source that computes a request chunk by chunk."""

    def __init__(self, fabric: Fabric, ranks: int = 1, **options: Any) -> None:
        super().__init__(fabric, "p", ranks, **options)
        self.done = 0
        self.publication: Publication = self.session.publish("request", {}, last=False)

    @property
    def reference(self) -> str:
        return self.publication.reference

    def compute(self, tokens: int, payload: bytes = b"") -> None:
        """Write and publish the tokens up to here."""
        first = self.done // BLOCK
        self.write(VALUES[:, :, :tokens], THEIRS)
        blocks = {"full": Blocks(THEIRS[first : -(-tokens // BLOCK)], self.done, tokens)}
        self.session.publish_more(self.publication, blocks, last=tokens == TOKENS, payload=payload)
        self.done = tokens


def begin(decode: Engine, source: Prefill, **options: Any) -> list[Read]:
    return decode.read(source.reference, MINE, **{"tokens": (0, TOKENS), "progressive": True, **options})


def halfway(fabric: Fabric, **options: Any) -> tuple[Prefill, Engine, Read]:
    """A read of which the first 8 tokens have arrived."""
    prefill, decode = Prefill(fabric), Engine(fabric, "d")
    (read,) = begin(decode, prefill, **options)
    prefill.compute(8)
    until(lambda: decode.holds(VALUES[:, :, :8], MINE))
    return prefill, decode, read


class Decode:
    """A decode engine of one rank on the ports, whose steps a test makes."""

    def __init__(self, fabric: Fabric, *, prompt_check: str = "compare", **options: Any) -> None:
        spec = EngineSpec("d", (Group("full", block_tokens=BLOCK, num_blocks=BLOCKS),))
        self.memory = {f"layer{layer}": np.zeros((2, BLOCKS, HEADS, BLOCK, DIM), np.uint16) for layer in range(LAYERS)}
        client = fabric.client(prompt_check=prompt_check)
        self.scheduler = SchedulerPort(client, spec, **options)
        self.worker = WorkerPort(client, spec)
        self.worker.register(self.memory, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS)
        self.ended: list[ReadEnd] = []
        self.steps: list[GrantStep] = []

    def step(self) -> bool:
        """One step of the engine, but that `GrantStep`s only come to `steps`."""
        for read_id in self.scheduler.cancels():
            self.worker.cancel(read_id)
        self.steps += self.scheduler.grant_steps()
        self.scheduler.collect(self.worker.finished())
        self.ended += self.scheduler.finished().reads
        return True

    def has(self, steps: int) -> bool:
        """Whether so many steps were handed out."""
        return len(self.steps) == steps

    def until(self, condition: Callable[[], object]) -> None:
        until(lambda: self.step() and bool(condition()))

    def attached(self, prefill: Prefill, **options: Any) -> Any:
        self.scheduler.acquire("mine", prefill.reference, progressive=True, **options)
        self.until(lambda: self.scheduler.granted("mine"))
        return self.scheduler.attach("mine", {"full": Blocks(MINE)}, (0, TOKENS))

    def holds(self, tokens: int) -> bool:
        """Whether the first `tokens` of the request are there, and nothing behind them."""
        for layer in range(LAYERS):
            blocks = self.memory[f"layer{layer}"][:, MINE].swapaxes(2, 3).reshape(2, -1, HEADS, DIM)
            if not (blocks[:, :tokens] == VALUES[layer, :, :tokens]).all() or blocks[:, tokens:].any():
                return False
        return True
