"""`kvferry top`: shows looks at node servers (`top_looks`) as a screen, as lines, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, Connection, with_connection
from kvferry._cli.render import console, duration, safe, size, table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from kvferry._cli.top_looks import ListedRead, Look, Peers

INTERVAL = 2.0
LEAST_INTERVAL = 0.5
"""Least seconds between two looks, because each look makes node servers list their reads."""
MOST_INTERVAL = 3600.0
SERVERS_AT_ONCE = 16
"""How many node servers are asked at once."""

MOST_LISTED = 100
"""Most reads, and pairs of engines, in JSON and in lines."""

FRAME = 4
"""Lines of a table that are not rows: title, head, rule, and the line that counts omitted rows."""

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
    from kvferry._cli.top_looks import Looker

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
                threading.Event().wait(max(0.0, began + interval - time.monotonic()))
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

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    screen = Screen(interval)
    before = signal.signal(signal.SIGTERM, end)
    try:
        # Drawn several times a second, to follow the terminal's size.
        with Live(screen, console=console(), screen=True, refresh_per_second=4):
            yield lambda looks: screen.show(looks, time.strftime("%H:%M:%S"))
    finally:
        signal.signal(signal.SIGTERM, before)


class Screen:
    """The latest looks, drawn to fit the terminal."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._looks: Sequence[Look] = ()
        self._at = ""

    def show(self, looks: Sequence[Look], at: str) -> None:
        self._looks, self._at = looks, at

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        looks = self._looks
        head = f"kvferry top  {self._at}  every {self._interval:g} s  (Ctrl-C ends it)"
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
