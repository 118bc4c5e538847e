"""The command `kvferry`: shows what a node server knows, as tables or JSON; acts on it; and plans reads.

Commands import what they need when they run, so that help is quick, and nothing here imports torch or NIXL.

Exit codes: 0; 1 when a node server refuses, cannot be reached or does not serve, when `doctor` found a problem, or when
you say no; 2 for wrong usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys

import typer

from kvferry._cli.admin import abort, decline, drain, end_lease, evict
from kvferry._cli.doctor import doctor
from kvferry._cli.node import engine, engines, health, info, requests, transfers
from kvferry._cli.plan import plan
from kvferry._cli.render import safe
from kvferry._cli.top import top
from kvferry.errors import EngineUnknown, KvferryError, Unreachable

app = typer.Typer(
    name="kvferry",
    help="Look at what moves between inference engines, and act on it. Every command takes --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: in 80 columns, rich cuts names of options, and calls flags <bool>.
    rich_markup_mode=None,
)
for _command in (
    *(info, engines, engine, requests, transfers, top, drain, end_lease, abort, evict, decline),
    *(health, plan, doctor),
):
    app.command()(_command)


def main() -> None:
    # gRPC reads the variable when first used. It would log a failed handshake, which the command explains itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    try:
        app()
    except KvferryError as error:
        print(f"kvferry: {explain(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def explain(error: KvferryError) -> str:
    """Return an error as one line: message, remedy where known, and name in docs/errors.md."""
    text = safe(" ".join(error.message.split()))
    if isinstance(error, Unreachable):
        text += f"{'' if text.endswith('?') else '.'} Another node server is named with --server or KVFERRY_SERVER"
    elif isinstance(error, EngineUnknown):
        text += ". `kvferry engines` lists those it has"
    return f"{text} [{error.reason or type(error).__name__}]"
