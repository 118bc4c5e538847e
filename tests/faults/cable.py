"""Two network namespaces with a cable between them that can be cut. Needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

from tests.support.waiting import until

SOURCE, DESTINATION = "10.77.0.1", "10.77.0.2"
DEVICE = "kvf0"
"""The cable's end, in either namespace."""


def missing() -> str:
    """Why there can be no namespaces here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    name = f"kvferry-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        _ip("netns", "delete", name)
        return ""
    return f"network namespaces cannot be made here: {made.stderr.strip()}"


class Cable:
    """The two namespaces, until the end of the block."""

    def __init__(self) -> None:
        name = f"kvferry-{secrets.token_hex(4)}"
        self._names = (f"{name}-s", f"{name}-d")
        self._lost_before = 0

    @property
    def sides(self) -> Sequence[tuple[str, Sequence[str]]]:
        """Host and command-line prefix of each side, the source's first."""
        prefixes = [["ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES={DEVICE}"] for name in self._names]
        return list(zip((SOURCE, DESTINATION), prefixes, strict=True))

    def cut(self) -> None:
        """Let nothing pass from now on, silently."""
        self._lost_before = self._lost()
        _ip("-n", self._names[0], "link", "set", DEVICE, "down")

    def wait_lost(self) -> None:
        """Wait until something on the source's side could not be sent, or was sent in vain."""
        until(lambda: self._lost() > self._lost_before)

    def heal(self) -> None:
        """It passes again."""
        _ip("-n", self._names[0], "link", "set", DEVICE, "up")

    def _lost(self) -> int:
        read = _ip("netns", "exec", self._names[0], "cat", "/proc/net/netstat", "/proc/net/snmp")
        rows = [line.split() for line in read.splitlines()]
        counts = {
            name: value
            for names, values in zip(rows[::2], rows[1::2], strict=True)
            for name, value in zip(names, values, strict=True)
        }
        return sum(int(counts[name]) for name in ("TCPRetransFail", "TCPTimeouts", "OutNoRoutes", "OutDiscards"))

    def __enter__(self) -> Cable:
        try:
            for name in self._names:
                _ip("netns", "add", name)
            source, destination = self._names
            _ip("link", "add", DEVICE, "netns", source, "type", "veth", "peer", "name", DEVICE, "netns", destination)
            for name, host in zip(self._names, (SOURCE, DESTINATION), strict=True):
                _ip("-n", name, "address", "add", f"{host}/30", "dev", DEVICE)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", DEVICE, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The cable goes with either namespace.
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
