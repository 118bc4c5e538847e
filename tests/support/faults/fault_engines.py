"""A source engine of two processes, readers of one, and the bytes of all of them.

The source's scheduler holds rank 0, its second process rank 1. A reader is an engine of one process and one rank. What
a source has published it overwrites as soon as it is released, as an engine would that reuses its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvferry import Interval, Publication, Release
from kvferry._clock import now
from kvferry.errors import KvferryError
from kvferry.stats import TransportGauges
from tests.support.caches import POISON, Memory, Model, shards
from tests.support.faults.processes import SOON, EngineProcess, Node
from tests.support.faults.reports import Job, Seen
from tests.support.identifiers import unique_id
from tests.support.references import without_marks

MODEL = Model(layers=4, heads=4, head_dim=16, num_blocks=256)
BLOCKS = 64
"""Of a request: with one descriptor in a chunk a read is a thousand chunks, so that a fault finds it under way."""

Content = dict[tuple[int, str], np.ndarray]


@dataclass(eq=False)
class Request:
    """A published request.

    Attributes:
        ids: the source's blocks.
        content: bytes by (layer, component): ``uint8[blocks, heads, tokens, state_bytes]``.
        tokens: its prompt.
        publication: as its source knows it, from when it is published.
        releases: that its source was told; one, in the end.
    """

    ids: list[int]
    content: Content
    tokens: Sequence[int] = ()
    publication: Publication = field(init=False)
    releases: list[Release] = field(default_factory=list)


class Source:
    """The source engine. Starts at once; `ready` waits for it.

    Args:
        home: its node server.
        folder: for its memory.
        prefix: of the command lines of its processes.
        ucx_tls: how its ranks are read; empty: as UCX chooses.
        engine_id: a former source's, which it takes the place of.
        optimistic: whether its references have hints.
        relay: its second process's node server; None: its home.
        directory: of homes, which its references do not name then; empty: none.
    """

    def __init__(
        self,
        home: Node,
        folder: Path,
        prefix: Sequence[str] = (),
        *,
        ucx_tls: str = "tcp",
        engine_id: str = "",
        optimistic: bool = False,
        relay: Node | None = None,
        directory: str = "",
    ) -> None:
        self.engine_id = engine_id or unique_id("source")
        self._prefix, self._options = prefix, {"ucx_tls": ucx_tls}
        self._optimistic, self._directory = optimistic, directory
        self._nodes = home, relay or home
        units = shards(MODEL.heads, 2)
        self.memories = [Memory(MODEL, held, folder / unique_id("memory")) for held in units]
        self.scheduler = self._process(0, "")
        self.rank: EngineProcess | None = None
        self.requests: dict[int, Request] = {}
        self._computed: set[int] = set()
        self._random = np.random.default_rng(0)

    def _process(self, rank: int, token: str) -> EngineProcess:
        memory = self.memories[rank]
        units = (memory.units.begin, memory.units.end)
        job = Job(
            self._nodes[rank].address,
            self.engine_id,
            2,
            rank,
            units,
            memory.path,
            MODEL,
            token=token,
            options=self._options,
            optimistic=self._optimistic,
            directory=self._directory,
        )
        return EngineProcess(job, self._prefix)

    def ready(self) -> Source:
        """Wait until both ranks are registered."""
        self.scheduler.ready()
        self._start_second().ready()
        return self

    def starting(self) -> Iterator[None]:
        """`ready` in steps that wait for nothing, for those who have other things to do meanwhile."""
        yield from self.scheduler.starting()
        yield from self._start_second().starting()

    def _start_second(self) -> EngineProcess:
        self.rank = self._process(1, self.scheduler.call("token"))
        return self.rank

    @property
    def processes(self) -> list[EngineProcess]:
        """Its processes, as far as they were started."""
        return [self.scheduler] if self.rank is None else [self.scheduler, self.rank]

    @property
    def second(self) -> EngineProcess:
        """The process that is a rank and nothing else."""
        if self.rank is None:
            raise RuntimeError("the source is not ready")
        return self.rank

    def publish(self, blocks: int = BLOCKS, **options: Any) -> Request:
        """Publish a request of random bytes in random blocks."""
        request = self.compute(blocks)
        name = f"request-{len(self.requests)}"
        self.published(request, self.scheduler.call("publish", name, request.ids, request.tokens, **options))
        return request

    def free(self) -> list[int]:
        """Blocks that no request has."""
        taken = {block for request in self.requests.values() if not request.releases for block in request.ids}
        taken |= self._computed
        return [block for block in range(MODEL.num_blocks) if block not in taken]

    def compute(self, blocks: int) -> Request:
        """A request of random bytes in random blocks, which nobody else has; `published` is to be called for it."""
        ids = [int(block) for block in self._random.permutation(self.free())[:blocks]]
        self._computed.update(ids)
        shape = (blocks, MODEL.heads, MODEL.block_tokens, MODEL.state_bytes(""))
        content = {
            (layer, component): self._random.integers(0, POISON, shape, np.uint8)
            for layer in range(MODEL.layers)
            for component in MODEL.components
        }
        self._write(ids, content)
        tokens = self._random.integers(0, 1 << 17, blocks * MODEL.block_tokens).tolist()
        return Request(ids, content, tokens)

    def published(self, request: Request, publication: Publication) -> None:
        """A request's blocks were offered."""
        request.publication = publication
        self.requests[publication.number] = request
        self._computed.difference_update(request.ids)

    def collect(self, timeout: float = 0.0) -> list[Request]:
        """Hear what was released, having waited for the first, and use those blocks for something else at once."""
        self.scheduler.send("released", timeout)
        found = []
        for release in self.scheduler.answer(timeout + SOON):
            found.append(self.hear(release))
        return found

    def hear(self, release: Release) -> Request:
        """A request was released: use its blocks for something else at once."""
        request = self.requests[release.publication]
        request.releases.append(release)
        self.overwrite(request)
        return request

    def overwrite(self, request: Request) -> None:
        """Fill a request's blocks with other bytes."""
        self._write(request.ids, {key: POISON - 1 - values for key, values in request.content.items()})

    def released(self, request: Request, within: float) -> Release:
        """The one release of a request, waited for."""
        until = now() + within
        while not request.releases:
            if now() > until:
                raise TimeoutError(f"publication {request.publication.number} was not released in {within} s")
            self.collect(min(1.0, within))
        return request.releases[0]

    def close(self) -> None:
        """Kill what runs of it."""
        for process in self.processes:
            process.kill()
        for memory in self.memories:
            memory.close()

    def _write(self, ids: list[int], content: Content) -> None:
        for memory in self.memories:
            for (layer, component), values in content.items():
                memory.plane(layer, component)[ids] = values[:, memory.units.begin : memory.units.end]


