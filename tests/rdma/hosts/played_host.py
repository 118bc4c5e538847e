"""Two machines with a cable for each pair of cards, a node server on each, and the engines there."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvferry import TlsConfig
from kvferry._clock import now
from kvferry_server.domain.times import Times
from tests.rdma.hosts.exchanged import MODEL, Home, Place, Request
from tests.support.certificates import tls_flags
from tests.support.faults.reports import Seen
from tests.support.identifiers import unique_id
from tests.support.machines.emulated import Machine, Program
from tests.support.node_servers import READY
from tests.support.waiting import until

PORT = 7423
BLOCKS = 64
SOON = 60.0
"""Seconds that a step may take in a machine that is emulated on a busy host."""
PATIENCE = 60.0
"""Seconds of a card's retries, with a margin for a busy host."""
START = 240.0
"""Seconds that a program may take to start there."""
QUIET = {"PYTHONDONTWRITEBYTECODE": "1"}
TRANSPORTS = {"UCX_TLS": "rc_verbs,ud_verbs", "UCX_RC_RETRY_COUNT": "6", **QUIET}
"""With UCX's own 7 retries a card gives up after some seconds. To soft-RoCE, 7 means for ever; 6 is 6."""
SLOW: dict[str, Any] = {"chunk_descriptors": 1, "bytes_in_flight": 1, "warm_up_timeout": 20.0, "fence_time": 8.0}
"""So that a read is some hundred chunks, and a fault finds it under way."""
TIMES = Times(ttl=12.0, max_ttl=12.0, engine_ttl=6.0, hold=12.0, final=90.0, max_wait=60.0)
"""Short enough to see their ends, long enough for an emulated machine, and longer than a card's patience."""


class Host:
    """One of the machines, its node server and a process with engines.

    Args:
        machine: which.
        tls: of its node server and its engines.
        policy: of its node server: a file that the machine sees.
    """

    def __init__(self, machine: Machine, tls: TlsConfig, policy: Path) -> None:
        self.machine, self.tls = machine, tls
        self.address = f"10.77.0.{machine.number}:{PORT}"
        self.unix = "unix:/run/node.sock"
        settings = {key: value for key, value in asdict(TIMES).items() if key != "retire"}
        flags = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        self._server = [
            *("python", "-m", "kvferry_server.node.main", "--listen", self.address, "--unix", self.unix[5:]),
            *("--admin", "", "--drain", "1", "--policy", str(policy), *tls_flags(tls), *flags),
        ]
        self.server = self.start_server()
        self.engines = self.start_engines()

    def start_server(self) -> Program:
        """Start its node server; engines wait for it."""
        self.server = self.machine.start(self._server, QUIET)
        return self.server

    def restart_server(self) -> None:
        """End the node server in order, and start it again at its address."""
        self.server.signal(signal.SIGTERM)
        until(lambda: self.server.poll() is not None, SOON)
        self.start_server()

    def wait_serving(self) -> None:
        """Wait until its node server serves."""
        until(lambda: READY.search(self.server.log.read_text()) is not None, START)

    def shape(self, *netem: str) -> None:
        """Delay or lose the first card's packets: arguments of netem; none: no more."""
        change = ("replace", "dev", "eth1", "root", "netem", *netem) if netem else ("del", "dev", "eth1", "root")
        with suppress(RuntimeError) if not netem else nullcontext():
            self.machine.run("tc", "qdisc", *change)

    def counter(self, name: str, card: int = 0) -> int:
        """One of the counters of a card's RDMA device."""
        return int(self.machine.run("cat", f"/sys/class/infiniband/rxe{card}/ports/1/hw_counters/{name}"))

    def start_engines(self, environment: Mapping[str, str] = TRANSPORTS) -> Engines:
        """Start another process with engines."""
        command = ("python", "-m", "tests.rdma.hosts.host_program", "{fd}")
        return Engines(self, self.machine.start(command, environment, pipe=True))


