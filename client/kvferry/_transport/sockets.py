"""Open files of this process. They show whether UCX has connected to a peer over TCP, which UCX does not report."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/proc/self/fd")


def open_files() -> Mapping[int, str] | None:
    """The files of this process's descriptors, as the kernel names them. None: they cannot be listed, because there is
    no /proc, it belongs to another user (as after a change of user), or no file descriptor is left."""
    found: dict[int, str] = {}
    try:
        links = list(FOLDER.iterdir())
    except OSError:
        return None
    for link in links:
        # Another thread may have closed the descriptor since.
        with suppress(OSError):
            found[int(link.name)] = str(link.readlink())
    return found


def open_sockets() -> Mapping[str, int] | None:
    """The descriptors of this process's sockets, by the kernel's names of the sockets. None: as `open_files`."""
    files = open_files()
    if files is None:
        return None
    return {name: descriptor for descriptor, name in files.items() if name.startswith("socket:")}


def tcp_since(before: Mapping[str, int] | None) -> bool:
    """Whether this process may have opened a TCP socket since `before` was listed, on any thread."""
    after = open_sockets()
    if before is None or after is None:
        return True
    return any(_is_tcp(descriptor) for name, descriptor in after.items() if name not in before)


def _is_tcp(descriptor: int) -> bool:
    """Whether a file descriptor is a TCP socket. Its owner may close it meanwhile. Python's `socket` class is not used:
    it would duplicate the descriptor, and change its mode where there is a default time-out."""
    family = _option(descriptor, socket.SO_DOMAIN)
    return family in (socket.AF_INET, socket.AF_INET6) and _option(descriptor, socket.SO_TYPE) == socket.SOCK_STREAM


def _option(descriptor: int, option: int) -> int | None:
    """An option of a socket; None: the descriptor is no socket, or was closed."""
    value = ctypes.c_int()
    size = ctypes.c_uint32(ctypes.sizeof(value))
    failed = _libc.getsockopt(descriptor, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(size))
    return None if failed else value.value


_libc = ctypes.CDLL(None)
