"""Destination engines within the measuring process: one that reads by itself, and one with engine ports."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.caches import CacheMemory, Ids, Layout
from benchmarks.measures import Action
from benchmarks.sources import Source
from kvferry import Blocks, Cache, Client, EngineSpec, NixlOptions
from kvferry.engine import ReadEnd, ReadTimes, SchedulerPort, WorkerPort

TIMEOUT = 60.0
STEP_PAUSE = 0.0002
"""Seconds between an engine's steps: what the rest of a step would compute, without Python's interpreter."""


class Reader:
    """A rank without a scheduler, which only reads."""

    def __init__(self, cache: Cache, memory: CacheMemory) -> None:
        self.cache, self.memory = cache, memory

    def action(self, reference: str, source_ids: Ids, ids: Ids) -> Action:
        """A read of a publication, as `Cache.read` to its result; verified."""
        blocks = {"full": Blocks(ids)}
        return Action(
            run=lambda: self.cache.read(reference, blocks).result(TIMEOUT),
            prepare=lambda: self.memory.poison(ids),
            verify=lambda: self.memory.check(ids, source_ids),
        )


@contextmanager
def reader(
    address: str,
    layout: Layout,
    *,
    heads: int = 0,
    huge: bool = True,
    options: NixlOptions | None = None,
    optimistic: bool = True,
) -> Iterator[Reader]:
    """A rank that only reads, until the end of the block.

    Args:
        address: of its node server.
        layout: of its cache.
        heads: how many of the model's heads it holds; 0: all.
        huge: whether its memory is in huge pages.
        options: how it reads.
        optimistic: whether its short reads take no lease.
    """
    memory = CacheMemory(layout, heads, huge=huge)
    with Client(address, options=options, optimistic=optimistic) as client:
        cache = client.register_cache(
            EngineSpec(f"reader-{secrets.token_hex(4)}", (layout.group(),)),
            planes=memory.planes(),
            regions=[memory.region],
            keep=memory,
            serve=False,
        )
        yield Reader(cache, memory)


@dataclass(frozen=True, slots=True)
class PortRequest:
    """What one request took, in seconds.

    Attributes:
        whole: from the source's `publish` until `finished` had the read.
        reference: from the source's `publish` until its reference was here.
        stages: of the read.
    """

    whole: float
    reference: float
    stages: ReadTimes


class PortEngine:
    """Scheduler and worker of one rank, in this process, that step until a read has ended."""

    def __init__(self, client: Client, layout: Layout) -> None:
        spec = EngineSpec(f"decode-{secrets.token_hex(4)}", (layout.group(),))
        self.memory = CacheMemory(layout)
        self.scheduler, self.worker = SchedulerPort(client, spec), WorkerPort(client, spec)
        self.worker.register(planes=self.memory.planes(), regions=[self.memory.region], keep=self.memory, serve=False)
        self.steps: list[float] = []
        """Seconds of each step's part that is kvferry's, of all reads so far."""

    def step(self) -> Sequence[ReadEnd]:
        """What an engine asks in each step; the reads that have ended.

        Raises:
            KvferryError: the read failed.
        """
        for read_id in self.scheduler.cancels():
            self.worker.cancel(read_id)
        self.scheduler.collect(self.worker.finished())
        self.scheduler.released()
        reads = self.scheduler.finished().reads
        for end in reads:
            if end.error is not None:
                raise end.error
        return reads

    def read(self, reference: str, ids: Ids) -> ReadEnd:
        """Read a publication, from `acquire` to `finished`."""
        self.scheduler.acquire("request", reference)
        attached = False
        while True:
            began = time.perf_counter()
            if not attached and self.scheduler.granted("request") is not None:
                self.worker.start(self.scheduler.attach("request", {"full": Blocks(ids)}))
                attached = True
            ended = self.step()
            self.steps.append(time.perf_counter() - began)
            if ended:
                return ended[0]
            time.sleep(STEP_PAUSE)

    def from_publish_to_finished(self, source: Source, source_ids: Ids, ids: Ids) -> PortRequest:
        """One request: the source publishes, the reference comes by a pipe, this engine reads; verified."""
        self.memory.poison(ids)
        published = source.publish(source_ids.tolist())
        arrived = time.perf_counter()
        end = self.read(published.reference, ids)
        ended = time.perf_counter()
        self.memory.check(ids, source_ids)
        return PortRequest(ended - published.began, arrived - published.began, end.times)

    def close(self) -> None:
        """End both ports."""
        self.worker.close()
        self.scheduler.close()


@contextmanager
def port_engine(address: str, layout: Layout, *, options: NixlOptions | None = None) -> Iterator[PortEngine]:
    """An engine of one rank with ports, until the end of the block."""
    with Client(address, options=options) as client:
        engine = PortEngine(client, layout)
        try:
            yield engine
        finally:
            engine.close()
