"""Where a node server listens: TCP ports, UNIX sockets, and the checks that come before.

gRPC takes a UNIX socket's path from a running server without a word, and leaves the file of a killed one in
the way. So the path belongs to whoever holds the lock on ``<path>.lock``: a second server is refused, and a
file that nobody holds the lock for is left over and taken over. Both files are gone when a server has ended
by itself.
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

import grpc.aio

from kvferry.channel import Address, parse_address
from kvferry.errors import InvalidField, KvferryError

logger = logging.getLogger(__name__)


class CannotListen(KvferryError):
    """An address that this node server cannot have. Values: address, problem."""

    def __init__(self, address: Address | str, problem: str) -> None:
        super().__init__(f"cannot listen on {address}: {problem}", address=address, problem=problem)


class UnixListener:
    """A UNIX socket and the lock that makes it ours."""

    def __init__(self, path: Path) -> None:
        self.address = Address(path=str(path))
        self._path = path
        self._lock = path.with_name(path.name + ".lock")
        self._lock_fd = -1
        self._bound = False

    def bind(self, server: grpc.aio.Server) -> None:
        """Lock the path, clear it, and bind.

        Raises:
            CannotListen: another server has it, something else than a socket is there, or the directory does
                not allow it.
        """
        self._make_directory()
        self._acquire()
        try:
            self._clear()
            try:
                server.add_insecure_port(str(self.address))
            except RuntimeError as error:
                raise CannotListen(self.address, str(error)) from None
            self._bound = True
            self._open_to_directory()
        except BaseException:
            self.close()
            raise

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

    def _acquire(self) -> None:
        while True:
            try:
                fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise CannotListen(self.address, f"{self._lock}: {error.strerror}") from None
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

    def _clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise CannotListen(self.address, "there is a file of that name that is not a socket")
            # Nobody holds the lock, so nobody serves it: left over by a server that was killed.
            logger.info("taking over %s, which a server left behind", self._path)
            self._path.unlink()

    def _open_to_directory(self) -> None:
        """Give the socket the mode of its directory: who may enter may connect."""
        entering = self._path.parent.stat().st_mode & 0o111
        self._path.chmod(entering << 1 | entering << 2 | 0o600)
        if entering & 0o001:
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
        """In a forked child: the socket is the parent's, and so must its lock be, or it would outlive the
        parent."""
        self._let_go()


_held: weakref.WeakSet[UnixListener] = weakref.WeakSet()


def _forget_all() -> None:
    for listener in list(_held):
        listener.forget()


os.register_at_fork(after_in_child=_forget_all)


def bind_tcp(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> Address:
    """Bind a TCP address; the same with its real port, if that was 0.

    Raises:
        CannotListen: it is in use, or not an address of this host.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError:
        # gRPC says that it failed, not why.
        raise CannotListen(address, _why_not(address)) from None
    return Address(host=address.host, port=port)


def check_exposure(address: Address, *, tls: bool, insecure: bool) -> None:
    """Refuse to be reachable from other hosts by anybody.

    Raises:
        InvalidField: off loopback without TLS, and not told that this is meant.
    """
    if tls or insecure or _is_loopback(address):
        return
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
