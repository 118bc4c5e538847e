"""A process that uses kvferry ends, in whatever state it is: Python's end waits for no call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.exits import STATES
from tests.support.node_servers import NodeServerProcess, environment

pytestmark = pytest.mark.slow

SOON = 60.0
FORKS = {state: {"GRPC_ENABLE_FORK_SUPPORT": "0"} for state in ("forked_child", "forked_child_of_a_busy_thread")}
"""With gRPC's own handlers, a process with an open stream hangs in the fork itself, see docs/engines.md."""


@pytest.mark.parametrize("state", STATES)
def test_process_ends_in_every_state(tmp_path: Path, state: str) -> None:
    command = [sys.executable, "-m", "tests.e2e.exits", state]
    pipe = subprocess.PIPE
    with (
        NodeServerProcess(tmp_path, tcp=True) as server,
        subprocess.Popen(
            [*command, server.address],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=environment(**FORKS.get(state, {})),
        ) as ending,
    ):
        try:
            if state in ("home_killed", "call_in_flight"):
                assert ending.stdout is not None
                assert ending.stdout.readline() in ("kill\n", "stop\n")
                os.kill(server.pid, signal.SIGKILL if state == "home_killed" else signal.SIGSTOP)
            # Bounded: the supervisor of an engine waits for its end.
            _, said = ending.communicate("go\n", timeout=SOON)
            assert ending.returncode == 0, said
        finally:
            ending.kill()
            if state == "call_in_flight":
                os.kill(server.pid, signal.SIGCONT)
