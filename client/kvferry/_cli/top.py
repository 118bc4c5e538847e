"""`kvferry top`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import DEFAULT_SERVER, Connection, with_connection

if TYPE_CHECKING:
    from kvferry._cli.top_looks import Lookers

INTERVAL = 2.0
LEAST_INTERVAL = 0.5
"""Seconds between two looks. No less, however impatient the caller: each look makes node servers list their reads."""
MOST_INTERVAL = 3600.0


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
    from kvferry._cli.top_looks import Lookers

    try:
        with Lookers(connection, server or [DEFAULT_SERVER]) as lookers:
            if once or as_json or not sys.stdout.isatty():
                failed = _print(lookers, interval, once=once, as_json=as_json)
            else:
                failed = _draw(lookers, interval)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Who read the lines has what it wanted, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    if failed:
        raise typer.Exit(1)


def _print(lookers: Lookers, interval: float, *, once: bool, as_json: bool) -> bool:
    """Print looks until Ctrl-C, or one. Returns whether a node server did not answer that one."""
    from kvferry._cli import top_view

    while True:
        began = time.monotonic()
        looks = lookers.look()
        if as_json:
            print(json.dumps(top_view.as_json(looks, time.time())), flush=True)
        else:
            print("\n".join(top_view.lines(looks, time.strftime("%H:%M:%S"))), flush=True)
        if once:
            return any(look.error for look in looks)
        _sleep(began + interval)


def _draw(lookers: Lookers, interval: float) -> bool:
    """Draw looks on the terminal until Ctrl-C."""
    from rich.live import Live

    from kvferry._cli.render import console
    from kvferry._cli.top_view import Screen

    screen = Screen(interval)
    # Drawn several times a second, so that it follows the terminal's size.
    with _terminated(), Live(screen, console=console(), screen=True, refresh_per_second=4):
        while True:
            began = time.monotonic()
            screen.show(lookers.look(), time.strftime("%H:%M:%S"))
            _sleep(began + interval)


def _sleep(until: float) -> None:
    threading.Event().wait(max(0.0, until - time.monotonic()))


@contextmanager
def _terminated() -> Iterator[None]:
    """End by SIGTERM as by an exception, so that the terminal gets its screen back."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
