"""Engines whose ranks keep their caches on devices; the test's own process is the scheduler of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvferry import Blocks, Client, EngineSession, EngineSpec, Publication, ReadResult
from kvferry.engine import ReadEnd, SchedulerPort
from tests.gpu.rank_process import Place, RankProcess, Settings
from tests.gpu.torch_caches import Shape, Written, heads_of
from tests.support.identifiers import unique_id

T = TypeVar("T")

WAIT = 30.0


class Processes:
    """Processes that can become ranks: importing torch takes seconds, so that tests share them.

    Args:
        folder: for what they write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._idle: list[RankProcess] = []

    def take(self, environment: Mapping[str, str]) -> RankProcess:
        """One with this environment, idle or new."""
        for process in self._idle:
            if process.environment == environment and process.process.is_alive():
                self._idle.remove(process)
                return process
        self._made += 1
        return RankProcess(environment, self._folder / f"rank-{self._made}.log")

    def give_back(self, process: RankProcess, *, sound: bool) -> None:
        """Keep it for others if it is sound; else end it."""
        if sound and process.process.is_alive():
            try:
                process.call("unregister")
            except Exception:
                process.process.kill()
            else:
                self._idle.append(process)
                return
        process.process.kill()
        process.close()

    def close(self) -> None:
        """End all that are idle."""
        for process in self._idle:
            process.close()


class DeviceEngine:
    """An engine of some ranks.

    Args:
        client: of the test's process.
        address: of the node server.
        processes: gives the ranks' processes.
        devices: of each rank.
        shape, layout: of its caches.
        environment: of its ranks' processes.
        settings: of its ranks' clients.
        by_port: it reads by `read_by_port` only, and publishes nothing.
    """

    def __init__(
        self,
        client: Client,
        address: str,
        processes: Processes,
        devices: Sequence[str],
        shape: Shape,
        layout: str = "heads first",
        environment: Mapping[str, str] | None = None,
        settings: Settings | None = None,
        *,
        by_port: bool = False,
    ) -> None:
        self.shape = shape
        self.spec = EngineSpec(unique_id("engine"), (shape.group(),), len(devices), {"model": "tiny"})
        self._processes = processes
        # A session publishes before it returns, so that ranks can send their sums at once; a port does not.
        self._opened = SchedulerPort(client, self.spec) if by_port else client.open_engine(self.spec)
        self.ranks = [processes.take(environment or {}) for _ in devices]
        for rank, (process, device) in enumerate(zip(self.ranks, devices, strict=True)):
            place = Place(device, layout, heads_of(rank, len(devices), shape.heads), shape)
            token = str(self._opened.token)
            process.send("register", address, self.spec, rank, place, token, settings or Settings())

    def ready(self) -> DeviceEngine:
        """Wait until all of its ranks are registered."""
        self.answers()
        return self

    @property
    def session(self) -> EngineSession:
        if not isinstance(self._opened, EngineSession):
            raise TypeError("it was made with by_port")
        return self._opened

    def all(self, command: str, *arguments: Any, **options: Any) -> list[Any]:
        """Do something on all ranks at once, and wait for it."""
        for process in self.ranks:
            process.send(command, *arguments, **options)
        return self.answers()

    def answers(self) -> list[Any]:
        """The answers of all ranks to the commands begun there."""
        return [process.answer() for process in self.ranks]

    def publish(self, written: Written, *, expected_reads: int = 1, checksums: bool = False) -> Publication:
        """Write a request into the ranks' blocks, and publish it."""
        self.all("write", written)
        blocks = Blocks(written.ids, end_token=written.end)
        publication = self.session.publish(
            unique_id("request"), {"full": blocks}, expected_reads=expected_reads, checksums=checksums
        )
        if checksums:
            self.all("checksum", publication.number, written)
        return publication

    def read(self, publication: Publication, written: Written) -> list[ReadResult]:
        """Read tokens of a publication into all ranks' blocks, and wait for it."""
        self.begin(publication, written)
        results: list[ReadResult] = self.answers()
        return results

    def begin(self, publication: Publication, written: Written, command: str = "read") -> None:
        """Begin to read; `answers` gives the results."""
        tokens = written.first, written.end
        options = {"read_id": unique_id("read"), "parties": len(self.ranks), "timeout": 40.0}
        for process in self.ranks:
            process.send(command, publication.reference, written.ids, tokens, **options)

    def read_by_port(self, publication: Publication, written: Written) -> ReadEnd:
        """Read as an engine's scheduler does, tails cleared if `written` says so; how it ended."""
        port = self._opened
        if not isinstance(port, SchedulerPort):
            raise TypeError("it was made without by_port")
        request = unique_id("request")
        blocks = {"full": Blocks(written.ids, first_token=written.first)}
        port.acquire(request, publication.reference)
        offer = _soon(lambda: port.granted(request))
        grant = port.attach(request, blocks, (written.first, written.end))
        assert grant.read_id == offer.read_id
        self.all("start", grant, cleared=written.cleared)

        def ended() -> ReadEnd | None:
            for output in self.all("finished"):
                port.collect(output)
            reads = port.finished().reads
            return reads[0] if reads else None

        return _soon(ended)

    def released(self, publication: Publication) -> bool:
        """Wait until it gets its blocks back."""
        return _soon(lambda: [each for each in self.session.released() if each.publication == publication.number] != [])

    def wrong(self, *written: Written) -> list[str]:
        """The differences, on each rank, from a poisoned cache that holds these requests; [] if there are none."""
        return [problem for problem in self.all("wrong", *written) if problem]

    def log(self) -> str:
        """The output of its ranks' processes."""
        return "".join(process.log.read_text(errors="replace") for process in self.ranks)

    def close(self, *, sound: bool = True) -> None:
        """End it; `sound`: its processes may become other ranks. Idempotent."""
        for process in self.ranks:
            self._processes.give_back(process, sound=sound)
        self.ranks = []
        self._opened.close()


@contextmanager
def engines_of(
    client: Client, address: str, processes: Processes, sound: Callable[[], bool] = lambda: True
) -> Iterator[Callable[..., DeviceEngine]]:
    """Make engines; they start side by side, so call `ready` on them once all are made.

    Args:
        client, address, processes: see `DeviceEngine`.
        sound: says at the end whether the engines' processes may be used again.
    """
    made: list[DeviceEngine] = []

    def make(*arguments: Any, **options: Any) -> DeviceEngine:
        made.append(DeviceEngine(client, address, processes, *arguments, **options))
        return made[-1]

    try:
        yield make
    finally:
        again = sound()
        # Readers end before their sources.
        for engine in reversed(made):
            engine.close(sound=again)


def _soon(answer: Callable[[], T | None]) -> T:
    """Wait for the first answer that is not None or False."""
    deadline = time.monotonic() + WAIT
    while True:
        found = answer()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come about within {WAIT} s")
        time.sleep(0.001)
