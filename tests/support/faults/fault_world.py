"""Two node servers, a source engine of two processes on one, two readers on the other, and the bytes of all of them.

The source's scheduler holds rank 0, its second process rank 1. A reader is an engine of one process and one rank. What
a source has published it overwrites as soon as it is released, as an engine would that reuses its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvferry import Interval, Publication, Release
from kvferry._clock import now
from kvferry.stats import TransportGauges
from kvferry_server.domain.times import Times
from tests.support.caches import POISON, Memory, Model, shards
from tests.support.faults.processes import SOON, EngineProcess, Node
from tests.support.faults.reports import Job, Seen
from tests.support.identifiers import unique_id
from tests.support.node_servers import free_port
from tests.support.references import without_marks
from tests.support.waiting import until

MODEL = Model(layers=4, heads=4, head_dim=16, num_blocks=256)
BLOCKS = 64
"""Of a request: with one descriptor in a chunk a read is a thousand chunks, so that a fault finds it under way."""

TIMES = Times(ttl=3.0, max_ttl=3.0, engine_ttl=3.0, hold=3.5, final=20.0, max_wait=20.0)
READING: dict[str, Any] = {
    "ucx_tls": "tcp",
    "chunk_descriptors": 1,
    "bytes_in_flight": 1,
    "warm_up_timeout": 3.0,
    "fence_time": 4.0,
}

Content = dict[tuple[int, str], np.ndarray]


@dataclass(eq=False)
class Request:
    """A published request.

    Attributes:
        publication: as its source knows it.
        ids: the source's blocks.
        content: bytes by (layer, component): ``uint8[blocks, heads, tokens, state_bytes]``.
        tokens: its prompt.
        releases: that its source was told; one, in the end.
    """

    publication: Publication
    ids: list[int]
    content: Content
    tokens: Sequence[int] = ()
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
    ) -> None:
        self.engine_id = engine_id or unique_id("source")
        self._home, self._prefix, self._options = home, prefix, {"ucx_tls": ucx_tls}
        self._optimistic = optimistic
        units = shards(MODEL.heads, 2)
        self.memories = [Memory(MODEL, held, folder / unique_id("memory")) for held in units]
        self.scheduler = self._process(0, "")
        self.rank: EngineProcess | None = None
        self.requests: dict[int, Request] = {}
        self._random = np.random.default_rng(0)

    def _process(self, rank: int, token: str) -> EngineProcess:
        memory = self.memories[rank]
        units = (memory.units.begin, memory.units.end)
        job = Job(
            self._home.address,
            self.engine_id,
            2,
            rank,
            units,
            memory.path,
            MODEL,
            token=token,
            options=self._options,
            optimistic=self._optimistic,
        )
        return EngineProcess(job, self._prefix)

    def ready(self) -> Source:
        """Wait until both ranks are registered."""
        self.scheduler.ready()
        self.rank = self._process(1, self.scheduler.call("token")).ready()
        return self

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
        taken = {block for request in self.requests.values() if not request.releases for block in request.ids}
        free = [block for block in range(MODEL.num_blocks) if block not in taken]
        ids = [int(block) for block in self._random.permutation(free)[:blocks]]
        shape = (blocks, MODEL.heads, MODEL.block_tokens, MODEL.state_bytes(""))
        content = {
            (layer, component): self._random.integers(0, POISON, shape, np.uint8)
            for layer in range(MODEL.layers)
            for component in MODEL.components
        }
        self._write(ids, content)
        tokens = self._random.integers(0, 1 << 17, blocks * MODEL.block_tokens).tolist()
        publication = self.scheduler.call("publish", f"request-{len(self.requests)}", ids, tokens, **options)
        request = self.requests[publication.number] = Request(publication, ids, content, tokens)
        return request

    def collect(self, timeout: float = 0.0) -> list[Request]:
        """Hear what was released, having waited for the first, and use those blocks for something else at once."""
        self.scheduler.send("released", timeout)
        found = []
        for release in self.scheduler.answer(timeout + SOON):
            request = self.requests[release.publication]
            request.releases.append(release)
            found.append(request)
            self.overwrite(request)
        return found

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
        options: of NIXL.
    """

    def __init__(
        self, node: Node, folder: Path, prefix: Sequence[str] = (), *, optimistic: bool = False, **options: Any
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
        )
        self.process = EngineProcess(job, prefix)

    def ready(self) -> Reader:
        """Wait until it is registered."""
        self.process.ready()
        return self

    def read(self, request: Request, *, tokens: Sequence[int] = (), **options: Any) -> Reading:
        """Begin a read; with `tokens`, for another prompt, with a reference that does not say whose it is."""
        ids, began = self._take(len(request.ids)), now()
        reference = without_marks(request.publication.reference) if tokens else request.publication.reference
        number = self.process.call("read", reference, ids, tokens or request.tokens, **options)
        return Reading(self, request, ids, number, began)

    def send_read(self, request: Request, **options: Any) -> Reading:
        """Begin a read in a process that is stopped, for when it goes on."""
        ids = self._take(len(request.ids))
        self.process.send("read", request.publication.reference, ids, request.tokens, **options)
        return Reading(self, request, ids, -1, now())

    def read_until_moving(
        self, request: Request, stop: Sequence[EngineProcess], **options: Any
    ) -> tuple[Reading, bool]:
        """Begin a read and stop processes while its bytes are under way; whether that came about."""
        ids, began = self._take(len(request.ids)), now()
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

    def _take(self, count: int) -> list[int]:
        ids = [int(block) for block in self._random.permutation(sorted(self._free))[:count]]
        self._free.difference_update(ids)
        return ids


