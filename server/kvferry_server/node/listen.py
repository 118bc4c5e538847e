"""Where a node server listens: TCP ports, UNIX sockets, and the checks that come before.

gRPC takes a UNIX socket's path from a running server without a word, and leaves the file of a killed one in the way. So
the path belongs to whoever holds the lock on ``<path>.lock``: a second server is refused, and a file that nobody holds
the lock for is left over and taken over. Both files are gone when a server has ended by itself.

A port is held by a socket beside gRPC's own that listens to nobody, so that it stays ours while a gRPC server takes
another's place (`kvferry_server.node.serving`).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import stat
import weakref
from pathlib import Path
from typing import Protocol

import grpc

from kvferry._wire.channel import MAX_SOCKET_PATH, Address, TlsConfig, parse_address
from kvferry.errors import InvalidField, KvferryError
from kvferry_server.node.grpc_server import Server

logger = logging.getLogger(__name__)

PORT_TRIES = 20
"""Free ports that are tried until one is free on every address of a name."""


class CannotListen(KvferryError):
    """An address that this node server cannot have. Values: address, problem."""

    def __init__(self, address: Address | str, problem: str) -> None:
        super().__init__(f"cannot listen on {address}: {problem}", address=address, problem=problem)


class Listener(Protocol):
    """An address that is ours until `close`; gRPC servers come and go on it."""

    address: Address
    """With its real port, once `hold` has returned."""

    def hold(self) -> None:
        """Make the address ours, or raise `CannotListen`."""

    def bind(self, server: Server) -> None:
        """Have this server listen there, where no other does; or raise `CannotListen`."""

    def close(self) -> None:
        """Give the address up. Idempotent."""

    def forget(self) -> None:
        """In a forked child: the address is the parent's, and must not outlive it here."""


