"""Two node servers, a source engine of two processes on one, two readers on the other, and the bytes of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvferry_server.domain.times import Times
from tests.support.faults.fault_engines import Reader, Source
from tests.support.faults.processes import EngineProcess, Node
from tests.support.node_servers import free_port
from tests.support.waiting import until

TIMES = Times(ttl=3.0, max_ttl=3.0, engine_ttl=6.0, hold=3.5, final=20.0, max_wait=20.0)
READING: dict[str, Any] = {
    "ucx_tls": "tcp",
    "chunk_descriptors": 1,
    "bytes_in_flight": 1,
    "warm_up_timeout": 3.0,
    "fence_time": 4.0,
}


class World:
    """All of it. Starts at once; `ready` waits for it.

    Args:
        folder: for sockets, logs and memories.
        sides: host and command-line prefix of the source's node and of the destination's.
        times: of the node servers.
        one_sided: a source that is stopped is read all the same.
        optimistic: short reads take no lease.
        relayed: the source's second rank has a node server of its own, which relays to the home.
        directory: in which the node servers list themselves, and in which readers find the source's home; empty: it
            stands in the references.
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
        relayed: bool = False,
        directory: str = "",
        **reading: Any,
    ) -> None:
        self._one_sided = one_sided
        self.optimistic, self._directory = optimistic, directory
        self._times = times
        self.sound = True
        """Whether it works as far as anybody knows; a scenario that fails leaves it otherwise."""
        self._folder = folder
        self._reading = {**READING, **reading}
        settings = {key: value for key, value in asdict(times).items() if key != "retire"}
        if directory:
            settings["directory"] = directory
        (host, self._source_prefix), (other, self._reader_prefix) = sides
        self.home = Node(folder / "home", f"{host}:{free_port()}", self._source_prefix, drain=1.0, **settings).start()
        self.node = Node(folder / "node", f"{other}:{free_port()}", self._reader_prefix, drain=1.0, **settings).start()
        self.relay = Node(folder / "relay", f"{host}:{free_port()}", self._source_prefix, drain=1.0, **settings)
        if relayed:
            self.relay.start()
        for node in self.nodes:
            node.ready()
        self.source = self._new_source()
        self.reader = self._new_reader()
        self.spare = self._new_reader()

    @property
    def standing(self) -> EngineProcess:
        """The process that a read stands still without."""
        return self.reader.process if self._one_sided else self.source.second

    @property
    def listed(self) -> bool:
        """Whether readers find the home in a directory."""
        return bool(self._directory)

    @property
    def nodes(self) -> list[Node]:
        """Its node servers, as far as they were started."""
        return [node for node in (self.home, self.node, self.relay) if node.started]

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

    def restarting_source(self) -> Iterator[None]:
        """`restart_source` in steps that wait for nothing; the source is another from the last step on."""
        self.source.close()
        successor = self._new_source(self.source.engine_id)
        yield from successor.starting()
        self.source = successor

    def replace_reader(self) -> None:
        """Another reader takes the place of one that is gone."""
        spare = self.spare.ready()
        self.reader.close()
        self.reader, self.spare = spare, self._new_reader()

    def close(self) -> None:
        """Kill everybody."""
        for party in (self.source, self.reader, self.spare):
            party.close()
        for node in self.nodes:
            node.kill()

    def _new_source(self, engine_id: str = "") -> Source:
        return Source(
            self.home,
            self._folder,
            self._source_prefix,
            ucx_tls=self._reading["ucx_tls"],
            engine_id=engine_id,
            optimistic=self.optimistic,
            relay=self.relay if self.relay.started else None,
            directory=self._directory,
        )

    def _new_reader(self) -> Reader:
        return Reader(
            self.node,
            self._folder,
            self._reader_prefix,
            optimistic=self.optimistic,
            directory=self._directory,
            **self._reading,
        )
