"""The table of checks, in the order of the output, and how each is run."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry._doctor import isolation, moves, peer, rdma, same_host, software, system
from kvferry._doctor.check import Finding, Host, finding


class Check(NamedTuple):
    """A check, by its name in docs/doctor.md; `look` returns at least one finding. It may run in a separate process for
    `alone` seconds, not counting waits for a peer; 0: it runs in this process."""

    name: str
    look: Callable[[Host], list[Finding]]
    alone: float = 0.0

    def run(self, host: Host) -> list[Finding]:
        """Run the check. An exception becomes a finding."""
        try:
            # The check of a peer waits several times: for the name, the port, and answers.
            return isolation.run(self.name, host, self.alone + 4 * host.timeout) if self.alone else self.look(host)
        except Exception as error:
            return [finding("check-died", f"the check `{self.name}` raised {type(error).__name__}: {error}")]


CHECKS = (
    Check("packages", software.packages),
    Check("environment", software.environment),
    Check("cma", same_host.check, 30.0),
    Check("moves", moves.check, 60.0),
    Check("huge-pages", system.huge_pages, 20.0),
    Check("locked-memory", system.locked_memory),
    Check("open-files", system.open_files),
    Check("cpus", system.cpus),
    Check("shared-memory", system.shared_memory),
    Check("clock", system.clock),
    Check("gpu", system.gpu),
    Check("rdma", rdma.check, 60.0),
    Check("network", system.network),
    Check("peer", peer.check, 60.0),
)
"""`peer` runs only if the command names a peer."""


def examine(host: Host) -> Iterator[tuple[str, list[Finding]]]:
    """Run all checks, one after another, and yield the name and the findings of each."""
    for check in CHECKS:
        if check.name != "peer" or host.peer:
            yield check.name, check.run(host)


def main() -> None:
    """Run the process of one check, which `isolation.run` starts."""
    name, host, parent, answer = pickle.load(sys.stdin.buffer)
    isolation.end_with(parent)
    check = next(check for check in CHECKS if check.name == name)
    Path(answer).write_bytes(pickle.dumps(check.look(host)))
    # Without the exit handlers of libraries, whose faults are not those of the check.
    os._exit(0)
