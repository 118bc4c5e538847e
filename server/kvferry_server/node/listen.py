"""Listeners: the TCP port and the UNIX socket of a node server, the gRPC servers on them, and the checks before.

gRPC silently takes a UNIX socket's path from a running server, and fails on the file that a killed server left. So a
path belongs to the process that holds the lock on ``<path>.lock``: a second server is refused, and a socket whose lock
no process holds is a leftover, which is replaced. A server that stops removes both files.

A second socket, which does not listen, reserves the port, so that no other process gets it while one gRPC server
replaces another. That happens when something in a gRPC server raises (see `kvferry_server.node.grpc_server`). The home
keeps its state: the calls of the ended server fail, which clients treat as a lost connection, and the next server
listens at the same address within a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import grpc

from kvferry._wire.channel import MAX_SOCKET_PATH, Address, parse_address
from kvferry.errors import InvalidField, KvferryError
from kvferry_server.node.config import NodeConfig
from kvferry_server.node.grpc_server import Server
from kvferry_server.node.limits import PORT_TRIES, RESTART_LOG_PAUSE, RESTART_PAUSE

logger = logging.getLogger(__name__)


class CannotListen(KvferryError):
    """The node server cannot listen on an address. Values: address, problem."""

    def __init__(self, address: Address | str, problem: str) -> None:
        super().__init__(f"cannot listen on {address}: {problem}", address=address, problem=problem)


class Listener(ABC):
    """An address that this process holds from `hold` until `stop`, and its gRPC server: if that ends, another replaces
    it. `address` has its real port once `hold` has returned. Belongs to one event loop."""

    replacing: asyncio.Task[None] | None = None  # Ends only with `stop`, or by a bug

    def __init__(self, address: Address) -> None:
        self.address = address
        self._server: Server | None = None
        self._problems, self._logged = 0, float("-inf")
        _listeners.add(self)

    @abstractmethod
    def hold(self) -> None:
        """Reserve the address; raises `CannotListen`."""

    @abstractmethod
    def bind(self, server: Server) -> None:
        """Make a gRPC server listen on the address, on which no other server may listen; raises `CannotListen`."""

    def close(self) -> None:
        """Release the address. Idempotent."""
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Close the descriptors. For a forked child, in which the address must not outlive the parent."""

    async def serve(self, make: Callable[[], Server]) -> None:
        """Start to serve; `make` makes gRPC servers with all services and no address. Raises `CannotListen`."""
        self._server = await self._started(make)
        self.replacing = asyncio.create_task(self._replace(make), name=f"kvferry-serving-{self.address}")

    @property
    def is_serving(self) -> bool:
        """False while a new gRPC server replaces another."""
        return self._server is not None

    async def stop(self, grace: float) -> None:
        """Stop the server after at most `grace` seconds for calls in progress, and release the address. May be called
        again, to hurry an earlier call."""
        if self.replacing is not None:
            self.replacing.cancel()
            await asyncio.wait([self.replacing])
        if self._server is not None:
            await self._server.stop(grace)
        self.close()

    async def _started(self, make: Callable[[], Server]) -> Server:
        server = make()
        try:
            self.bind(server)
            await server.start()
        except BaseException:
            # A server that has bound keeps the address, even if it has not started.
            await server.stop(0)
            raise
        return server

    async def _replace(self, make: Callable[[], Server]) -> None:
        loop = asyncio.get_running_loop()
        while self._server is not None:
            began = loop.time()
            why = await self._server.ended()
            # After this the ended server does not keep the next one from listening.
            await self._server.stop(0)
            self._server = None
            await asyncio.sleep(max(0.0, began + RESTART_PAUSE - loop.time()))
            self._log(f"gRPC's server has ended ({why!r}); a new server replaces it, and no state is lost")
            while self._server is None:
                try:
                    self._server = await self._started(make)
                except CannotListen as error:
                    self._log(f"{error}; trying again")
                    await asyncio.sleep(RESTART_PAUSE)

    def _log(self, problem: str) -> None:
        self._problems += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged >= RESTART_LOG_PAUSE:
            self._logged = now
            logger.error("%s: %s [%d problems since the start]", self.address, problem, self._problems)