@dataclass(eq=False)
class Reading:
    """A read that was begun.

    Attributes:
        reader: whose.
        request: what is read.
        ids: blocks that it is read into.
        number: the process's name of it; -1 until a process that was stopped has told it.
        began: when.
    """

    reader: Reader
    request: Request
    ids: list[int]
    number: int
    began: float

    def outcome(self, within: float) -> Seen:
        """How it ended, waited for; good bytes are looked at."""
        self.reader.process.send("outcome", self.number, within)
        seen: Seen = self.reader.process.answer(within + SOON)
        if seen.error is None:
            self.reader.expect(self)
        return seen

    def wait_moved(self) -> None:
        """Wait until its last byte has arrived, or it has ended otherwise."""
        self.reader.process.call("wait_moved", self.number)

    def wait_quiet(self, within: float) -> bool:
        """Wait until its blocks may be reused, and reuse them."""
        self.reader.process.send("wait_quiet", self.number, within)
        quiet = bool(self.reader.process.answer(within + SOON))
        if quiet:
            self.reader.free(self)
        return quiet


class Reader:
    """A destination engine. Starts at once; `ready` waits for it.

    Args:
        node: its node server.
        folder: for its memory.
        prefix: of the command line of its process.
        optimistic: whether its short reads take no lease.
        directory: of homes; empty: none.
        options: of NIXL.
    """

    def __init__(
        self,
        node: Node,
        folder: Path,
        prefix: Sequence[str] = (),
        *,
        optimistic: bool = False,
        directory: str = "",
        **options: Any,
    ) -> None:
        self.engine_id = unique_id("reader")
        whole = Interval(0, MODEL.heads)
        self.memory = Memory(MODEL, whole, folder / unique_id("memory"))
        self._wanted = Memory(MODEL, whole, folder / unique_id("wanted"))
        self._random = np.random.default_rng(1)
        self._free = set(range(MODEL.num_blocks))
        job = Job(
            node.address,
            self.engine_id,
            1,
            0,
            (0, MODEL.heads),
            self.memory.path,
            MODEL,
            serve=False,
            options=options,
            optimistic=optimistic,
            directory=directory,
        )
        self.process = EngineProcess(job, prefix)

    @property
    def processes(self) -> list[EngineProcess]:
        """Its process."""
        return [self.process]

    def ready(self) -> Reader:
        """Wait until it is registered."""
        self.process.ready()
        return self

    def read(self, request: Request, *, tokens: Sequence[int] = (), **options: Any) -> Reading:
        """Begin a read; with `tokens`, for another prompt, with a reference that does not say whose it is."""
        ids, began = self.take(len(request.ids)), now()
        reference = without_marks(request.publication.reference) if tokens else request.publication.reference
        try:
            number = self.process.call("read", reference, ids, tokens or request.tokens, **options)
        except KvferryError:
            self._free.update(ids)
            raise
        return Reading(self, request, ids, number, began)

    def send_read(self, request: Request, **options: Any) -> Reading:
        """Begin a read in a process that is stopped, for when it goes on."""
        ids = self.take(len(request.ids))
        self.process.send("read", request.publication.reference, ids, request.tokens, **options)
        return Reading(self, request, ids, -1, now())

    def read_until_moving(
        self, request: Request, stop: Sequence[EngineProcess], **options: Any
    ) -> tuple[Reading, bool]:
        """Begin a read and stop processes while its bytes are under way; whether that came about."""
        ids, began = self.take(len(request.ids)), now()
        pids = [0 if process is self.process else process.pid for process in stop]
        reference = request.publication.reference
        self.process.send("read_until_moving", reference, ids, request.tokens, pids, **options)
        while not self.process.answers(0.01):
            if self.process in stop and self.process.stopped:
                # It answers when it goes on.
                return Reading(self, request, ids, -1, began), True
        number, moving = self.process.answer()
        for process in stop if moving else ():
            process.wait_stopped()
        return Reading(self, request, ids, number, began), moving

    def expect(self, reading: Reading) -> None:
        """A read says that its bytes are good."""
        for (layer, component), values in reading.request.content.items():
            self._wanted.plane(layer, component)[reading.ids] = values

    def free(self, reading: Reading) -> None:
        """A read is quiet: its blocks get other bytes, which must stay."""
        for layer in range(MODEL.layers):
            for component in MODEL.components:
                self.memory.plane(layer, component)[reading.ids] = POISON
                self._wanted.plane(layer, component)[reading.ids] = POISON
        self._free.update(reading.ids)

    def right(self) -> bool:
        """Whether every byte that a read called good is so, and every byte of no read is as it was."""
        return bool(np.array_equal(self.memory.cells, self._wanted.cells))

    def gauges(self) -> TransportGauges:
        """Of its transport."""
        found: TransportGauges = self.process.call("gauges")
        return found

    def idle(self) -> bool:
        """Whether nothing is read or uncertain, and no agent given up."""
        gauges = self.gauges()
        return gauges.transfers + gauges.uncertain + gauges.chunks_in_flight + gauges.retired_agents == 0

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.memory.close()
        self._wanted.close()

    def take(self, count: int) -> list[int]:
        """So many blocks that no read has; none, if there are not so many."""
        if count > len(self._free):
            return []
        ids = [int(block) for block in self._random.permutation(sorted(self._free))[:count]]
        self._free.difference_update(ids)
        return ids

    def good(self, reading: Reading) -> bool:
        """Whether a read's blocks hold the bytes of its request."""
        return all(
            np.array_equal(self.memory.plane(layer, component)[reading.ids], values)
            for (layer, component), values in reading.request.content.items()
        )
