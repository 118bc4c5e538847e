"""What the tests need of two engines: their caches in memory that the test itself can see, and rank processes that hold
them.

A rank's memory is a file, mapped by the rank's process and by the test. The test writes the source's bytes
and checks the destination's with its own indexing, from the definition of a plane.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvferry import Blocks, EngineSpec, Group, Interval, MemoryKind, Plane
from kvferry._clock import now

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

    def plane(self, layer: int, component: str) -> npt.NDArray[np.uint8]:
        """``uint8[num_blocks, units, tokens, state_bytes]`` of a plane, by plain reshaping."""
        model = self.model
        begin = sum(
            model.plane_bytes(c, self.units)
            for index in range(model.layers)
            for c in model.components
            if (index, model.components.index(c)) < (layer, model.components.index(component))
        )
        shape = (model.num_blocks, len(self.units), model.block_tokens, model.state_bytes(component))
        return self.cells[begin : begin + model.plane_bytes(component, self.units)].reshape(shape)

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
    before = memory.cells.copy()
    memory.cells[:] = POISON
    size = memory.model.block_tokens
    for (layer, component), values in request.items():
        plane = memory.plane(layer, component)
        for token in range(*tokens):
            plane[ids[token // size - tokens[0] // size], :, token % size] = values[
                memory.units.begin : memory.units.end, token
            ]
    wanted = memory.cells.copy()
    memory.cells[:] = before
    return wanted


class RankProcess:
    """A rank in a process of its own. Calls are answered with a value or the exception that they raised there."""

    def __init__(
        self,
        address: str,
        spec: EngineSpec,
        rank: int,
        memory: Memory,
        token: str,
        *,
        serve: bool,
        **options: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        job = (address, spec, rank, memory.model, memory.units, str(memory.path), token, options, serve)
        self.process: BaseProcess = context.Process(target=_run, args=(job, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.rank = rank
        self.memory = memory

    def ready(self) -> RankProcess:
        """Wait until it is registered."""
        self.answer()
        return self

    def call(self, command: str, *arguments: Any, **options: Any) -> Any:
        """Do something there and wait for it."""
        self.send(command, *arguments, **options)
        return self.answer()

    def send(self, command: str, *arguments: Any, **options: Any) -> None:
        """Begin something there."""
        self.pipe.send((command, arguments, options))

    def answer(self, timeout: float = 60.0) -> Any:
        """The answer to what was begun."""
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"rank {self.rank} did not answer")
        value = self.pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def read(self, reference: str, ids: list[int], tokens: tuple[int, int] | None, **options: Any) -> Any:
        """Read a publication and wait for the result."""
        self.send_read(reference, ids, tokens, **options)
        return self.answer()

    def send_read(self, reference: str, ids: list[int], tokens: tuple[int, int] | None, **options: Any) -> None:
        """Begin to read; `answer` gives the result."""
        first = tokens[0] if tokens else 0
        self.send("read", reference, {"full": Blocks(ids, first_token=first)}, tokens, **options)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _run(job: tuple[Any, ...], pipe: Connection) -> None:
    from kvferry import Client, MemoryRegion, NixlOptions

    address, spec, rank, model, units, path, token, nixl, serve = job
    with Path(path).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    cells = np.frombuffer(mapped, np.uint8)
    base = cells.ctypes.data
    with Client(address, options=NixlOptions(**nixl)) as client:
        cache = client.register_cache(
            spec,
            rank,
            planes=model.planes(units, base),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, base, len(cells))],
            keep=mapped,
            labels={"tp_rank": rank},
            replicated=True,
            token=token,
            serve=serve,
        )
        pipe.send("ready")
        while True:
            try:
                command, arguments, options = pipe.recv()
            except EOFError:
                return
            try:
                if command == "read":
                    timeout = options.pop("result_timeout", 30.0)
                    answer: Any = cache.read(*arguments, **options).result(timeout)
                else:
                    answer = getattr(_Commands, command)(cache, *arguments, **options)
            except Exception as error:
                answer = error
            pipe.send(answer)


class _Commands:
    """What else a test can ask of a rank's process."""

    @staticmethod
    def cpu_seconds_idle(cache: Any, seconds: float) -> float:
        """CPU time that the whole process uses while it does nothing for `seconds`."""
        import threading
        import time

        before = time.process_time()
        threading.Event().wait(seconds)
        return time.process_time() - before

    reads: ClassVar[list[Any]] = []

    @classmethod
    def start_reads(cls, cache: Any, reference: str, blocks: Any, count: int, **options: Any) -> int:
        """Start several reads and wait for none."""
        # All into the same blocks, since nobody looks at the bytes.
        cls.reads += [cache.read(reference, blocks, allow_overlap=True, **options) for _ in range(count)]
        return count

    @classmethod
    def cancel_reads(cls, cache: Any, wait: float = 0.0) -> list[str]:
        """Cancel the reads that were started, after `wait` seconds at most: the states that they were in."""
        reads, cls.reads = cls.reads, []
        for read in reads:
            with contextlib.suppress(TimeoutError):
                read.exception(timeout=wait)
        states = [read.state.name for read in reads]
        for read in reads:
            read.cancel()
            read.exception(timeout=60)
        return states

    @staticmethod
    def gauges(cache: Any) -> Any:
        """The transport's gauges."""
        return cache.gauges()


def shards(heads: int, tp: int) -> list[Interval]:
    """Heads over `tp` ranks, by the definition: rank r holds [r·H // n, (r+1)·H // n), or one head when that is
    empty."""
    found = []
    for rank in range(tp):
        begin, end = rank * heads // tp, (rank + 1) * heads // tp
        found.append(Interval(begin, max(end, begin + 1)))
    return found


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process or thread does."""
    end = now() + 30
    while not condition():
        assert now() < end, "it did not come about"


def unique_id(prefix: str) -> str:
    """An engine_id nobody else has."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
