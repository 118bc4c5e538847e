"""Run the tests of RDMA in emulated machines: ``python -m tests.rdma [pytest's arguments]``.

The tests of `tests.rdma.verbs` run in one machine, those of `tests.rdma.hosts` on this host, with two machines. Paths
among the arguments choose between them. Exit codes: 0, all is well, or no machine can be made here; others are
pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.support.machines.emulated import Machine
from tests.support.machines.image import FOLDER, NoMachine, image
from tests.support.repository import ROOT

VERBS, HOSTS = "tests/rdma/verbs", "tests/rdma/hosts"
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist")
MACHINES = "KVFERRY_RDMA_MACHINES"
"""Set where tests may start machines."""


def main(arguments: Sequence[str]) -> int:
    """Run everything, or what was asked for; the exit code."""
    try:
        image()
    except NoMachine as error:
        print(f"no machine with RDMA can be made here, so nothing was run: {error}", file=sys.stderr)
        return 0
    named = [word for word in arguments if word.startswith("tests/")]
    others = [word for word in arguments if word not in named]
    # What is slow runs where it is asked for: PYTEST_ARGS='-m "slow or not slow"'.
    others += () if "-m" in others else ("-m", "not slow")
    verbs = [word for word in named or [VERBS] if word.startswith(VERBS)]
    hosts = [word for word in named or [HOSTS] if word.startswith(HOSTS)]
    return (run_verbs([*verbs, *others]) if verbs else 0) or (run_hosts([*hosts, *others]) if hosts else 0)


def run_verbs(arguments: Sequence[str]) -> int:
    """Run pytest in a machine, and print what it prints; its exit code."""
    machine = Machine(image(), 1, FOLDER / "verbs")
    try:
        program = machine.ready().start(["python", *PYTEST, *arguments], {"PYTHONDONTWRITEBYTECODE": "1"})
        with program.log.open(errors="replace") as log:
            while (status := program.poll()) is None:
                print(log.read(), end="", flush=True)
                time.sleep(0.5)
            print(log.read(), end="", flush=True)
    except BaseException:
        print(machine.console(), file=sys.stderr)
        raise
    finally:
        machine.close()
    return status


def run_hosts(arguments: Sequence[str]) -> int:
    """Run pytest here; its exit code."""
    # The first test waits for two machines and what starts in them.
    command = [sys.executable, *PYTEST, "-o", "timeout=400", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, MACHINES: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