class Engines:
    """A process of a host in which engines can be opened."""

    def __init__(self, host: Host, program: Program) -> None:
        self.host, self.program = host, program

    def open(self, place: Place, *, options: Mapping[str, Any] | None = None, **more: Any) -> Rank:
        """Open a rank, with NIXL's `options` and `more` arguments of its client."""
        name = f"{place.engine_id}.{place.rank}"
        self.send(name, "open", Home(self.host.unix, self.host.tls, more, dict(options or {})), place)
        # A program imports what it needs first, and the host may be busy.
        self.answer(START)
        return Rank(self, name, place)

    def call(self, name: str, command: str, *arguments: Any, within: float = 0.0, **options: Any) -> Any:
        """Call a command there that may wait for `within` seconds, and wait for it."""
        self.send(name, command, *arguments, **options)
        return self.answer(within + SOON)

    def send(self, name: str, command: str, *arguments: Any, **options: Any) -> None:
        """Begin something there."""
        self.program.pipe.send((name, command, arguments, options))

    def answer(self, timeout: float = SOON) -> Any:
        """The answer to the begun command; raises its exception."""
        if not self.program.pipe.poll(timeout):
            self.program.signal(signal.SIGUSR1)
            raise TimeoutError(f"no answer in {timeout} s; the stacks of its threads are in {self.program.log}")
        value = self.program.pipe.recv()
        if isinstance(value, Exception):
            raise value
        return value


class Rank:
    """A rank with the commands of `tests.rdma.hosts.host_program.Rank`."""

    def __init__(self, engines: Engines, name: str, place: Place) -> None:
        self.engines, self.name, self.place = engines, name, place

    def call(self, command: str, *arguments: Any, **options: Any) -> Any:
        """Do something there, and wait for it."""
        return self.engines.call(self.name, command, *arguments, **options)

    def close(self) -> None:
        """End it as it should be ended."""
        self.call("close")


def open_engine(
    engines: Sequence[Engines],
    prefix: str,
    units: Sequence[tuple[int, int]] = ((0, MODEL.heads),),
    **more: Any,
) -> list[Rank]:
    """An engine with a rank in each of these processes; the first is its scheduler's."""
    engine_id, token, serve = unique_id(prefix), "", more.pop("serve", True)
    ranks: list[Rank] = []
    for rank, (process, held) in enumerate(zip(engines, units, strict=True)):
        ranks.append(process.open(Place(engine_id, len(units), rank, held, token, serve), **more))
        token = token or ranks[0].call("token")
    return ranks


class Source:
    """An engine that others read from."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self._seeds = itertools.count(0, 2)
        self._random = np.random.default_rng(0)
        self._pinned: dict[int, Request] = {}
        self._released: dict[int, Any] = {}

    def publish(self, blocks: int = BLOCKS, **options: Any) -> Request:
        """Compute a request in random blocks, and publish it."""
        taken = {block for request in self._pinned.values() for block in request.ids}
        free = [block for block in range(MODEL.num_blocks) if block not in taken]
        ids = tuple(int(block) for block in self._random.permutation(free)[:blocks])
        seed = next(self._seeds)
        for rank in self.ranks:
            rank.call("write", ids, seed)
        request: Request = self.ranks[0].call("publish", ids, seed, **options)
        self._pinned[request.publication.number] = request
        return request

    def released(self, request: Request, within: float) -> Any:
        """The one release of a request, waited for; its blocks have other bytes then."""
        number, until = request.publication.number, now() + within
        while number not in self._released:
            if now() > until:
                raise TimeoutError(f"publication {number} was not released in {within} s")
            for release in self.ranks[0].call("released", 1.0):
                assert release.publication not in self._released, "released twice"
                self._released[release.publication] = release
                freed = self._pinned.pop(release.publication)
                for rank in self.ranks:
                    rank.call("write", freed.ids, freed.seed + 1)
        return self._released[number]


class Reader:
    """An engine that reads."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self._random = np.random.default_rng(1)
        self._free = set(range(MODEL.num_blocks))

    def warm(self, source: Source) -> None:
        """Do in advance the steps for which the first read from a source would wait, however slow on a busy host."""
        for rank in self.ranks:
            rank.call("warm", source.ranks[0].call("engine_reference"), START, within=START)

    def read(self, request: Request, **options: Any) -> Reading:
        """Begin a read on all ranks."""
        ids = [int(block) for block in self._random.permutation(sorted(self._free))[: len(request.ids)]]
        self._free.difference_update(ids)
        options |= {"read_id": unique_id("read"), "parties": len(self.ranks)}
        return Reading(self, ids, [rank.call("read", request, ids, **options) for rank in self.ranks])

    def right(self) -> bool:
        """Whether every byte that a read reported good is good, and every other is unchanged."""
        return all(rank.call("right") for rank in self.ranks)

    def idle(self) -> bool:
        """Whether nothing is read or uncertain, and no agent retired."""
        gauges = [rank.call("gauges") for rank in self.ranks]
        return not any(
            found.transfers + found.uncertain + found.chunks_in_flight + found.retired_agents for found in gauges
        )

    def free(self, ids: Sequence[int]) -> None:
        """Blocks of a read that is quiet."""
        self._free.update(ids)


