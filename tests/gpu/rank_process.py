"""A rank in a process of its own, with a cache on a device, which carries out a test's commands."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from kvferry import (
    Blocks,
    Client,
    EngineSpec,
    IntegrityOptions,
    NixlOptions,
    Read,
    ReadResult,
    StagingOptions,
)
from kvferry.engine import Grant, Tails, WorkerOutput, WorkerPort
from tests.gpu.device_facts import facts
from tests.gpu.torch_caches import Shape, TorchCache, Written
from tests.support.commands import obey

ANSWER_TIMEOUT = 60.0


@dataclass(frozen=True)
class Place:
    """The place of a rank's cache, and the rank's heads.

    Attributes:
        device: as torch names it.
        layout: see `LAYOUTS`.
        heads: those of this rank.
        shape: of the whole model.
    """

    device: str
    layout: str
    heads: range
    shape: Shape


@dataclass(frozen=True)
class Settings:
    """How a rank's client is made.

    Attributes:
        nixl, staging, integrity: fields of kvferry's options that differ from the defaults.
        serve: whether others read from it.
        new_thread: register on a new thread, which has no CUDA context yet.
        current_device: the device that is current on that thread; -1: its default.
    """

    nixl: Mapping[str, Any] = field(default_factory=dict)
    staging: Mapping[str, Any] = field(default_factory=dict)
    integrity: Mapping[str, Any] = field(default_factory=dict)
    serve: bool = True
    new_thread: bool = False
    current_device: int = -1


class RankProcess:
    """A process that becomes a rank, and later another one. A call returns its value there, or raises its exception.

    Args:
        environment: beside this process's; libraries read it when they are loaded.
        log: takes what the process writes.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.environment, self.log = dict(environment), log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_run, args=(theirs, str(log)), daemon=True)
        with _environment(environment):
            self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        if self.process.pid is None:
            raise RuntimeError("it was not started")
        return self.process.pid

    def call(self, command: str, *arguments: Any, **options: Any) -> Any:
        """Do something there, and wait for it."""
        self.send(command, *arguments, **options)
        return self.answer()

    def send(self, command: str, *arguments: Any, **options: Any) -> None:
        """Begin something there."""
        try:
            self._pipe.send((command, arguments, options))
        except OSError as error:
            raise EOFError(f"the rank has ended: {self.tail()}") from error

    def answer(self, timeout: float = ANSWER_TIMEOUT) -> Any:
        """The answer to what was begun."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the rank did not answer within {timeout} s: {self.tail()}")
        try:
            value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise EOFError(f"the rank has ended: {self.tail()}") from error
        if isinstance(value, BaseException):
            raise value
        return value

    def tail(self, size: int = 3000) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _run(pipe: Connection, log: str) -> None:
    with Path(log).open("ab", buffering=0) as file:
        # UCX reports its transports and errors on stderr.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    rank = _Rank()
    obey(pipe, lambda command, *arguments, **options: getattr(rank, command)(*arguments, **options))


class _Rank:
    """The commands of a rank's process: each method is a command."""

    def __init__(self) -> None:
        self._device = "cpu"
        self._cache: TorchCache | None = None
        self._client: Client | None = None
        self._port: WorkerPort | None = None
        self._read: Read | None = None

    @property
    def cache(self) -> TorchCache:
        if self._cache is None:
            raise RuntimeError("it is not registered")
        return self._cache

    @property
    def port(self) -> WorkerPort:
        if self._port is None:
            raise RuntimeError("it is not registered")
        return self._port

    def register(self, address: str, spec: EngineSpec, rank: int, place: Place, token: str, settings: Settings) -> None:
        """Become a rank."""
        self._device = place.device
        if torch.device(place.device).type == "cuda":
            torch.cuda.set_device(place.device)
        self._cache = TorchCache(place.shape, place.heads, place.layout, place.device)
        self._client = Client(
            address,
            options=NixlOptions(**settings.nixl),
            staging=StagingOptions(**settings.staging),
            integrity=IntegrityOptions(**settings.integrity),
        )
        self._port = WorkerPort(self._client, spec, rank, token=token)

        def register() -> None:
            if settings.current_device >= 0:
                torch.cuda.set_device(settings.current_device)
            self.port.register(
                self.cache.tensors,
                axes=self.cache.axes,
                heads=place.heads,
                total_heads=place.shape.heads,
                serve=settings.serve,
            )

        _on_new_thread(register) if settings.new_thread else register()

    def unregister(self) -> None:
        """Be no rank any more, and give back its memory."""
        self._read = None
        if self._port is not None:
            self._port.close()
        if self._client is not None:
            self._client.close()
        self._port = self._client = self._cache = None
        gc.collect()
        # Does nothing where CUDA is not in use.
        torch.cuda.empty_cache()

    def poison(self) -> None:
        self.cache.poison()

    def write(self, *written: Written) -> None:
        """See `TorchCache.write`."""
        self.cache.write(*written)

    def wrong(self, *written: Written) -> str:
        """See `TorchCache.wrong`."""
        return self.cache.wrong(*written)

    def fill(self, seed: int) -> None:
        """See `TorchCache.fill`."""
        self.cache.fill(seed)

    def digest(self, ids: Sequence[int]) -> list[int]:
        """See `TorchCache.digest`."""
        return self.cache.digest(ids)

    def checksum(self, publication: int, written: Written) -> int:
        """Sum published blocks, and send the sums; their number."""
        blocks = {"full": Blocks(written.ids, end_token=written.end)}
        return self.port.cache.checksum(publication, blocks).result(30)

    def begin(self, reference: str, ids: tuple[int, ...], tokens: tuple[int, int] | None, **options: Any) -> None:
        """Begin to read."""
        first = tokens[0] if tokens else 0
        self._read = self.port.cache.read(reference, {"full": Blocks(ids, first_token=first)}, tokens, **options)

    def read(self, *arguments: Any, **options: Any) -> ReadResult:
        """Read, and wait for it."""
        self.begin(*arguments, **options)
        return self.reading.result(50)

    def time_reads(self, reference: str, ids: tuple[int, ...], end: int, count: int) -> tuple[list[float], ReadResult]:
        """Read a publication `count` times, one after the other: how many seconds each took, and the last result."""
        taken: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            self.read(reference, ids, (0, end))
            taken.append(time.perf_counter() - began)
        return taken, self.reading.result(0)

    def time_copies(self, size: int, count: int) -> list[float]:
        """Copy `size` bytes from one place of the device to another, `count` times: how many seconds each took."""
        source, destination = (torch.empty(size, dtype=torch.uint8, device=self._device).fill_(1) for _ in range(2))
        taken = []
        for _ in range(count):
            self.cache.synchronize()
            began = time.perf_counter()
            destination.copy_(source)
            self.cache.synchronize()
            taken.append(time.perf_counter() - began)
        return taken

    @property
    def reading(self) -> Read:
        if self._read is None:
            raise RuntimeError("it has not begun to read")
        return self._read

    def moved(self) -> int:
        """Bytes that have arrived."""
        return self.reading.progress().done

    def warm(self, engine_reference: str) -> None:
        """Do in advance what the first read from an engine would wait for."""
        self.port.warm(engine_reference).result(30)

    def wait_posted(self) -> int:
        """Wait until a part of a read is under way, or has arrived: bytes that have arrived."""
        deadline = time.monotonic() + 30
        while not (self.reading.done() or self.moved() or self.port.cache.gauges().chunks_in_flight):
            if time.monotonic() > deadline:
                raise TimeoutError("the read does not begin")
            os.sched_yield()
        return self.moved()

    def cancel(self) -> bool:
        """Cancel the read: whether it is quiet."""
        return self.reading.cancel()

    def ended(self, timeout: float = 30.0) -> str:
        """Wait for the end of the read: the name of its error; empty if it ended well."""
        error = self.reading.exception(timeout)
        return "" if error is None else type(error).__name__

    def quiet(self, timeout: float = 30.0) -> bool:
        """Wait until nothing can write to the read's blocks any more: whether that came about."""
        return self.reading.wait_quiet(timeout)

    def start(self, grant: Grant, *, cleared: bool) -> None:
        """Begin this rank's share of a read that its scheduler was granted."""
        self.port.start(grant, tails=Tails.ZERO if cleared else Tails.KEEP)

    def finished(self) -> WorkerOutput:
        """The events since the last call."""
        return self.port.finished()

    def limit_memory(self, spare: int) -> None:
        """Let torch take `spare` bytes more of the device's memory, and no more; -1: any number."""
        device = self.cache.device
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        fraction = 1.0 if spare < 0 else (torch.cuda.memory_reserved(device) + spare) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)

    def used_memory(self) -> int:
        """Bytes in use: of the device, by all processes; or of the host, by this process."""
        gc.collect()
        torch.cuda.empty_cache()
        if torch.device(self._device).type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def capture_while_reading(self) -> int:
        """Capture graphs, replay each, and check what it computed, until the read that was begun has ended: how many.

        Where there are no graphs, their kernels are run.
        """
        on_device = self.cache.device.type == "cuda"
        captured = 0
        while not captured or not self.reading.done():
            numbers = torch.arange(1024, device=self.cache.device)
            found = torch.empty_like(numbers)
            if on_device:
                graph = torch.cuda.CUDAGraph()
                # In this mode, which is torch's default, calls of other threads can make a capture fail.
                with torch.cuda.graph(graph, capture_error_mode="global"):
                    found.copy_(numbers * 2)
                graph.replay()
            else:
                found.copy_(numbers * 2)
            if int(found.sum()) != 1023 * 1024:
                raise ValueError(f"a graph that was captured during a read computed {int(found.sum())}")
            captured += 1
        return captured

    def facts(self) -> dict[str, str]:
        """The facts about this process's machine."""
        return facts(self._device)


def _on_new_thread(action: Callable[[], None]) -> None:
    """Run something on a new thread, and raise what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
