"""`kvferry doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry._cli.connection import Connection, with_connection
from kvferry._cli.render import console, safe

if TYPE_CHECKING:
    from kvferry._doctor.check import Finding

STYLES = {"problem": "bold red", "warning": "bold yellow", "ok": "bold green", "unknown": "bold cyan"}
WIDTH = 120  # Most columns


@with_connection
def doctor(
    peer: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Also look at a node server: unix:/path or host:port.")
    ] = "",
    pid: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**31 - 1,
            metavar="PID",
            help="Also try to read the memory of a process here, such as an engine.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a list of findings, and how many of each level.")
    ] = False,
    *,
    connection: Connection,
) -> None:
    """Say what will be slow or fail on this host, and how to mend it.

    It takes some seconds, reads 64 MiB between two processes, and changes nothing. The exit code is 1 if there is a
    problem. docs/doctor.md lists the checks.
    """
    from kvferry._doctor.catalogue import examine
    from kvferry._doctor.check import Host

    tls = {"ca": connection.tls_ca, "cert": connection.tls_cert, "key": connection.tls_key}
    host = Host(pid=pid, peer=peer, tls=tls if any(tls.values()) else {}, timeout=connection.timeout)
    found = []
    counts = dict.fromkeys(("problem", "warning", "unknown", "ok"), 0)
    for check, findings in examine(host):
        for finding in findings:
            counts[finding.level] += 1
            found.append({"check": check, **dataclasses.asdict(finding)})
            if not as_json:
                _show(check, finding)
    if as_json:
        print(json.dumps({"findings": found, "counts": counts}, indent=2))
    else:
        words = {"problem": "problems", "warning": "warnings"}
        said = [
            f"{count} {level if count == 1 else words.get(level, level)}" for level, count in counts.items() if count
        ]
        print(f"\n{', '.join(said)}. docs/doctor.md lists the checks.")
    if counts["problem"]:
        sys.exit(1)


def _show(check: str, finding: Finding) -> None:
    from rich.table import Table
    from rich.text import Text

    shown = Table.grid()
    shown.add_column(width=9)
    shown.add_column()
    shown.add_row(Text(finding.level, STYLES[finding.level]), Text(f"{check}: {safe(finding.found)}"))
    for text in (finding.means, f"To do: {safe(finding.do)}" if finding.do else ""):
        if text:
            shown.add_row("", Text(text))
    made = console()
    made.width = min(made.width, WIDTH)
    made.print(shown)
