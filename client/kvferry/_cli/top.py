"""`kvferry top`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, Connection, with_connection

if TYPE_CHECKING:
    from kvferry._cli.top_looks import Look

INTERVAL = 2.0
LEAST_INTERVAL = 0.5
"""Seconds between two looks. No less, however impatient the caller: each look makes node servers list their reads."""
MOST_INTERVAL = 3600.0
SERVERS_AT_ONCE = 16
"""How many node servers are asked at once."""


@with_connection
def top(
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            envvar="KVFERRY_SERVER",
            metavar="ADDRESS",
            help="Node server to look at: unix:/path or host:port. May be given several times.",
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", min=LEAST_INTERVAL, max=MOST_INTERVAL, metavar="SECONDS", help="Time between two looks."
        ),
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
    from concurrent.futures import ThreadPoolExecutor

    from kvferry._cli.top_looks import Looker

    try:
        with ExitStack() as stack:
            names = dict.fromkeys(server or [DEFAULT_SERVER])
            lookers = [Looker(stack.enter_context(connection.node(name))) for name in names]
            threads = ThreadPoolExecutor(min(len(lookers), SERVERS_AT_ONCE), "kvferry-top")
            # The calls that are under way end with their channels, which are closed after it.
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
        # Who read the lines has what it wanted, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _print_json(looks: Sequence[Look]) -> None:
    from kvferry._cli.top_view import as_json

    print(json.dumps(as_json(looks, time.time())), flush=True)


def _print_lines(looks: Sequence[Look]) -> None:
    from kvferry._cli.top_view import lines

    print("\n".join(lines(looks, time.strftime("%H:%M:%S"))), flush=True)


@contextmanager
def _screen(interval: float) -> Iterator[Callable[[Sequence[Look]], None]]:
    """Draw on the terminal; it gets its screen back at the end, also by SIGTERM."""
    from rich.live import Live

    from kvferry._cli.render import console
    from kvferry._cli.top_view import Screen

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    screen = Screen(interval)
    before = signal.signal(signal.SIGTERM, end)
    try:
        # Drawn several times a second, so that it follows the terminal's size.
        with Live(screen, console=console(), screen=True, refresh_per_second=4):
            yield lambda looks: screen.show(looks, time.strftime("%H:%M:%S"))
    finally:
        signal.signal(signal.SIGTERM, before)
