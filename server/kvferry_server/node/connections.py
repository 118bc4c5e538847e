"""Connections and the file descriptors they take: how many there may be, and who loses his when they run out.

gRPC closes what comes beyond its limit, whoever comes. It asks nobody in Python before it accepts, so a host that opens
connections without end would keep everybody else out. `Doorkeeper` looks at the process's sockets instead, and when
they are nearly used up ends the newest connections of the host that has the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import stat
from collections import Counter, defaultdict
from dataclasses import dataclass

from kvferry_server.domain.hosts import host_of, host_of_address

logger = logging.getLogger(__name__)

RESERVE = 320
"""File descriptors for what is no connection from outside: gRPC's own, files, and 256 homes that are relayed to."""

LOOK = 0.5
"""Seconds between looks at the number of connections."""

NEARLY = 0.75
"""The part of the connections from which on hosts lose theirs."""

OPEN_FILES = "/proc/self/fd"


def raise_file_limit() -> int:
    """Allow this process as many open files as the system lets it; how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            logger.info("open files: %d instead of %d", hard, soft)
    return open_files()


def open_files() -> int:
    """How many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def connections_each(wanted: int, listeners: int, files: int) -> int:
    """How many connections each listener may have, so that none takes another's file descriptors."""
    return max(8, min(wanted, (files - RESERVE) // listeners))


@dataclass(frozen=True, slots=True)
class _Connection:
    host: str
    seen: int
    """Which look saw it first."""
    number: int
    inode: int


class Doorkeeper:
    """Keeps room among the connections of one TCP port.

    Args:
        port: ours.
        most: connections that gRPC keeps there.
    """

    def __init__(self, port: int, most: int) -> None:
        self._port, self._most = port, most
        # By inode: which look saw it first.
        self._seen: dict[int, int] = {}
        self._looks = 0

    async def run(self) -> None:
        """Look after it, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            # Cheap, and mostly enough: all files together are fewer than the connections that matter.
            if len(_open()) > self._most * NEARLY:
                self.look()

    def look(self) -> int:
        """End connections of whoever has the most, as far as there are too many; how many were ended."""
        self._looks += 1
        by_host: dict[str, list[_Connection]] = defaultdict(list)
        for number in _open():
            if connection := self._connection(number):
                by_host[connection.host].append(connection)
        self._seen = {one.inode: one.seen for connections in by_host.values() for one in connections}
        too_many = len(self._seen) - int(self._most * NEARLY)
        if too_many <= 0:
            return 0
        for connections in by_host.values():
            connections.sort(key=lambda one: one.seen)
        losers: Counter[str] = Counter()
        for _ in range(too_many):
            host = max(by_host, key=lambda one: len(by_host[one]))
            _end(by_host[host].pop())
            losers[host] += 1
        for host, count in losers.items():
            logger.warning("%s had the most of %d connections, and loses its newest %d", host, self._most, count)
        return too_many

    def _connection(self, number: int) -> _Connection | None:
        """What a descriptor is a connection to; None: not to our port."""
        try:
            with _duplicate(number) as duplicate:
                internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
                # A socket that listens, or only holds the port, has no peer.
                if not internet or duplicate.getsockname()[1] != self._port:
                    return None
                host, inode = host_of_address(duplicate.getpeername()[0]), os.fstat(duplicate.fileno()).st_ino
        except OSError:
            return None
        return _Connection(host, self._seen.get(inode, self._looks), number, inode)


def end_connection(peer: str) -> None:
    """End the connection of a peer of gRPC's, ``ipv4:host:port``. Callers on the UNIX socket cannot be told apart, and
    keep theirs."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return
    host, port = host_of(peer), int(address.rpartition(":")[2])
    for number in _open():
        with contextlib.suppress(OSError), _duplicate(number) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            name = duplicate.getpeername()
            if name[1] == port and host_of_address(name[0]) == host:
                logger.warning("%s has taken nothing for long, and loses its connection", peer)
                duplicate.shutdown(socket.SHUT_RDWR)


def _open() -> list[int]:
    """The descriptors of this process. Where the system does not tell, hosts share connections as they come."""
    with contextlib.suppress(FileNotFoundError):
        return [int(entry.name) for entry in os.scandir(OPEN_FILES)]
    return []


def _end(connection: _Connection) -> None:
    """gRPC sees that it was closed, and closes its own descriptor."""
    with contextlib.suppress(OSError), _duplicate(connection.number) as duplicate:
        # It may have ended meanwhile, and its number be another's.
        if os.fstat(duplicate.fileno()).st_ino == connection.inode:
            duplicate.shutdown(socket.SHUT_RDWR)


def _duplicate(number: int) -> socket.socket:
    """A descriptor of our own, so that it stays what it is while we look."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(errno.ENOTSOCK, "no socket")
    # gRPC's do not block. One that does is another's in this process (`kvferry.serve`), and Python would change that
    # for its owner, too, where `socket.setdefaulttimeout` was called.
    if os.get_blocking(number):
        raise OSError(errno.EPERM, "not gRPC's")
    duplicate = os.dup(number)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
