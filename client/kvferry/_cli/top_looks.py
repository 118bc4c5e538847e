"""The looks of `kvferry top` at node servers, and the differences between two looks at one node server."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry._cli.connection import Node
from kvferry._cli.render import read_state
from kvferry._clock import from_duration
from kvferry.errors import KvferryError
from kvferry.v1 import introspection_pb2 as ipb

PAGES = 4
"""Most pages of a list that one look asks for, each of at most 1000 entries and 256 KiB: a look stays cheap for the
node server, however many leases it has."""


@dataclass(frozen=True, slots=True)
class ListedRead:
    """A read, as the source's home knows it, in seconds and bytes. `remaining` is 0 once the lease has ended. A read
    with a `router_key` and no publication waits for the publication, without a lease."""

    server: str
    source: str
    publication: int
    request_id: str
    reader: str
    lease_number: int
    state: str
    reported: int
    parties: int
    bytes: int
    remaining: float
    router_key: str = ""

    @property
    def waits(self) -> bool:
        return not self.publication

    @property
    def alive(self) -> bool:
        return self.remaining > 0 or self.waits


@dataclass(slots=True)
class Peers:
    """All reads of one engine from another, at one node server."""

    source: str
    reader: str
    reading: int = 0
    """Reads with live leases."""
    ended: int = 0
    """Ended reads that the node server still lists."""
    bytes: int = 0
    """Reported by the ranks."""
    rate: float | None = None
    """Reported bytes per second since the previous look; None: this is the first look."""


@dataclass(frozen=True, slots=True)
class Look:
    """The answer of one node server. `engines`, `publications` and `leases` are totals."""

    server: str
    error: str = ""
    """Why the node server did not answer; empty: it did."""
    restarted: bool = False
    """The node server was restarted since the previous look."""
    engines: int = 0
    publications: int = 0
    leases: int = 0
    transfers: Sequence[ListedRead] = ()
    """The first reads, or all."""
    whole: bool = True
    """Whether the lists were short enough to be complete."""
    peers: Sequence[Peers] = ()

    @property
    def rate(self) -> float | None:
        """Bytes per second by all peers; None: this is the first look."""
        rates = [peers.rate for peers in self.peers]
        return None if None in rates else sum(rate for rate in rates if rate is not None)


class Looker:
    """Looks repeatedly at one node server. One thread at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._epoch = b""
        self._bytes: dict[tuple[bytes, int, int], int] = {}
        self._at = 0.0

    def look(self) -> Look:
        """Ask the node server. Without an answer the `Look` has an error."""
        node = self._node
        try:
            listed, read = node.listing("engines", PAGES), node.listing("transfers", PAGES)
        except KvferryError as error:
            return Look(node.server, error=error.message)
        restarted = bool(self._epoch) and self._epoch != read.home_epoch
        if restarted:
            self._bytes, self._at = {}, 0.0
        self._epoch = read.home_epoch
        return Look(
            node.server,
            restarted=restarted,
            engines=len(listed.engines),
            publications=sum(engine.publications for engine in listed.engines),
            leases=sum(engine.leases for engine in listed.engines),
            transfers=[self._listed(summary) for summary in read.transfers],
            whole=not (listed.next_page_token or read.next_page_token),
            peers=self._peers(read.transfers),
        )

    def _peers(self, transfers: Sequence[ipb.TransferSummary]) -> list[Peers]:
        now, before = time.monotonic(), self._at
        known: dict[tuple[bytes, int, int], int] = {}
        moved: dict[tuple[str, str], int] = defaultdict(int)
        found: dict[tuple[str, str], Peers] = {}
        for transfer in transfers:
            read, source = transfer.read, transfer.source
            key = source.incarnation, transfer.publication, read.lease_number
            pair = source.engine_id, read.reader.engine_id
            peers = found.setdefault(pair, Peers(*pair))
            alive = transfer.lease_remaining.ToNanoseconds() > 0 or transfer.HasField("waited")
            peers.reading += alive
            peers.ended += not alive
            peers.bytes += read.bytes
            known[key] = read.bytes
            moved[pair] += max(0, read.bytes - self._bytes.get(key, 0))
        for pair, peers in found.items():
            peers.rate = moved[pair] / max(1e-3, now - before) if before else None
        self._bytes, self._at = known, now
        return list(found.values())

    def _listed(self, summary: ipb.TransferSummary) -> ListedRead:
        read = summary.read
        return ListedRead(
            self._node.server,
            summary.source.engine_id,
            summary.publication,
            summary.request_id,
            read.reader.engine_id,
            read.lease_number,
            read_state(summary),
            read.reported,
            read.parties,
            read.bytes,
            from_duration(summary.lease_remaining),
            summary.router_key,
        )
