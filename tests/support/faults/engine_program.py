"""The program of an engine's process: does what it is told over a pipe, and says what it saw.

python -m tests.support.faults.engine_program FD
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.support.commands import obey
from tests.support.faults.reports import Held, Job, Seen, Stepped, die_with_parent, held

Offered = tuple[str, list[int], Sequence[int]]
"""A request that a source publishes: its name, its blocks, its prompt."""
Asked = tuple[str, str, list[int], Sequence[int], float]
"""A read that a reader begins: its name, the reference, the blocks to read into, the prompt, its seconds."""


class Engine:
    """One process of an engine. Its public methods are the commands."""

    def __init__(self, job: Job) -> None:
        from kvferry import Client, EngineSpec, Interval, MemoryKind, MemoryRegion, NixlOptions
        from kvferry.engine import SchedulerPort, WorkerPort

        with job.memory.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        cells = np.frombuffer(mapped, np.uint8)
        base = cells.ctypes.data
        self._mapped = base, len(cells)
        spec = EngineSpec(job.engine_id, (job.model.group(),), job.num_ranks, {"model": "tiny"})
        options = NixlOptions(**job.options)
        self._client = Client(
            job.address,
            allowed_homes=["10.*"],
            directory=job.directory or None,
            home_in_references=not job.directory,
            options=options,
            optimistic=job.optimistic,
        )
        self._port = None if job.token else SchedulerPort(self._client, spec)
        self._worker = WorkerPort(self._client, spec, job.rank, token=job.token or None)
        self._cache = self._worker.register(
            planes=job.model.planes(Interval(*job.units), base),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, base, len(cells))],
            replicated=True,
            keep=mapped,
            serve=job.serve,
        )
        self._reads: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._publications: dict[int, Any] = {}
        self._ungranted: dict[str, list[int]] = {}

    # A step of the engine, by its ports.

    def step(self, offered: list[Offered], asked: list[Asked]) -> Stepped:
        """Publish requests and begin reads, and say what has come about since the last step."""
        from kvferry import Blocks, Prompt
        from kvferry.errors import KvferryError

        port, worker, quiet = self._port, self._worker, list[str]()
        ended: dict[str, Seen] = {}
        assert port is not None, "a rank that has no scheduler makes no steps"
        published = [port.publish(name, {"full": Blocks(ids)}, prompt=Prompt(tokens)) for name, ids, tokens in offered]
        for name, reference, ids, tokens, timeout in asked:
            self._ungranted[name] = ids
            try:
                port.acquire(name, reference, prompt=Prompt(tokens), timeout=timeout)
            except KvferryError as error:
                ended[name] = Seen(error)
        for name in port.news():
            try:
                if name in self._ungranted and port.granted(name) is not None:
                    worker.start(port.attach(name, {"full": Blocks(self._ungranted.pop(name))}))
            except KvferryError as error:
                ended[name] = Seen(error)
        # Nobody has written for these.
        quiet += ended
        for name in ended:
            self._ungranted.pop(name, None)
        for read_id in port.cancels():
            worker.cancel(read_id)
        port.collect(worker.finished())
        finished = port.finished()
        for end in finished.reads:
            ended[end.request_id] = Seen(end.error, end.confirmed, end.bytes)
            quiet += [end.request_id] if end.quiet else []
        return Stepped(published, port.released(), ended, [*quiet, *finished.quiesced])

    # The source's commands.

    def token(self) -> str:
        """For the engine's other processes."""
        return str(self._cache.session.token)

    def publish(self, request_id: str, ids: list[int], tokens: list[int], **options: Any) -> Any:
        """Offer blocks, which were computed from these tokens."""
        from kvferry import Blocks, Prompt

        publication = self._cache.session.publish(request_id, {"full": Blocks(ids)}, prompt=Prompt(tokens), **options)
        self._publications[publication.number] = publication
        return publication

    def unmap(self) -> None:
        """Take the cache out of this process's memory, as nothing may that serves."""
        unmapped = ctypes.CDLL(None, use_errno=True).munmap(*map(ctypes.c_size_t, self._mapped))
        assert unmapped == 0

    def abort(self, number: int) -> None:
        """Take a publication back."""
        self._cache.session.abort(self._publications[number])

    def released(self, timeout: float = 0.0) -> list[Any]:
        """What was released since the last call, having waited for the first."""
        found = self._cache.session.released(timeout)
        for release in found:
            self._publications.pop(release.publication, None)
        return found

    def unreleased(self) -> list[int]:
        """Numbers of what is still pinned."""
        return [publication.number for publication in self._cache.session.unreleased()]

    # The destination's.

    def read(self, reference: str, ids: list[int], tokens: list[int], **options: Any) -> int:
        """Begin a read for a prompt of these tokens; gives it a number."""
        from kvferry import Blocks, Prompt

        number = next(self._numbers)
        self._reads[number] = self._cache.read(reference, {"full": Blocks(ids)}, prompt=Prompt(tokens), **options)
        return number

    def read_until_moving(
        self, reference: str, ids: list[int], tokens: list[int], stop: list[int], **options: Any
    ) -> tuple[int, bool]:
        """Begin a read and stop processes as soon as some of its bytes have arrived. 0 is this process.

        Returns:
            The read's number, and whether it was stopped under way: some bytes had arrived, and most had not.
        """
        from tests.support.waiting import stop as stop_processes

        number = self.read(reference, ids, tokens, **options)
        read = self._reads[number]
        while not read.done():
            progress = read.progress()
            if 0 < progress.done < progress.total:
                if 0 in stop:
                    os.kill(os.getpid(), signal.SIGSTOP)
                # A source may serve until it has stopped, and what it has sent by then arrives after that.
                stop_processes(*filter(None, stop))
                progress = read.progress()
                return number, 2 * progress.done < progress.total
            threading.Event().wait(0.0002)
        return number, False

    def wait_moved(self, number: int) -> None:
        """Wait until a read's last byte has arrived, or it has ended otherwise."""
        read = self._reads[number]
        while not read.done() and read.progress().done < read.progress().total:
            threading.Event().wait(0.0002)

    def outcome(self, number: int, timeout: float) -> Seen:
        """Wait for a read's end."""
        read = self._reads[number]
        error = read.exception(timeout)
        if error is not None:
            return Seen(error)
        result = read.result(0)
        return Seen(None, result.confirmed, result.bytes, leased=not read._read.hinted)

    def wait_quiet(self, number: int, timeout: float) -> bool:
        """Wait until a read's blocks may be reused; forgets the read then."""
        quiet = bool(self._reads[number].wait_quiet(timeout))
        if quiet:
            del self._reads[number]
        return quiet

    def cancel(self, number: int) -> None:
        """Cancel a read."""
        self._reads[number].cancel()

    def decline(self, reference: str) -> None:
        """Decline a publication."""
        self._client.decline(reference)

    def gauges(self) -> Any:
        """Of the transport."""
        return self._cache.gauges()

    def held(self) -> Held:
        """What this process holds."""
        return held()

    def close(self) -> None:
        """End the engine as it should be ended."""
        self._client.close()


def main(descriptor: int) -> None:
    die_with_parent()
    # NIXL's package imports torch to ask for its CUDA version, a second per process that no test needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    pipe = Connection(descriptor)
    engine = Engine(pipe.recv())
    pipe.send("ready")
    obey(pipe, lambda command, *arguments, **options: getattr(engine, command)(*arguments, **options))


if __name__ == "__main__":
    main(int(sys.argv[1]))
