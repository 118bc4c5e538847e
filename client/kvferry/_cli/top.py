"""`kvferry top`: looks repeatedly at node servers; rates are differences between two looks at one node server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry._cli.connection import LOCAL, Connection, Node, Servers, with_connection
from kvferry._cli.render import console, listing
from kvferry._summaries import Row, as_dict, size, transfer_row
from kvferry.errors import InvalidField, KvferryError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from kvferry.v1 import introspection_pb2 as ipb

LEAST_INTERVAL = 0.5  # Least seconds between two looks, because each look makes node servers list their reads
SERVERS_AT_ONCE = 16  # How many node servers are asked at once
PAGES = 4  # Most pages of a list in one look, each of at most 1000 entries and 256 KiB: a look has to be cheap
MOST_LISTED = 100  # Most reads, and pairs of engines, in JSON
FRAME = 4  # Lines of a table that are not rows: title, head, rule, and the line that counts omitted rows
PIPED_LINES = 200  # Lines of the tables where there is no terminal to fit
SHOWN = ("server", "error", "restarted", "recovering", "engines", "publications", "leases", "whole")
"""The fields of a `Look` that JSON has unchanged."""


@with_connection
def top(
    servers: Servers = [LOCAL],  # noqa: B006  typer copies it, and shows it in the help
    interval: Annotated[
        float, typer.Option(min=LEAST_INTERVAL, max=3600.0, metavar="SECONDS", help="Time between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each look, in a line.")] = False,
    *,
    connection: Connection,
) -> None:
    """Watch what moves: live reads, rates, leases and peers.

    Rates are of bytes that ranks have reported, which they do when they end. In a terminal it draws a screen; a pipe
    gets the tables of each look, or with --json a JSON object for each look, in a line of its own.
    """
    try:
        with ExitStack() as stack:
            lookers = [Looker(stack.enter_context(connection.node(name))) for name in dict.fromkeys(servers)]
            threads = ThreadPoolExecutor(min(len(lookers), SERVERS_AT_ONCE), "kvferry-top")
            # The channels, which are closed after the pool, end calls in progress.
            stack.callback(threads.shutdown, wait=False, cancel_futures=True)
            drawn = sys.stdout.isatty() and not (once or as_json)
            show = stack.enter_context(_screen(interval)) if drawn else print_looks if as_json else _print_tables
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


def print_looks(looks: Sequence[Look]) -> None:
    """Print looks as one line of JSON."""
    values = {
        "time": time.time(),
        "servers": [{name: getattr(look, name) for name in SHOWN} | {"bytes_per_second": look.rate} for look in looks],
        "peers": [{"server": server, **dataclasses.asdict(peers)} for server, peers in busiest(looks)[:MOST_LISTED]],
        "transfers": [{"server": server, **_values(read)} for server, read in most_pressing(looks)[:MOST_LISTED]],
    }
    print(json.dumps(values), flush=True)


def _values(read: ipb.TransferSummary) -> dict[str, Any]:
    try:
        return as_dict(read)
    except InvalidField as error:
        # One node server's answer must not hide the others'.
        return {"error": error.message}


def _print_tables(looks: Sequence[Look]) -> None:
    out = console()
    with out.capture() as printed:
        out.print(Screen("", looks), height=PIPED_LINES)
    print(printed.get(), flush=True)


@contextmanager
def _screen(interval: float) -> Iterator[Callable[[Sequence[Look]], None]]:
    """Draw on the terminal, and restore its screen at the end, also after SIGTERM."""
    from rich.live import Live

    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        # Drawn several times a second, to follow the terminal's size.
        with Live(console=console(), screen=True, refresh_per_second=4) as live:
            yield lambda looks: live.update(Screen(f"every {interval:g} s  (Ctrl-C ends it)", looks))
    finally:
        signal.signal(signal.SIGTERM, before)


class Screen:
    """Looks as tables that fit the height: node servers in a third of it, peers in half of what is left, then reads."""

    def __init__(self, note: str, looks: Sequence[Look]) -> None:
        self._head = f"kvferry top  {time.strftime('%H:%M:%S')}  {note}"
        reads = [transfer_row(read) for _, read in most_pressing(looks)]
        self._tables = (
            ("Node servers", list(map(_server_row, looks)), len(looks), 1 / 3),
            ("Peers", [_peers_row(*pair) for pair in busiest(looks)], 0, 1 / 2),
            ("Reads", reads, sum(look.leases for look in looks), 1.0),
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(self._head, no_wrap=True, overflow="crop")
        left = max(0, (options.max_height or console.height) - 1)
        for title, rows, count, share in self._tables:
            shown = rows[: max(title == "Node servers", int(left * share) - FRAME)]
            if shown:
                made = listing(shown, title)
                for column in made.columns:
                    # Cut instead of wrapped, so that each row is one line.
                    column.no_wrap, column.overflow = True, "ellipsis"
                if (more := max(count, len(rows)) - len(shown)) > 0:
                    made.caption, made.caption_justify = f"and {more} more", "left"
                yield made
                left -= len(shown) + FRAME


def _server_row(look: Look) -> Row:
    counts = ("-", "-", "-") if look.error else (look.engines, look.publications, look.leases)
    rate = f"{'' if look.whole else 'at least '}{_per_second(look.rate)}"
    names = ">Engines", ">Publications", ">Leases"
    state = "restarted" if look.restarted else "recovering" if look.recovering else look.error or "ok"
    return {"Server": look.server, **dict(zip(names, counts, strict=True)), ">Rate": rate, "State": state}


def _peers_row(server: str, of: Peers) -> Row:
    counts = {">Reading": of.reading, ">Ended": of.ended, ">Bytes": size(of.bytes), ">Rate": _per_second(of.rate)}
    return {"Source": of.source, "Reader": of.reader, **counts, "At": server}


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{size(round(rate))}/s"


def busiest(looks: Sequence[Look]) -> list[tuple[str, Peers]]:
    """Return all pairs of engines with their node servers; the pairs that move most come first."""
    pairs = [(look.server, peers) for look in looks for peers in look.peers]
    return sorted(pairs, key=lambda pair: (-(pair[1].rate or 0.0), -pair[1].reading, -pair[1].bytes))


def most_pressing(looks: Sequence[Look]) -> list[tuple[str, ipb.TransferSummary]]:
    """Return all reads with their node servers: first those whose leases end first, because a reader that does well
    renews its lease; then those that wait without one, the longest first; then those that have ended, newest first."""

    def place(listed: tuple[str, ipb.TransferSummary]) -> tuple[int, int, int, int]:
        _, transfer = listed
        number = -transfer.publication, -transfer.read.lease_number
        if has_lease(transfer):
            return 0, transfer.lease_remaining.ToNanoseconds(), *number
        return (2, 0, *number) if transfer.publication else (1, -transfer.waited.ToNanoseconds(), *number)

    return sorted(((look.server, read) for look in looks for read in look.transfers), key=place)


def has_lease(read: ipb.TransferSummary) -> bool:
    return read.lease_remaining.ToNanoseconds() > 0


def alive(read: ipb.TransferSummary) -> bool:
    """Whether a read has a live lease, or waits without one for a publication under a router's key."""
    return has_lease(read) or not read.publication


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
    recovering: bool = False  # It waits for its engines: lists and totals may lack some
    engines: int = 0
    publications: int = 0
    leases: int = 0
    transfers: Sequence[ipb.TransferSummary] = ()  # The first reads, or all
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
        return Look(
            node.server,
            restarted=restarted,
            recovering=listed.recovering or read.recovering,
            engines=len(listed.engines),
            publications=sum(engine.publications for engine in listed.engines),
            leases=sum(engine.leases for engine in listed.engines),
            transfers=read.transfers,
            whole=not (listed.next_page_token or read.next_page_token),
            peers=self._peers(read.transfers),
        )

    def _peers(self, transfers: Sequence[ipb.TransferSummary]) -> list[Peers]:
        now, first = time.monotonic(), not self._at
        seconds = max(1e-3, now - self._at)
        known: dict[tuple[bytes, int, int], int] = {}
        found: dict[tuple[str, str], Peers] = {}
        for transfer in transfers:
            read = transfer.read
            key = transfer.source.incarnation, transfer.publication, read.lease_number
            pair = transfer.source.engine_id, read.reader.engine_id
            peers = found.setdefault(pair, Peers(*pair, rate=None if first else 0.0))
            peers.reading += alive(transfer)
            peers.ended += not alive(transfer)
            peers.bytes += read.bytes
            known[key] = read.bytes
            if peers.rate is not None:
                peers.rate += max(0, read.bytes - self._bytes.get(key, 0)) / seconds
        self._bytes, self._at = known, now
        return list(found.values())
