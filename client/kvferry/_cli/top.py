"""`kvferry top`: looks repeatedly at node servers, and shows them as a screen, lines or JSON; rates are differences
between two looks at one node server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, Connection, Node, with_connection
from kvferry._cli.render import console, duration, read_state, safe, size, table
from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from kvferry.v1 import introspection_pb2 as ipb

INTERVAL = 2.0
LEAST_INTERVAL = 0.5  # Least seconds between two looks, because each look makes node servers list their reads
MOST_INTERVAL = 3600.0
SERVERS_AT_ONCE = 16  # How many node servers are asked at once
PAGES = 4
"""Most pages of a list that one look asks for, each of at most 1000 entries and 256 KiB: a look stays cheap for the
node server, however many leases it has."""
MOST_LISTED = 100  # Most reads, and pairs of engines, in JSON and in lines
FRAME = 4  # Lines of a table that are not rows: title, head, rule, and the line that counts omitted rows
SHOWN = ("server", "error", "restarted", "engines", "publications", "leases", "whole")
"""The fields of a `Look` that JSON has unchanged."""


@with_connection
def top(
    server: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVFERRY_SERVER",
            metavar="ADDRESS",
            help="Node server to look at: unix:/path or host:port. May be given several times.",
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(min=LEAST_INTERVAL, max=MOST_INTERVAL, metavar="SECONDS", help="Time between two looks."),
    ] = INTERVAL,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each look, in a line.")] = False,
    *,
    connection: Connection,
) -> None:
    """Watch what moves: live reads, rates, leases and peers.

    Rates are of bytes that ranks have reported, which they do when they end. In a terminal it draws a screen; a pipe
    gets lines, or with --json a JSON object for each look, in a line of its own.
    """
    try:
        with ExitStack() as stack:
            names = dict.fromkeys(server or [DEFAULT_SERVER])
            lookers = [Looker(stack.enter_context(connection.node(name))) for name in names]
            threads = ThreadPoolExecutor(min(len(lookers), SERVERS_AT_ONCE), "kvferry-top")
            # The channels, which are closed after the pool, end calls in progress.
            stack.callback(threads.shutdown, wait=False, cancel_futures=True)
            drawn = sys.stdout.isatty() and not (once or as_json)
            show = stack.enter_context(_screen(interval)) if drawn else _print_json if as_json else _print_lines
            while True:
                began = time.monotonic()
                looks = list(threads.map(Looker.look, lookers))
                show(looks)
                if once:
                    raise typer.Exit(any(look.error for look in looks))
                time.sleep(max(0.0, began + interval - time.monotonic()))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of the pipe has read enough, like `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _print_json(looks: Sequence[Look]) -> None:
    values = {
        "time": time.time(),
        "servers": [{name: getattr(look, name) for name in SHOWN} | {"bytes_per_second": look.rate} for look in looks],
        "peers": [{"server": server, **dataclasses.asdict(peers)} for server, peers in busiest(looks)[:MOST_LISTED]],
        "transfers": [dataclasses.asdict(read) for read in newest(looks)[:MOST_LISTED]],
    }
    print(json.dumps(values), flush=True)


def _print_lines(looks: Sequence[Look]) -> None:
    print("\n".join(lines(looks, time.strftime("%H:%M:%S"))), flush=True)


@contextmanager
def _screen(interval: float) -> Iterator[Callable[[Sequence[Look]], None]]:
    """Draw on the terminal, and restore its screen at the end, also after SIGTERM."""
    from rich.live import Live

    screen = Screen(interval)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        # Drawn several times a second, to follow the terminal's size.
        with Live(screen, console=console(), screen=True, refresh_per_second=4):
            yield screen.show
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True)
class Screen:
    """The latest looks, drawn to fit the terminal."""

    interval: float
    looks: Sequence[Look] = ()
    at: str = ""

    def show(self, looks: Sequence[Look]) -> None:
        self.looks, self.at = looks, time.strftime("%H:%M:%S")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        looks = self.looks
        head = f"kvferry top  {self.at}  every {self.interval:g} s  (Ctrl-C ends it)"
        yield Text(head, no_wrap=True, overflow="crop")
        left = max(0, (options.max_height or console.height) - 1)
        pairs, reads = busiest(looks), newest(looks)
        servers = min(len(looks), max(1, left // 3 - FRAME))
        yield _servers(looks[:servers], len(looks) - servers)
        left -= servers + FRAME
        rows = max(0, min(len(pairs), left // 2 - FRAME))
        if rows:
            yield _pairs(pairs[:rows], len(pairs) - rows)
            left -= rows + FRAME
        rows = max(0, min(len(reads), left - FRAME))
        if rows:
            live = sum(look.leases for look in looks)
            yield _reads(reads[:rows], live - sum(read.remaining > 0 for read in reads[:rows]))


def lines(looks: Sequence[Look], at: str) -> Iterator[str]:
    """Return the looks as lines, each of which can be read alone."""
    for look in looks:
        name = safe(look.server)
        if look.error:
            yield f"{at} {name}: {safe(look.error)}"
            continue
        again = " (restarted)" if look.restarted else ""
        yield (
            f"{at} {name}{again}: {look.engines} engines, {look.publications} publications, {look.leases} leases, "
            f"{_rate(look)}"
        )
    for server, peers in busiest(looks)[:MOST_LISTED]:
        yield (
            f"{at} {safe(server)}: {safe(peers.source)} -> {safe(peers.reader)}: {peers.reading} reading, "
            f"{peers.ended} ended, {size(peers.bytes)}, {_per_second(peers.rate)}"
        )


def busiest(looks: Sequence[Look]) -> list[tuple[str, Peers]]:
    """Return all pairs of engines with their node servers; the pairs that move most come first."""
    pairs = [(look.server, peers) for look in looks for peers in look.peers]
    return sorted(pairs, key=lambda pair: (-(pair[1].rate or 0.0), -pair[1].reading, -pair[1].bytes))


def newest(looks: Sequence[Look]) -> list[ListedRead]:
    """Return all reads: reads with live leases first, among them the largest first, then the newest."""
    reads = [read for look in looks for read in look.transfers]
    return sorted(reads, key=lambda read: (not read.alive, -read.bytes, -read.publication, -read.lease_number))


def _servers(looks: Sequence[Look], more: int) -> Table:
    rows = (
        (look.server, *"----", look.error)
        if look.error
        else (
            *(look.server, look.engines, look.publications, look.leases, _rate(look)),
            "restarted" if look.restarted else "ok",
        )
        for look in looks
    )
    columns = "Server", ">Engines", ">Publications", ">Leases", ">Rate", "State"
    return _one_line_each(table(*columns, rows=rows, title="Node servers"), more)


def _pairs(pairs: Sequence[tuple[str, Peers]], more: int) -> Table:
    rows = (
        (of.source, of.reader, of.reading, of.ended, size(of.bytes), _per_second(of.rate), server)
        for server, of in pairs
    )
    columns = "Source", "Reader", ">Reading", ">Ended", ">Bytes", ">Rate", "At"
    return _one_line_each(table(*columns, rows=rows, title="Peers"), more)


def _reads(reads: Sequence[ListedRead], more: int) -> Table:
    rows = (
        (
            read.source,
            "none yet" if read.waits else read.publication,
            f"router key {read.router_key}" if read.waits else read.request_id,
            *(read.reader, read.state, f"{read.reported}/{read.parties}", size(read.bytes)),
            "no lease" if read.waits else duration(read.remaining, none="ended"),
        )
        for read in reads
    )
    columns = "Source", ">Publication", "Request", "Reader", "State", ">Ranks done", ">Bytes", ">Lease ends"
    return _one_line_each(table(*columns, rows=rows, title="Reads"), more)


def _one_line_each(made: Table, more: int) -> Table:
    """Cut cells instead of wrapping them, so that the table has the expected number of lines."""
    for column in made.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    if more > 0:
        made.caption, made.caption_justify = f"and {more} more", "left"
    return made


def _rate(look: Look) -> str:
    return f"{'' if look.whole else 'at least '}{_per_second(look.rate)}"


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{size(round(rate))}/s"


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
    reading: int = 0  # Reads with live leases
    ended: int = 0  # Ended reads that the node server still lists
    bytes: int = 0  # Reported by the ranks
    rate: float | None = None  # Reported bytes per second since the previous look; None: this is the first look


@dataclass(frozen=True, slots=True)
class Look:
    """The answer of one node server. `engines`, `publications` and `leases` are totals."""

    server: str
    error: str = ""  # Why the node server did not answer; empty: it did
    restarted: bool = False  # The node server was restarted since the previous look
    engines: int = 0
    publications: int = 0
    leases: int = 0
    transfers: Sequence[ListedRead] = ()  # The first reads, or all
    whole: bool = True  # Whether the lists were short enough to be complete
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
        reads = [_listed(node.server, summary) for summary in read.transfers]
        return Look(
            node.server,
            restarted=restarted,
            engines=len(listed.engines),
            publications=sum(engine.publications for engine in listed.engines),
            leases=sum(engine.leases for engine in listed.engines),
            transfers=reads,
            whole=not (listed.next_page_token or read.next_page_token),
            peers=self._peers(read.transfers, reads),
        )

    def _peers(self, transfers: Sequence[ipb.TransferSummary], reads: Sequence[ListedRead]) -> list[Peers]:
        now, before = time.monotonic(), self._at
        known: dict[tuple[bytes, int, int], int] = {}
        moved: dict[tuple[str, str], int] = defaultdict(int)
        found: dict[tuple[str, str], Peers] = {}
        for transfer, read in zip(transfers, reads, strict=True):
            key = transfer.source.incarnation, read.publication, read.lease_number
            pair = read.source, read.reader
            peers = found.setdefault(pair, Peers(*pair))
            peers.reading += read.alive
            peers.ended += not read.alive
            peers.bytes += read.bytes
            known[key] = read.bytes
            moved[pair] += max(0, read.bytes - self._bytes.get(key, 0))
        for pair, peers in found.items():
            peers.rate = moved[pair] / max(1e-3, now - before) if before else None
        self._bytes, self._at = known, now
        return list(found.values())


def _listed(server: str, summary: ipb.TransferSummary) -> ListedRead:
    from kvferry._clock import from_duration

    read = summary.read
    return ListedRead(
        server,
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
