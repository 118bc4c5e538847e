"""The program of a machine that starts others: ``python -m tests.support.machines.guest PORT``.

Whoever started the machine listens at that port, and is asked for commands until the connection ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Client, Connection
from typing import Any

HOST = "10.0.2.2"
"""Of qemu's own network: the host that the machine runs on."""


class Guest:
    """The programs of a machine. Its public methods are the commands."""

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: list[str], log: str, environment: dict[str, str], port: int | None) -> int:
        """Start a program, and return its process id.

        Args:
            command: the program, by this host's path, and its arguments.
            log: the file that its output is appended to.
            environment: set for it.
            port: where somebody listens for a pipe to it: ``{fd}`` in `command` becomes its number.
        """
        descriptors: list[int] = []
        with open(log, "ab") as output:  # noqa: PTH123
            connected = None if port is None else socket.create_connection((HOST, port))
            if connected is not None:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                descriptors.append(connected.fileno())
            process = subprocess.Popen(
                [word.format(fd=descriptors[0]) if descriptors else word for word in command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
            )
        if connected is not None:
            connected.close()
        self._started[process.pid] = process
        return process.pid

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a program that was started."""
        self._started[pid].send_signal(number)

    def poll(self, pid: int) -> int | None:
        """The exit status of a program; None: it runs."""
        return self._started[pid].poll()

    def stopped(self, pid: int) -> bool:
        """Whether a program was stopped by a signal."""
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is not None

    def run(self, command: list[str]) -> str:
        """Run a short program, and return what it wrote; raises `RuntimeError` with that where it failed."""
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def end(self) -> None:
        """Kill what runs."""
        for process in self._started.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def serve(pipe: Connection, guest: Guest) -> None:
    """Do what is asked until the other side closes the connection."""
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = getattr(guest, name)(*arguments)
        except Exception as error:
            answer = error
        pipe.send(answer)


if __name__ == "__main__":
    with Client((HOST, int(sys.argv[1]))) as pipe:
        guest = Guest()
        try:
            serve(pipe, guest)
        finally:
            guest.end()