class UnixListener:
    """A UNIX socket and the lock that makes it ours."""

    def __init__(self, path: Path) -> None:
        self.address = Address(path=str(path))
        self._path = path
        self._lock = path.with_name(path.name + ".lock")
        # gRPC binds here, and the socket is renamed when its mode is right: the path is never without a server that
        # has one, nor with a socket that is open to more than it should be.
        self._new = path.with_name("." + path.name)
        self._lock_fd = -1
        self._bound = False

    def hold(self) -> None:
        """Lock the path.

        Raises:
            CannotListen: another server has it, or the directory does not allow it.
        """
        if len(os.fsencode(self._new)) > MAX_SOCKET_PATH:
            raise CannotListen(self.address, f"a path of at most {MAX_SOCKET_PATH - 1} bytes can be had")
        self._make_directory()
        self._check_directory()
        self._acquire()

    def bind(self, server: Server) -> None:
        """Clear the path, and bind.

        Raises:
            CannotListen: something else than a socket is there, or the directory does not allow it.
        """
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
        """Remove the socket and the lock. Idempotent."""
        if self._lock_fd < 0:
            return
        if self._bound:
            self._path.unlink(missing_ok=True)
        # While it is still locked: the file that a waiting server has opened is then not the one at the path
        # any more, and it notices (see _acquire).
        self._lock.unlink(missing_ok=True)
        self._let_go()

    def _make_directory(self) -> None:
        directory = self._path.parent
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            return
        except OSError as error:
            raise CannotListen(
                self.address,
                f"its directory is missing and cannot be made ({error.strerror}); create it, or name another path",
            ) from None
        logger.info("made %s, open to this user only", directory)

    def _check_directory(self) -> None:
        """In a directory that everybody may write to, as in /tmp, names may be a stranger's: a link of his, or a
        directory in which he exchanges our socket for his."""
        for inner in (self._lock, *self._path.parents):
            outer = inner.parent.stat().st_mode
            if not outer & stat.S_IWOTH or inner == inner.parent:
                continue
            if not outer & stat.S_ISVTX:
                raise CannotListen(
                    self.address, f"everybody may exchange files in {inner.parent}; name another path, or chmod o-w it"
                )
            with contextlib.suppress(FileNotFoundError):
                if inner.lstat().st_uid not in (0, os.geteuid()):
                    raise CannotListen(
                        self.address,
                        f"{inner} is another user's, in a directory that everybody may write to; name another path",
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
            if _is_at(fd, self._lock):
                break
            # Its last owner removed it after we had opened it.
            os.close(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd
        _held.add(self)

    def _open_lock(self) -> int:
        # No link is followed, and no pipe waited for: what is opened here is written to.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self._lock, flags, 0o600)
        except OSError as error:
            raise CannotListen(self.address, f"{self._lock}: {error.strerror}") from None
        opened = os.fstat(fd)
        if stat.S_ISREG(opened.st_mode) and opened.st_uid == os.geteuid() and opened.st_nlink <= 1:
            return fd
        os.close(fd)
        raise CannotListen(self.address, f"{self._lock} is not a plain file of this user with that one name")

    def _check_clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise CannotListen(self.address, "there is a file of that name that is not a socket")
            if not self._bound:
                # Nobody else holds the lock, so nobody serves it: left over by a server that was killed.
                logger.info("taking over %s, which a server left behind", self._path)

    def _open_to_directory(self) -> None:
        """Give the socket the mode of its directory: who may enter may connect."""
        entering = self._path.parent.stat().st_mode & 0o111
        self._new.chmod(entering << 1 | entering << 2 | 0o600)
        if entering & 0o001 and not self._bound:
            logger.warning(
                "every user of this host can connect to %s: its directory %s is open to all",
                self._path,
                self._path.parent,
            )

    def _let_go(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)

    def forget(self) -> None:
        """See `Listener`."""
        self._let_go()


class TcpListener:
    """A TCP address; with TLS if there are credentials."""

    def __init__(self, address: Address, credentials: grpc.ServerCredentials | None) -> None:
        self.address = address
        self._credentials = credentials
        self._holding: list[socket.socket] = []

    def hold(self) -> None:
        """Find the port, if it was 0, and keep it.

        Raises:
            CannotListen: it is in use, or not an address of this host.
        """
        for left in reversed(range(PORT_TRIES)):
            try:
                port = self._hold(self.address.port)
            except OSError as error:
                self.close()
                if self.address.port or not left:
                    raise CannotListen(self.address, error.strerror or str(error)) from None
            else:
                self.address = Address(host=self.address.host, port=port)
                _held.add(self)
                return

    def bind(self, server: Server) -> None:
        """Bind.

        Raises:
            CannotListen: somebody has taken it.
        """
        try:
            if self._credentials is None:
                server.add_insecure_port(str(self.address))
            else:
                server.add_secure_port(str(self.address), self._credentials)
        except RuntimeError:
            # gRPC says that it failed, not why.
            raise CannotListen(self.address, _why_not(self.address)) from None

    def close(self) -> None:
        """See `Listener`."""
        _held.discard(self)
        for holding in self._holding:
            holding.close()
        self._holding.clear()

    def forget(self) -> None:
        """See `Listener`."""
        self.close()

    def _hold(self, port: int) -> int:
        """Bind, without listening, each address of the host; the port."""
        found = socket.getaddrinfo(self.address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, at in dict.fromkeys(found):
            holding = socket.socket(family, kind, protocol)
            self._holding.append(holding)
            # As gRPC's own sockets, which may then bind beside it. Another process's may, too, if it asks for that and
            # nobody listens; without it, or by chance, it cannot.
            holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                holding.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            holding.bind((at[0], port, *at[2:]))
            port = holding.getsockname()[1]
        return port


_held: weakref.WeakSet[Listener] = weakref.WeakSet()


def _forget_all() -> None:
    for listener in list(_held):
        listener.forget()


os.register_at_fork(after_in_child=_forget_all)


def check_exposure(address: Address, tls: TlsConfig | None, *, insecure: bool, anonymous_tls: bool) -> None:
    """Refuse to be reachable from other hosts by anybody.

    Raises:
        InvalidField: off loopback without TLS, or with TLS that asks for no certificate, and not told that this is
            meant.
    """
    if insecure or _is_loopback(address):
        return
    if tls is not None and (tls.ca is not None or anonymous_tls):
        return
    if tls is not None:
        raise InvalidField(
            "tls_ca",
            None,
            f"a file (--tls-ca): without it {address} is encrypted, and everybody who reaches it is served, strangers "
            "too. Where only engines can reach it, --anonymous-tls allows that",
        )
    raise InvalidField(
        "listen",
        str(address),
        "an address on loopback, or TLS (--tls-cert, --tls-key, --tls-ca): anybody who reaches this port could "
        "read and end every request. In a network that only engines can reach, --insecure allows it",
    )


def advertised(wanted: str, listening: Address | None, unix: Address | None) -> str:
    """The address to put into references.

    Args:
        wanted: ``host:port``, ``host`` (the real port is added), or empty: what is listened on.
        listening: the bound TCP address.
        unix: the bound UNIX socket, advertised if there is no TCP address.

    Raises:
        InvalidField: nothing that others could dial follows from these.
    """
    if wanted:
        # A host alone, perhaps an IPv6 address in brackets, takes the port that is listened on.
        has_port = ":" in wanted and not wanted.endswith("]")
        address = parse_address(wanted if has_port else f"{wanted}:0", "advertise")
        port = address.port or (listening.port if listening is not None else 0)
        if not address.is_unix and port == 0:
            raise InvalidField("advertise", wanted, "host:port, because there is no TCP port to take it from")
        return str(Address(address.path, address.host, port))
    if listening is not None:
        if _is_wildcard(listening):
            raise InvalidField(
                "advertise", "", f"the host that other nodes reach this one by, because nobody can dial {listening}"
            )
        return str(listening)
    if unix is not None:
        return str(unix)
    raise InvalidField("listen", "", "a TCP address here or a socket in 'unix'; both are empty")


def _is_loopback(address: Address) -> bool:
    """Whether all that the host stands for is loopback; a name that does not resolve is not."""
    try:
        found = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _is_wildcard(address: Address) -> bool:
    try:
        return ipaddress.ip_address(address.host).is_unspecified
    except ValueError:
        return False


def _is_at(fd: int, path: Path) -> bool:
    try:
        at_path = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (at_path.st_dev, at_path.st_ino)


def _why_not(address: Address) -> str:
    """Why a bind failed, by trying it the plain way."""
    try:
        with contextlib.closing(socket.create_server((address.host, address.port))):
            pass
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return "gRPC could not bind it"
