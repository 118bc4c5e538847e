"""Engines as their authors would build them on the ports: a scheduler in the test's process, workers in others, and
what passes between them as msgpack through pipes."""

from __future__ import annotations

import contextlib
import mmap
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import msgpack

from kvferry import Blocks, Client, EngineSpec, IntegrityOptions, Interval, MemoryKind, MemoryRegion, NixlOptions
from kvferry._clock import now
from kvferry._control.publications import Publication, Release
from kvferry.engine import Grant, GrantStep, Offer, ReadEnd, SchedulerPort, Tails, WorkerOutput, WorkerPort
from tests.support.caches import Memory, Model
from tests.support.identifiers import unique_id
from tests.support.loaded_processes import LOADED
from tests.support.waiting import PAUSE


class Worker:
    """A worker's process. Its memory is a file that the test maps as well."""

    def __init__(self, address: str, spec: EngineSpec, rank: int, memory: Memory, token: str, **options: Any) -> None:
        self.pipe, theirs = LOADED.Pipe()
        job = (address, spec, rank, memory.model, memory.units, str(memory.path), token, options)
        self.process: Any = LOADED.Process(target=work, args=(job, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, command: str, *arguments: Any) -> Any:
        """Do something there and wait for it."""
        self.pipe.send((command, arguments))
        return self.answer()

    def answer(self, timeout: float = 60.0) -> Any:
        """Its next answer."""
        if not self.pipe.poll(timeout):
            raise TimeoutError("the worker did not answer")
        value = self.pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def finished(self) -> WorkerOutput:
        """`WorkerPort.finished` there, through msgpack."""
        return msgpack.decode(self.call("finished"), type=WorkerOutput)

    def close(self) -> None:
        # Said, since a forked sibling may hold the other end of the pipe open.
        with contextlib.suppress(OSError):
            self.pipe.send(("end", ()))
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def work(job: tuple[Any, ...], pipe: Connection) -> None:
    """A worker: the loop of its process."""
    address, spec, rank, model, units, path, token, options = job
    integrity = IntegrityOptions(options.pop("integrity", "off"), patience=20)
    with Path(path).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    cells = np.frombuffer(mapped, np.uint8)
    base = cells.ctypes.data
    with Client(address, options=NixlOptions(**options), integrity=integrity) as client:
        port = WorkerPort(client, spec, rank, token=token)
        regions = [MemoryRegion(MemoryKind.DRAM, 0, base, len(cells))]
        port.register(planes=model.planes(units, base), regions=regions, replicated=True, keep=mapped)
        pipe.send("ready")
        while True:
            try:
                command, arguments = pipe.recv()
            except EOFError:
                return
            if command == "end":
                return
            try:
                answer: Any = None
                if command == "start":
                    plain, tails = arguments
                    port.start(msgpack.decode(plain, type=Grant), tails=Tails(tails))
                elif command == "add_step":
                    port.add_step(msgpack.decode(*arguments, type=GrantStep))
                elif command == "finished":
                    answer = msgpack.encode(port.finished())
                elif command == "checksum":
                    answer = port.cache.checksum(*arguments).result(30)
                elif command == "warm":
                    answer = port.warm(*arguments).result(30)
                else:
                    answer = getattr(port, command)(*arguments)
            except Exception as error:
                answer = error
            pipe.send(answer)


class PortEngine:
    """An engine: its scheduler's port here, its workers in processes of their own."""

    def __init__(
        self,
        address: str,
        model: Model,
        units: list[Interval],
        folder: Path,
        *,
        hold_until_quiet: bool = False,
        engine_id: str = "",
        **options: Any,
    ) -> None:
        self.model = model
        self.spec = EngineSpec(engine_id or unique_id("engine"), (model.group(),), len(units), {"model": "tiny"})
        self.client = Client(address)
        self.memories = [Memory(model, held, folder / f"memory-{uuid.uuid4().hex}") for held in units]
        self.scheduler = SchedulerPort(self.client, self.spec, hold_until_quiet=hold_until_quiet)
        token = str(self.scheduler.token)
        self.workers = [
            Worker(address, self.spec, rank, memory, token, **options) for rank, memory in enumerate(self.memories)
        ]
        self.ended: dict[str, ReadEnd] = {}
        self.quiesced: list[str] = []
        self.released: list[Release] = []

    def ready(self) -> PortEngine:
        for worker in self.workers:
            worker.answer()
        return self

    def step(self) -> None:
        """One step of the engine: what workers say goes to the scheduler, what it says comes here."""
        for read_id in self.scheduler.cancels():
            for worker in self.workers:
                worker.call("cancel", read_id)
        for step in self.scheduler.grant_steps():
            for worker in self.workers:
                worker.call("add_step", msgpack.encode(step))
        for worker in self.workers:
            self.scheduler.collect(worker.finished())
        finished = self.scheduler.finished()
        for end in finished.reads:
            assert end.request_id not in self.ended, "a read ends once"
            self.ended[end.request_id] = end
        self.quiesced += finished.quiesced
        self.released += self.scheduler.released()

    def grant(self, request_id: str, timeout: float = 30.0) -> Offer:
        """Step until the request is granted."""
        deadline = now() + timeout
        while now() < deadline:
            grant = self.scheduler.granted(request_id)
            if grant is not None:
                return grant
            self.step()
            time.sleep(PAUSE)
        raise TimeoutError(f"{request_id} was not granted")

    def start(
        self,
        request_id: str,
        ids: list[int],
        tokens: tuple[int, int] | None = None,
        *,
        tails: Tails = Tails.KEEP,
        ranks: range | None = None,
    ) -> Grant:
        """Attach blocks to a granted request, and start it on all workers."""
        blocks = {"full": Blocks(ids, first_token=tokens[0] if tokens else 0)}
        grant = self.scheduler.attach(request_id, blocks, tokens)
        for rank in range(len(self.workers)) if ranks is None else ranks:
            self.workers[rank].call("start", msgpack.encode(grant), tails.value)
        return grant

    def end_of(self, request_id: str, timeout: float = 40.0) -> ReadEnd:
        """Step until the read has ended."""
        self.until(lambda: request_id in self.ended, timeout)
        return self.ended.pop(request_id)

    def release_of(self, publication: Publication, timeout: float = 40.0) -> Release:
        """Step until the publication is released."""

        def found() -> bool:
            return any(release.publication == publication.number for release in self.released)

        self.until(found, timeout)
        release = next(release for release in self.released if release.publication == publication.number)
        self.released.remove(release)
        return release

    def until(self, condition: Any, timeout: float = 40.0) -> None:
        """Step until it holds."""
        deadline = now() + timeout
        while not condition():
            if now() > deadline:
                raise TimeoutError("it did not come about")
            self.step()
            time.sleep(PAUSE)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
        self.client.close()
        for memory in self.memories:
            memory.close()
        self.workers, self.memories = [], []
