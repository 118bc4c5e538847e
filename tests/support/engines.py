"""Engines whose ranks are processes of their own, and a reader in this process."""

from __future__ import annotations

import contextlib
import mmap
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvferry import (
    Blocks,
    Cache,
    Client,
    EngineSession,
    EngineSpec,
    Interval,
    MemoryKind,
    MemoryRegion,
    NixlOptions,
    Publication,
    Release,
)
from tests.support.caches import Memory, Model
from tests.support.commands import obey
from tests.support.identifiers import unique_id
from tests.support.loaded_processes import LOADED
from tests.support.node_servers import NodeServerProcess


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
        self.pipe, theirs = LOADED.Pipe()
        job = (address, spec, rank, memory.model, memory.units, str(memory.path), token, options, serve)
        self.process: BaseProcess = LOADED.Process(target=_run, args=(job, theirs), daemon=True)
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
    from kvferry import Client, MemoryRegion

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

        def do(command: str, *arguments: Any, result_timeout: float = 30.0, **options: Any) -> Any:
            if command == "read":
                return cache.read(*arguments, **options).result(result_timeout)
            return getattr(_Commands, command)(cache, *arguments, **options)

        obey(pipe, do)


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


class Engine:
    """An engine of a test: its session here, its ranks in processes of their own."""

    def __init__(
        self,
        address: str,
        model: Model,
        units: list[Interval],
        folder: Path,
        *,
        engine_id: str = "",
        serve: bool = True,
        identity: dict[str, str] | None = None,
        partial: bool = False,
        **options: object,
    ) -> None:
        self.model = model
        self.spec = EngineSpec(
            engine_id or unique_id("engine"), (model.group(),), len(units), identity or {"model": "tiny"}, partial
        )
        self.client = Client(address)
        self.session: EngineSession = self.client.open_engine(self.spec)
        self.memories = [Memory(model, held, folder / f"memory-{uuid.uuid4().hex}") for held in units]
        token = str(self.session.token)
        self.ranks = [
            RankProcess(address, self.spec, rank, memory, token, serve=serve, **options)
            for rank, memory in enumerate(self.memories)
        ]

    def ready(self) -> Engine:
        for rank in self.ranks:
            rank.ready()
        return self

    def release_of(self, publication: Publication) -> Release:
        """`released` of this publication; others that come by are of earlier tests."""
        while True:
            found = self.session.released(timeout=20)
            if not found:
                raise TimeoutError(f"publication {publication.number} was not released")
            for release in found:
                if release.publication == publication.number:
                    return release

    def close(self) -> None:
        """End its processes. Idempotent."""
        for rank in self.ranks:
            rank.close()
        self.client.close()
        for memory in self.memories:
            memory.close()
        self.ranks, self.memories = [], []


def reader_of(client: Client, model: Model, cells: np.ndarray) -> Cache:
    """A destination in this process, so that a read can be looked at while it runs."""
    return client.register_cache(
        EngineSpec(unique_id("reader"), (model.group(),), identity={"model": "tiny"}),
        planes=model.planes(Interval(0, 4), cells.ctypes.data),
        regions=[MemoryRegion(MemoryKind.DRAM, 0, cells.ctypes.data, cells.nbytes)],
        keep=cells,
        serve=False,
    )


@contextmanager
def two_homes(folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of two node servers: the source's on TCP, the destination's on a UNIX socket."""
    with (
        NodeServerProcess(folder / "source", tcp=True) as source,
        NodeServerProcess(folder / "destination") as destination,
    ):
        yield source.address, destination.address


@contextmanager
def engines_in(folder: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines; they start side by side, so call `ready` on them once all are made."""
    made: list[Engine] = []

    def make(address: str, model: Model, units: list[Interval], **options: object) -> Engine:
        made.append(Engine(address, model, units, folder, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
