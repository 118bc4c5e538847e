"""Listeners: the TCP port and the UNIX socket of a node server, and the gRPC servers on them.

gRPC silently takes a UNIX socket's path from a running server, and fails on the file that a killed server left. So a
path belongs to the process that holds the lock on ``<path>.lock``: a second server is refused, and a socket whose lock
no process holds is a leftover, which is replaced. A server that stops removes both files.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from kvferry._wire.channel import MAX_SOCKET_PATH, Address
from kvferry.errors import KvferryError
from kvferry_server.node.grpc_server import Server

logger = logging.getLogger(__name__)


class CannotListen(KvferryError):
    """The node server cannot listen on an address. Values: address, problem."""

    def __init__(self, address: Address | str, problem: str) -> None:
        super().__init__(f"cannot listen on {address}: {problem}", address=address, problem=problem)


class UnixListener(Server):
    """A server on a UNIX socket, which it has from `listen` until `stop`, with the lock that reserves its path."""

    def __init__(self, path: Path, options: Sequence[tuple[str, Any]]) -> None:
        super().__init__(options)
        self.address = Address(path=str(path))
        self._path = path
        self._lock = path.with_name(path.name + ".lock")
        # gRPC binds to this path. The socket is renamed once its mode is right, so that nobody else can connect before.
        self._new = path.with_name("." + path.name)
        self._lock_fd = -1
        self._bound = False
        _unix_listeners.add(self)

    def listen(self) -> None:
        """Take the path, so that clients can connect, and wait. Raises `CannotListen` if another server has it, if a
        file that is no socket is there, or if its directory is not usable or not safe."""
        if len(os.fsencode(self._new)) > MAX_SOCKET_PATH:
            raise CannotListen(self.address, f"the path may have at most {MAX_SOCKET_PATH - 1} bytes")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            why = f"its directory cannot be created ({error.strerror}): create it, or set another path"
            raise CannotListen(self.address, why) from None
        self._check_directory()
        self._acquire()
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise CannotListen(self.address, "a file that is not a socket is there")
            # No other process holds the lock, so no server listens on the socket: a killed server left it.
            logger.info("replacing %s, which a killed server left", self._path)
        try:
            self.add_insecure_port(f"unix:{self._new}")
            # Users who may enter the directory may connect.
            self._new.chmod(0o666)
            if self._path.parent.stat().st_mode & 0o001:
                told = "every user of this host can connect to %s, because every user may enter its directory %s"
                logger.warning(told, self._path, self._path.parent)
            self._new.rename(self._path)
        except (OSError, RuntimeError) as error:
            raise _cannot_bind(self.address, error) from None
        self._bound = True

    async def stop(self, grace: float | None) -> None:
        await super().stop(grace)
        if self._lock_fd < 0:
            return
        if self._bound:
            self._path.unlink(missing_ok=True)
        # While locked: a server that waits for the lock notices that its file is no longer at the path (`_acquire`).
        self._lock.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close the lock's descriptor. For a forked child, in which the lock must not outlive the parent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _check_directory(self) -> None:
        """Raise `CannotListen` if another user could replace the socket: in a directory that everybody may write to,
        such as /tmp, a file or directory on the way to it may be another user's."""
        for inner in (self._lock, *self._path.parents):
            outer = inner.parent.stat().st_mode
            if not outer & stat.S_IWOTH or inner == inner.parent:
                continue
            if not outer & stat.S_ISVTX:
                why = f"everybody may exchange files in {inner.parent}: set another path, or chmod o-w it"
                raise CannotListen(self.address, why)
            with contextlib.suppress(FileNotFoundError):
                if inner.lstat().st_uid not in (0, os.geteuid()):
                    why = f"{inner} is another user's, in a directory that everybody may write to: set another path"
                    raise CannotListen(self.address, why)

    def _acquire(self) -> None:
        # Nothing is read or written. It must not follow links, nor block on a pipe.
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            try:
                fd = os.open(self._lock, flags, 0o600)
            except OSError as error:
                raise CannotListen(self.address, f"{self._lock}: {error.strerror}") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise CannotListen(self.address, "another node server has it") from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), self._lock.stat()):
                    break
            # The last owner removed the file after this process opened it.
            os.close(fd)
        self._lock_fd = fd


class TcpListener(Server):
    """A server on a TCP address, with TLS if there are credentials."""

    def __init__(
        self, address: Address, options: Sequence[tuple[str, Any]], credentials: grpc.ServerCredentials | None
    ) -> None:
        super().__init__(options)
        self.address = address
        self._credentials = credentials

    def listen(self) -> None:
        """Take the address, whose port 0 means a free one; from here on it has the real port. Raises `CannotListen` if
        the port is in use, or the address is not of this host."""
        address = str(self.address)
        try:
            _check_free(self.address)
            if self._credentials is None:
                port = self.add_insecure_port(address)
            else:
                port = self.add_secure_port(address, self._credentials)
        except (OSError, RuntimeError) as error:
            raise _cannot_bind(self.address, error) from None
        self.address = Address(host=self.address.host, port=port)


Listener: TypeAlias = UnixListener | TcpListener
"""A gRPC server and its address, for one event loop. The caller offers services on it and starts it. `stop` releases
the address, and may be called again, to hurry an earlier call."""


def _cannot_bind(address: Address, error: OSError | RuntimeError) -> CannotListen:
    # gRPC raises RuntimeError.
    return CannotListen(address, (error.strerror if isinstance(error, OSError) else "") or str(error))


def _check_free(address: Address) -> None:
    """Raise `OSError` if the port is in use at one of the addresses of a host's name. gRPC is content with the others,
    and does not say why it could not bind."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, at in dict.fromkeys(found):
        with socket.socket(family, kind, protocol) as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trying.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            trying.bind(at)


_unix_listeners: weakref.WeakSet[UnixListener] = weakref.WeakSet()


def _forget_all() -> None:
    for listener in list(_unix_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_forget_all)