class World:
    """All of it. Starts at once; `ready` waits for it.

    Args:
        folder: for sockets, logs and memories.
        sides: host and command-line prefix of the source's node and of the destination's.
        times: of the node servers.
        one_sided: a source that is stopped is read all the same.
        optimistic: short reads take no lease.
        reading: of NIXL in the readers; `ucx_tls` is the source's too.
    """

    def __init__(
        self,
        folder: Path,
        sides: Sequence[tuple[str, Sequence[str]]] = (("127.0.0.1", ()), ("127.0.0.1", ())),
        times: Times = TIMES,
        *,
        one_sided: bool = False,
        optimistic: bool = False,
        **reading: Any,
    ) -> None:
        self._one_sided = one_sided
        self.optimistic = optimistic
        self._times = times
        self.sound = True
        """Whether it works as far as anybody knows; a scenario that fails leaves it otherwise."""
        self._folder = folder
        self._reading = {**READING, **reading}
        settings = {key: value for key, value in asdict(times).items() if key != "retire"}
        (host, self._source_prefix), (other, self._reader_prefix) = sides
        self.home = Node(folder / "home", f"{host}:{free_port()}", self._source_prefix, drain=1.0, **settings).start()
        self.node = Node(folder / "node", f"{other}:{free_port()}", self._reader_prefix, drain=1.0, **settings).start()
        self.home.ready()
        self.node.ready()
        self.source = self._new_source()
        self.reader = self._new_reader()
        self.spare = self._new_reader()

    @property
    def standing(self) -> EngineProcess:
        """The process that a read stands still without."""
        return self.reader.process if self._one_sided else self.source.second

    def ready(self) -> World:
        """Wait until everybody is there."""
        self.source.ready()
        self.reader.ready()
        self.spare.ready()
        return self

    def restart_source(self) -> None:
        """Start the source engine again, in a new incarnation, under its engine_id."""
        engine_id = self.source.engine_id
        self.source.close()
        # A home that has just started takes both incarnations, since it cannot tell which is the older, and keeps the
        # dead one for as long as it may come back.
        until(lambda: self.home.uptime() > self._times.engine_ttl)
        self.source = self._new_source(engine_id).ready()

    def replace_reader(self) -> None:
        """Another reader takes the place of one that is gone."""
        spare = self.spare.ready()
        self.reader.close()
        self.reader, self.spare = spare, self._new_reader()

    def close(self) -> None:
        """Kill everybody."""
        for party in (self.source, self.reader, self.spare):
            party.close()
        self.home.kill()
        self.node.kill()

    def _new_source(self, engine_id: str = "") -> Source:
        return Source(
            self.home,
            self._folder,
            self._source_prefix,
            ucx_tls=self._reading["ucx_tls"],
            engine_id=engine_id,
            optimistic=self.optimistic,
        )

    def _new_reader(self) -> Reader:
        return Reader(self.node, self._folder, self._reader_prefix, optimistic=self.optimistic, **self._reading)