class Reading:
    """A read that was begun."""

    def __init__(self, reader: Reader, ids: list[int], numbers: list[int]) -> None:
        self._reader, self._ids, self._numbers = reader, ids, numbers
        self.began = now()

    def outcome(self, within: float) -> Seen:
        """Wait for the read's end on all ranks: success, or one of the errors."""
        shares: list[Seen] = self._of_each("outcome", within, within=within)
        failed = [seen for seen in shares if seen.error is not None]
        moved = sum(seen.moved for seen in shares)
        return failed[0] if failed else Seen(None, all(seen.confirmed for seen in shares), moved)

    def wait_moving(self) -> bool:
        """Wait until some of its bytes have arrived; whether most have not."""
        return all(self._of_each("wait_moving"))

    def wait_quiet(self, within: float) -> bool:
        """Wait until its blocks may be used again, and use them."""
        quiet = all(self._of_each("wait_quiet", within, within=within))
        if quiet:
            self._reader.free(self._ids)
        return quiet

    def _of_each(self, command: str, *arguments: Any, within: float = 0.0) -> list[Any]:
        return [
            rank.call(command, number, *arguments)
            for rank, number in zip(self._reader.ranks, self._numbers, strict=True)
        ]


class Pair:
    """Two hosts, a source on the first and a reader on the second, and the cables between them."""

    def __init__(self, prefill: Host, decode: Host) -> None:
        self.prefill, self.decode = prefill, decode
        with ThreadPoolExecutor() as opening:
            source = opening.submit(open_engine, [prefill.engines], "prefill")
            reader = opening.submit(open_engine, [decode.engines], "decode", serve=False, options=SLOW)
        self.source, self.reader = Source(source.result()), Reader(reader.result())
        self.reader.warm(self.source)

    @property
    def both(self) -> tuple[Host, Host]:
        """The hosts."""
        return self.prefill, self.decode

    def plug(self, *, connected: bool) -> None:
        """Pull the cable of the first cards, or plug it in. Both ends see it."""
        for host in self.both:
            host.machine.plug(0, connected=connected)

    def wait_counter(self, name: str, before: int) -> None:
        """Wait until a counter of the reader's card has risen."""
        until(lambda: self.decode.counter(name) > before, SOON)

    def heal(self) -> None:
        """Make the network whole."""
        self.plug(connected=True)
        for host in self.both:
            host.shape()
            host.wait_serving()

    def moving(self, **options: Any) -> tuple[Request, Reading]:
        """A read under way, which the network slows: some of its bytes have arrived, most have not."""
        self.prefill.shape("delay", "20ms")
        while True:
            request = self.source.publish()
            reading = self.reader.read(request, **options)
            if reading.wait_moving():
                return request, reading
            self.served(request, reading)

    def served(self, request: Request, reading: Reading) -> Seen:
        """A read brings its bytes and no others, and its source gets one release."""
        seen = reading.outcome(SOON)
        assert seen.error is None, seen.error
        assert self.reader.right(), "wrong bytes were handed over as good, or others changed"
        assert reading.wait_quiet(SOON)
        assert self.source.released(request, SOON).outcome.name == "READ"
        return seen

    def works(self) -> Seen:
        """The next request is served as if nothing had happened, and nothing is left behind."""
        request = self.source.publish()
        seen = self.served(request, self.reader.read(request, timeout=SOON))
        until(self.reader.idle, SOON)
        return seen
