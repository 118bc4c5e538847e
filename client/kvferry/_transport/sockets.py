"""The sockets of this process: how it is seen whether UCX has connected to a peer over TCP, which it tells nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/proc/self/fd")


def open_sockets() -> Mapping[str, int]:
    """Return the file descriptors of this process's sockets, by the kernel's names of these."""
    found: dict[str, int] = {}
    for link in FOLDER.iterdir():
        # Another thread may have closed it since.
        with suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:"):
                found[target] = int(link.name)
    return found


def tcp_since(before: Mapping[str, int]) -> bool:
    """Return whether this process has opened a TCP socket since then, on whatever thread."""
    new = [descriptor for name, descriptor in open_sockets().items() if name not in before]
    return any(map(_is_tcp, new))


def _is_tcp(descriptor: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family in (socket.AF_INET, socket.AF_INET6) and found.type is socket.SOCK_STREAM
    return False
