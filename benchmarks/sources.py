"""A source engine in a process of its own: it publishes what it is told to, through the engine ports, and serves the
same memory to raw NIXL."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.caches import CacheMemory, Layout
from benchmarks.raw_nixl import RawPeer, RawServer
from kvferry import Blocks, Client, EngineSpec, NixlOptions
from kvferry.engine import SchedulerPort, WorkerPort

STOP_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class Published:
    """Attributes:
    reference: of the publication.
    began: `time.perf_counter` when `publish` was called; the same clock in all processes of a host.
    """

    reference: str
    began: float


class Source:
    """The source process, as the measuring process sees it."""

    def __init__(self, pipe: Connection, engine_reference: str, raw: Sequence[RawPeer]) -> None:
        self._pipe = pipe
        self.engine_reference = engine_reference
        self.raw = tuple(raw)
        """Its memory for raw NIXL, once for each of the options asked."""

    def publish(self, ids: Sequence[int], reads: int = 1) -> Published:
        """Publish these blocks for so many reads; at most 1024."""
        self._pipe.send((list(ids), reads))
        answer = self._pipe.recv()
        if not isinstance(answer, Published):
            raise TypeError(answer)
        return answer

    def hop(self) -> None:
        """Send and get a message as `publish` does, without publishing."""
        self._pipe.send(None)
        self._pipe.recv()


def _run(
    address: str, layout: Layout, huge: bool, options: NixlOptions, raw: Sequence[NixlOptions], pipe: Connection
) -> None:
    """The process."""
    memory = CacheMemory(layout, huge=huge)
    memory.fill()
    spec = EngineSpec(f"source-{secrets.token_hex(4)}", (layout.group(),))
    with Client(address, options=options) as client:
        scheduler, worker = SchedulerPort(client, spec), WorkerPort(client, spec)
        worker.register(planes=memory.planes(), regions=[memory.region], keep=memory)
        servers = [RawServer(memory.region, chosen) for chosen in raw]
        pipe.send((scheduler.engine_reference, [server.peer for server in servers]))
        while True:
            try:
                command = pipe.recv()
            except EOFError:
                break
            if command is None:
                pipe.send(None)
                continue
            ids, reads = command
            scheduler.released()
            began = time.perf_counter()
            published = scheduler.publish("request", {"full": Blocks(ids)}, expected_reads=reads)
            pipe.send(Published(published.reference, began))
        worker.close()
        scheduler.close()


@contextmanager
def source(
    address: str,
    layout: Layout,
    *,
    huge: bool = True,
    options: NixlOptions | None = None,
    raw: Sequence[NixlOptions] = (),
) -> Iterator[Source]:
    """The source process, until the end of the block.

    Args:
        address: of its node server.
        layout: of its cache, whose content is `CacheMemory.fill`.
        huge: whether its memory is in huge pages.
        options: how it serves.
        raw: serve the memory to raw NIXL with each of these options as well.
    """
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(address, layout, huge, options or NixlOptions(), tuple(raw), theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield Source(ours, *ours.recv())
    finally:
        ours.close()
        process.join(STOP_TIMEOUT)