class UnixListener(Listener):
    """A UNIX socket, and the lock that reserves its path."""

    def __init__(self, path: Path) -> None:
        super().__init__(Address(path=str(path)))
        self._path = path
        self._lock = path.with_name(path.name + ".lock")
        # gRPC binds to this path, and the socket is renamed once its mode is right. So the real path always has a
        # socket while one server replaces another, and never a socket that too many users can connect to.
        self._new = path.with_name("." + path.name)
        self._lock_fd = -1
        self._bound = False

    def hold(self) -> None:
        """Lock the path; raises `CannotListen` if another server has it, or its directory is not usable or not safe."""
        if len(os.fsencode(self._new)) > MAX_SOCKET_PATH:
            raise CannotListen(self.address, f"the path may have at most {MAX_SOCKET_PATH - 1} bytes")
        self._make_directory()
        self._check_directory()
        self._acquire()

    def bind(self, server: Server) -> None:
        """Raises `CannotListen` also if a file that is no socket is there, or the directory is not writable."""
        self._check_clear()
        try:
            server.add_insecure_port(f"unix:{self._new}")
        except RuntimeError as error:
            raise CannotListen(self.address, str(error)) from None
        try:
            self._open_to_directory()
            self._new.rename(self._path)
        except OSError as error:
            raise CannotListen(self.address, f"{error.strerror}") from None
        self._bound = True

    def close(self) -> None:
        if self._lock_fd < 0:
            return
        if self._bound:
            self._path.unlink(missing_ok=True)
        # Removed while locked: a server that waits for the lock has opened a file that is no longer at the path, and
        # notices that (see _acquire).
        self._lock.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _make_directory(self) -> None:
        directory = self._path.parent
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            return
        except OSError as error:
            raise CannotListen(
                self.address,
                f"its directory does not exist and cannot be created ({error.strerror}); create it or set another path",
            ) from None
        logger.info("created %s, which only this user may enter", directory)

    def _check_directory(self) -> None:
        """Raise `CannotListen` if another user could replace the socket: in a directory that everybody may write to,
        such as /tmp, a file or directory on the way to it may be another user's."""
        for inner in (self._lock, *self._path.parents):
            outer = inner.parent.stat().st_mode
            if not outer & stat.S_IWOTH or inner == inner.parent:
                continue
            if not outer & stat.S_ISVTX:
                raise CannotListen(
                    self.address, f"everybody may exchange files in {inner.parent}: set another path, or chmod o-w it"
                )
            with contextlib.suppress(FileNotFoundError):
                if inner.lstat().st_uid not in (0, os.geteuid()):
                    raise CannotListen(
                        self.address,
                        f"{inner} is another user's, in a directory that everybody may write to: set another path",
                    )

    def _acquire(self) -> None:
        while True:
            fd = self._open_lock()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise CannotListen(self.address, f"another node server has it (process {owner})") from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), self._lock.stat()):
                    break
            # The last owner removed the file after this process opened it.
            os.close(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd

    def _open_lock(self) -> int:
        # This process writes to the file, so it must not follow links, nor block on a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self._lock, flags, 0o600)
        except OSError as error:
            raise CannotListen(self.address, f"{self._lock}: {error.strerror}") from None
        opened = os.fstat(fd)
        if stat.S_ISREG(opened.st_mode) and opened.st_uid == os.geteuid() and opened.st_nlink <= 1:
            return fd
        os.close(fd)
        raise CannotListen(self.address, f"{self._lock} is not a regular file of this user without other links")

    def _check_clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise CannotListen(self.address, "a file that is not a socket is there")
            if not self._bound:
                # No other process holds the lock, so no server listens on the socket: a killed server left it.
                logger.info("replacing %s, which a killed server left", self._path)

    def _open_to_directory(self) -> None:
        """Set the socket's mode so that users who may enter its directory may connect."""
        entering = self._path.parent.stat().st_mode & 0o111
        self._new.chmod(entering << 1 | entering << 2 | 0o600)
        if entering & 0o001 and not self._bound:
            logger.warning(
                "every user of this host can connect to %s, because every user may enter its directory %s",
                self._path,
                self._path.parent,
            )


class TcpListener(Listener):
    """A TCP address; with TLS if there is a function that makes credentials, which each gRPC server needs anew."""

    def __init__(self, address: Address, credentials: Callable[[], grpc.ServerCredentials] | None) -> None:
        super().__init__(address)
        self._credentials = credentials
        self._reserving: list[socket.socket] = []

    def hold(self) -> None:
        """Raises `CannotListen` if the port is in use, or the address is not of this host. Port 0: a free one."""
        for left in reversed(range(PORT_TRIES)):
            try:
                port = self._reserve(self.address.port)
            except OSError as error:
                self.close()
                if self.address.port or not left:
                    raise CannotListen(self.address, error.strerror or str(error)) from None
            else:
                self.address = Address(host=self.address.host, port=port)
                return

    def bind(self, server: Server) -> None:
        try:
            if self._credentials is None:
                server.add_insecure_port(str(self.address))
            else:
                server.add_secure_port(str(self.address), self._credentials())
        except RuntimeError:
            # gRPC does not say why it failed.
            raise CannotListen(self.address, _why_not(self.address)) from None

    def forget(self) -> None:
        for reserving in self._reserving:
            reserving.close()
        self._reserving.clear()

    def _reserve(self, port: int) -> int:
        """Bind each address of the host without listening. Returns the port."""
        found = socket.getaddrinfo(self.address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, at in dict.fromkeys(found):
            reserving = socket.socket(family, kind, protocol)
            self._reserving.append(reserving)
            # With this option, which gRPC's sockets also have, gRPC can bind to the same port. Another process can do
            # so only with the option and while no socket listens, and never gets this port as a free one.
            reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                reserving.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            reserving.bind((at[0], port, *at[2:]))
            port = reserving.getsockname()[1]
        return port


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _forget_all() -> None:
    for listener in list(_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_forget_all)


def check_exposure(config: NodeConfig) -> None:
    """Raise `InvalidField` if the TCP address is not on loopback, so that every host can connect, and neither mTLS nor
    the setting `insecure` or `anonymous_tls` allows that."""
    address, tls = config.listen_address, config.tls
    if address is None or config.insecure or is_on_loopback(address):
        return
    if tls is not None:
        if tls.ca is not None or config.anonymous_tls:
            return
        raise InvalidField(
            "tls_ca",
            None,
            f"a file (--tls-ca): without it, {address} is encrypted but serves everyone who can connect. If only "
            "engines can reach it, allow that with --anonymous-tls",
        )
    raise InvalidField(
        "listen",
        str(address),
        "an address on loopback, or TLS (--tls-cert, --tls-key, --tls-ca): otherwise everyone who can connect could "
        "read and end every request. If only engines can reach this network, allow that with --insecure",
    )


def advertised(wanted: str, listening: Address | None, unix: Address | None) -> str:
    """Return the address to put into references; raises `InvalidField` if other hosts could not connect to it.

    `wanted` is ``host:port``, ``host`` (the real port is added), or empty: the reserved TCP address `listening`, else
    the socket `unix`.
    """
    if wanted:
        # A host without a port, perhaps an IPv6 address in brackets, gets the port of the listener.
        has_port = ":" in wanted and not wanted.endswith("]")
        address = parse_address(wanted if has_port else f"{wanted}:0", "advertise")
        port = address.port or (listening.port if listening is not None else 0)
        if not address.is_unix and port == 0:
            raise InvalidField("advertise", wanted, "host:port, because this server listens on no TCP port")
        return str(Address(address.path, address.host, port))
    if listening is not None:
        wildcard = False
        with contextlib.suppress(ValueError):
            wildcard = ipaddress.ip_address(listening.host).is_unspecified
        if wildcard:
            raise InvalidField(
                "advertise", "", f"the host at which other nodes reach this one: they cannot connect to {listening}"
            )
        return str(listening)
    # `NodeConfig` refuses settings with neither.
    return str(unix)


def is_on_loopback(address: Address) -> bool:
    """Whether all addresses of the host are loopback; False for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _why_not(address: Address) -> str:
    """Bind a plain socket to find out why gRPC's bind failed."""
    try:
        with contextlib.closing(socket.create_server((address.host, address.port))):
            pass
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return "gRPC could not bind it"
