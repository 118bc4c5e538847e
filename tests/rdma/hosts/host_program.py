"""The engines of one host: carries out commands from a pipe, and answers with results.

python -m tests.rdma.hosts.host_program FD

A rank's memory is this process's own. Its content is drawn from a seed, so that every host knows what each request
holds, and a reader looks at every byte of its memory by itself: at those of no read, too.
"""

from __future__ import annotations

import faulthandler
import itertools
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvferry import (
    Blocks,
    Client,
    EngineSpec,
    Interval,
    MemoryKind,
    MemoryRegion,
    NixlOptions,
    Prompt,
    Read,
    Release,
)
from kvferry.stats import TransportGauges
from tests.rdma.hosts.exchanged import MODEL, Place, Request, content, prompt
from tests.support.caches import POISON, Memory
from tests.support.faults.reports import Seen

MEMORY = Path("/dev/shm")


class Rank:
    """A rank, with its engine's scheduler unless that is elsewhere. Its public methods are commands."""

    def __init__(self, client: Client, place: Place) -> None:
        units = Interval(*place.units)
        self._memory = Memory(MODEL, units, MEMORY / f"{place.engine_id}.{place.rank}")
        self._wanted = self._memory.cells.copy()
        base, spec = self._memory.cells.ctypes.data, EngineSpec(place.engine_id, (MODEL.group(),), place.num_ranks)
        if not place.token:
            client.open_engine(spec)
        self._cache = client.register_cache(
            spec,
            place.rank,
            planes=MODEL.planes(units, base),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, base, len(self._memory.cells))],
            replicated=True,
            keep=self._memory,
            token=place.token or None,
            serve=place.serve,
        )
        self._client = client
        self._requests: dict[int, Request] = {}
        self._reads: dict[int, tuple[Read, Request, list[int]]] = {}
        self._good: set[int] = set()
        self._numbers = itertools.count()

    def token(self) -> str:
        """For the engine's other processes."""
        return str(self._cache.session.token)

    def engine_reference(self) -> str:
        """For those who will read from this engine."""
        return self._cache.engine_reference

    def warm(self, engine_reference: str, timeout: float) -> None:
        """Connect to all ranks of an engine."""
        self._cache.warm(engine_reference, timeout=timeout).result(timeout)

    def write(self, ids: tuple[int, ...], seed: int) -> None:
        """Compute this rank's part of a request."""
        for (layer, component), values in content(seed, len(ids)).items():
            self._memory.plane(layer, component)[list(ids)] = self._own(values)

    def publish(self, ids: tuple[int, ...], seed: int, **options: Any) -> Request:
        """Offer blocks that all ranks have written."""
        tokens = Prompt(prompt(seed, len(ids)))
        publication = self._cache.session.publish(f"request-{seed}", {"full": Blocks(ids)}, prompt=tokens, **options)
        request = self._requests[publication.number] = Request(publication, ids, seed)
        return request

    def released(self, timeout: float = 0.0) -> list[Release]:
        """Wait for the first release, and return all. Released blocks get other bytes at once."""
        found: list[Release] = self._cache.session.released(timeout)
        for release in found:
            request = self._requests.pop(release.publication)
            self.write(request.ids, request.seed + 1)
        return found

    def read(self, request: Request, ids: list[int], **options: Any) -> int:
        """Begin a read, and give it a number."""
        read = self._cache.read(
            request.publication.reference, {"full": Blocks(ids)}, prompt=Prompt(request.tokens), **options
        )
        number = next(self._numbers)
        self._reads[number] = read, request, ids
        return number

    def wait_moving(self, number: int) -> bool:
        """Wait until some of a read's bytes have arrived; whether most have not."""
        read = self._reads[number][0]
        while not read.done():
            progress = read.progress()
            if 0 < progress.done < progress.total:
                return bool(2 * progress.done < progress.total)
            threading.Event().wait(0.001)
        return False

    def outcome(self, number: int, timeout: float) -> Seen:
        """Wait for a read's end."""
        read, request, ids = self._reads[number]
        error = read.exception(timeout)
        if error is not None:
            return Seen(error)
        for (layer, component), values in content(request.seed, len(ids)).items():
            self._memory.plane(layer, component, self._wanted)[ids] = self._own(values)
        self._good.add(number)
        result = read.result(0)
        return Seen(None, result.confirmed, result.bytes)

    def wait_quiet(self, number: int, timeout: float) -> bool:
        """Wait until a read's blocks may be used again. They get other bytes, which must stay."""
        read, _, ids = self._reads[number]
        if not read.wait_quiet(timeout):
            return False
        del self._reads[number]
        for layer in range(MODEL.layers):
            for component in MODEL.components:
                for cells in (self._memory.cells, self._wanted):
                    self._memory.plane(layer, component, cells)[ids] = POISON
        return True

    def right(self) -> bool:
        """Whether every byte that a read reported good is good, and every other is unchanged. Blocks of other reads may
        hold anything until the reads are quiet."""
        found = self._memory.cells.copy()
        for number, (_, _, ids) in self._reads.items():
            if number not in self._good:
                for layer, component in itertools.product(range(MODEL.layers), MODEL.components):
                    wanted = self._memory.plane(layer, component, self._wanted)
                    self._memory.plane(layer, component, found)[ids] = wanted[ids]
        return bool(np.array_equal(found, self._wanted))

    def gauges(self) -> TransportGauges:
        """Of the transport."""
        return self._cache.gauges()

    def close(self) -> None:
        """End the engine in order."""
        self._client.close()
        self._memory.close()

    def _own(self, values: np.ndarray) -> np.ndarray:
        return values[:, self._memory.units.begin : self._memory.units.end]


def main(descriptor: int) -> None:
    # A process that waits in vain asks for the stacks of all threads.
    faulthandler.register(signal.SIGUSR1)
    # NIXL's package imports torch to ask for its CUDA version, half a minute in the machine.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    ranks: dict[str, Rank] = {}
    with Connection(descriptor) as pipe:
        while True:
            try:
                name, command, arguments, options = pipe.recv()
            except EOFError:
                return
            answer: Any = None
            try:
                if command == "open":
                    home, place = arguments
                    client = Client(home.address, tls=home.tls, options=NixlOptions(**home.options), **home.more)
                    ranks[name] = Rank(client, place)
                elif command == "close":
                    ranks.pop(name).close()
                else:
                    answer = getattr(ranks[name], command)(*arguments, **options)
            except Exception as error:
                answer = error
            pipe.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
