"""The limits of connections and file descriptors, and which connections are closed when they run out.

gRPC closes every connection beyond its limit, and asks no Python code before it accepts one: one host could keep all
others out. So `ConnectionLimiter` looks at the process's sockets, and closes the newest of the host that has the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry._wire.channel import Address
from kvferry_server.node.limits import CONNECTION_POLL, FULL_CONNECTIONS, MIN_CONNECTIONS, RESERVED_FILES
from kvferry_server.servicers.callers import host_of, host_of_address

logger = logging.getLogger(__name__)

INTERNET = (socket.AF_INET, socket.AF_INET6)


def raise_file_limit() -> None:
    """Allow this process as many open files as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            logger.info("raised the limit of open files from %d to %d", soft, hard)


def file_limit() -> int:
    """Return how many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def connections_each(wanted: int, listeners: int, files: int) -> int:
    """Return how many connections each listener may have, so that none takes another's of the process's `files`."""
    return max(MIN_CONNECTIONS, min(wanted, (files - RESERVED_FILES) // listeners))


class ConnectionLimiter:
    """Keeps some of the `most` connections free that gRPC accepts on one TCP port. Belongs to one event loop."""

    def __init__(self, port: int, most: int) -> None:
        self._port, self._most = port, most
        # By inode, the number of the check that first saw a connection.
        self._first_checks: dict[int, int] = {}
        self._checks = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CONNECTION_POLL)
            # A cheap test first: usually all files together are fewer than the connections that matter.
            if len(_descriptors()) > self._most * FULL_CONNECTIONS:
                self.check()

    def check(self) -> int:
        """Close the newest connections of the host that has the most, until few enough are left; returns how many."""
        self._checks += 1
        # Of each host: when a connection was first seen, its descriptor and its inode.
        by_host: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        checked: dict[int, int] = {}
        for fd, duplicate, own, peer in _connections():
            if duplicate.family in INTERNET and own[1] == self._port:
                inode = os.fstat(duplicate.fileno()).st_ino
                checked[inode] = self._first_checks.get(inode, self._checks)
                by_host[host_of_address(peer[0])].append((checked[inode], fd, inode))
        self._first_checks = checked
        too_many = len(checked) - int(self._most * FULL_CONNECTIONS)
        if too_many <= 0:
            return 0
        for connections in by_host.values():
            connections.sort()
        closed: Counter[str] = Counter()
        for _ in range(too_many):
            host = max(by_host, key=lambda one: len(by_host[one]))
            _, fd, inode = by_host[host].pop()
            with contextlib.suppress(OSError), _duplicate(fd) as duplicate:
                # If the connection has ended meanwhile, the descriptor may belong to another file.
                if os.fstat(duplicate.fileno()).st_ino == inode:
                    # gRPC notices, and closes its file descriptor.
                    duplicate.shutdown(socket.SHUT_RDWR)
            closed[host] += 1
        for host, count in closed.items():
            told = "port %d has nearly all of its %d connections: closed the newest %d of host %s, which had the most"
            logger.warning(told, self._port, self._most, count, host)
        return too_many


def count_connections(address: Address) -> int:
    """Count the open connections to an address of this process. Looks at all open files; callable on any thread."""
    if not address.is_unix:
        return sum(found.family in INTERNET and own[1] == address.port for _, found, own, _ in _connections())
    path = Path(address.path)
    # The socket was bound to another path, and renamed.
    names = (str(path), str(path.with_name("." + path.name)))
    return sum(own in names for _, _, own, _ in _connections())


class Endings:
    """Closes the connections of clients that have not taken an answer for too long. To find them it looks at all open
    files, so it does that once for all that come within `CONNECTION_POLL`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._peers: set[tuple[str, int]] = set()  # Hosts and ports

    def end(self, peer: str) -> None:
        """Close the connection of a gRPC peer soon, such as ``ipv4:10.0.0.1:4711``; on a UNIX socket all look alike."""
        kind, _, address = peer.partition(":")
        if kind not in ("ipv4", "ipv6"):
            return
        if not self._peers:
            asyncio.get_running_loop().call_later(CONNECTION_POLL, self._end_all)
        self._peers.add((host_of(peer), int(address.rpartition(":")[2])))

    def _end_all(self) -> None:
        closed: Counter[str] = Counter()
        for _, duplicate, _, name in _connections():
            if duplicate.family in INTERNET and (found := (host_of_address(name[0]), name[1])) in self._peers:
                with contextlib.suppress(OSError):
                    duplicate.shutdown(socket.SHUT_RDWR)
                closed[found[0]] += 1
        self._peers.clear()
        for host, count in closed.items():
            logger.warning("closed %d connections of host %s, which have not taken an answer for too long", count, host)


def _connections() -> Iterator[tuple[int, socket.socket, Any, Any]]:
    """Yield gRPC's connections: file descriptor, a duplicate for this step only, own address and the peer's."""
    for fd in _descriptors():
        with contextlib.suppress(OSError), _duplicate(fd) as duplicate:
            # A socket that listens has no peer: getpeername raises.
            yield fd, duplicate, duplicate.getsockname(), duplicate.getpeername()


def _descriptors() -> list[int]:
    # While this process has no free file, nobody can look; who looks again and again must go on.
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in os.scandir("/proc/self/fd")]
    return []


def _duplicate(fd: int) -> socket.socket:
    """Duplicate a socket of gRPC, so that its descriptor stays valid while in use; raises `OSError` for others."""
    # gRPC's sockets do not block. A blocking socket belongs to other code of this process (`kvferry.serve`), and where
    # `socket.setdefaulttimeout` was called, Python would make the socket non-blocking for its owner as well.
    if not stat.S_ISSOCK(os.fstat(fd).st_mode) or os.get_blocking(fd):
        raise OSError("not a socket of gRPC")
    duplicate = os.dup(fd)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        # The socket was closed meanwhile, and its number belongs to another file.
        os.close(duplicate)
        raise
