"""The host's network as NIXL's UCX sees it: the RDMA cards (where UCX can open none it uses TCP without a message),
whether this process may lock the memory that they read (RLIMIT_MEMLOCK), and whether UCX has connected to a peer over
TCP, which UCX does not report: the open files of this process show it."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry._logs import Log

logger = Log(__name__)

FOLDER = Path("/proc/self/fd")
DEVICES = Path("/dev/infiniband")
CARDS = Path("/sys/class/infiniband")
STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 14

UCX_LOCKS = 64 << 20
"""Bytes that UCX locks for the buffers of one agent, about (45 MB measured). If UCX may not lock them, NIXL's
``createBackend`` tries again for ever (docs/nixl.md, Faults over verbs)."""

VERBS = ("rc", "ud", "dc", "ib")
"""Prefixes of the names of UCX's transports over verbs."""

_libc = ctypes.CDLL(None)


@contextmanager
def expected() -> Iterator[None]:
    """Context in which an agent of UCX is made: if the host has active cards and UCX opens none of them, log that once
    in a process. UCX keeps the device files open of exactly the cards that it may use."""
    before = opened() if active() else None
    yield
    if before is not None and opened() == before:
        _warn()


def active() -> list[str]:
    """The devices that have an active port, such as ``mlx5_0``."""
    found = set()
    for state in CARDS.glob("*/ports/*/state"):
        with suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.add(state.parents[2].name)
    return sorted(found)


def opened() -> int:
    """The number of device files of RDMA cards that this process has open."""
    return sum(name.startswith("/dev/infiniband/uverbs") for name in (open_files() or {}).values())


def mapped(name: str) -> list[Path]:
    """The files that this process has mapped whose path contains `name`."""
    with suppress(OSError), Path("/proc/self/maps").open() as lines:
        return [Path(path) for path in dict.fromkeys(line[line.find("/") : -1] for line in lines if name in line)]
    return []


def with_driver() -> list[str] | None:
    """The devices for which UCX's libibverbs has a driver; None: UCX's module is not loaded, as before the first agent.

    Several libibverbs may be loaded. A symbol looked up in UCX's module belongs to the libibverbs that UCX uses.
    """
    module = next(iter(mapped("/libuct_ib.so")), None)
    if module is None:
        return None
    verbs = ctypes.CDLL(str(module))
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int()
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return []
    names = [verbs.ibv_get_device_name(ctypes.c_void_p(devices[index])).decode() for index in range(count.value)]
    verbs.ibv_free_device_list(devices)
    return names


def too_little_to_begin(ucx_tls: str) -> str:
    """Why no agent can be made with these transports; empty: nothing known prevents it."""
    problem = too_little()
    transports = (os.environ.get("UCX_TLS") or ucx_tls or "all").split(",")
    verbs = any(transport.startswith(VERBS) for transport in transports)
    if transports == ["all"]:
        # NIXL's packages bring a driver only for mlx5 cards (docs/rdma.md): for other cards UCX goes over TCP.
        verbs = any(driver.resolve().name == "mlx5_core" for driver in CARDS.glob("*/device/driver"))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return problem if verbs and limit < UCX_LOCKS else ""


def too_little() -> str:
    """The likely reason for a failed registration of memory, and the remedy; empty: memory may be locked without a
    limit, or there is no card."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or not any(DEVICES.glob("uverbs*")):
        return ""
    capabilities = next(line for line in STATUS.read_text().splitlines() if line.startswith("CapEff:"))
    if int(capabilities.split()[1], 16) >> CAP_IPC_LOCK & 1:
        return ""
    return (
        f"RLIMIT_MEMLOCK is {limit:,} bytes, and RDMA cards lock all memory that they read: lift it where engines "
        "start (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1, ulimit -l unlimited)"
    )


@functools.cache
def _warn() -> None:
    logger.warning(
        "bytes between hosts go over TCP: there is an RDMA card (%s), and NIXL's UCX uses none. "
        "`kvferry doctor` says why",
        ", ".join(active()),
    )


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
    options = (socket.SO_DOMAIN, {socket.AF_INET, socket.AF_INET6}), (socket.SO_TYPE, {socket.SOCK_STREAM})
    value = ctypes.c_int()
    size = ctypes.c_uint32(ctypes.sizeof(value))
    # The call fails if the descriptor is no socket, or was closed.
    return all(
        _libc.getsockopt(descriptor, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(size)) == 0
        and value.value in accepted
        for option, accepted in options
    )
