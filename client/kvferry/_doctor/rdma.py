"""RDMA cards: whether NIXL's UCX can use each, and if not, why. UCX itself is asked, with one card at a time."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvferry._doctor.devices import rdma_devices
from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host
from kvferry._doctor.moves import complaints, written

NONE = Kind(
    "rdma-none",
    Level.WARNING,
    "Between nodes bytes move over TCP, which takes CPU time on both sides. On one host nothing changes.",
    "If the node has an RDMA card, load its driver and give it to the container; if it has none, there is "
    "nothing to do.",
)
USABLE = Kind("rdma-usable", Level.OK)
DOWN = Kind(
    "rdma-port-down",
    Level.WARNING,
    "No bytes move over this port. UCX uses others, or TCP without a word.",
    "Check cable, switch and, on InfiniBand, the subnet manager.",
)
NOT_GIVEN = Kind(
    "rdma-not-given",
    Level.PROBLEM,
    "The kernel has this card, and this process cannot open its device file: UCX uses others, or TCP without a word.",
    "Give the container the devices (docker run --device /dev/infiniband; Kubernetes: an RDMA device plugin), and its "
    "user the right to read and write them.",
)
NO_DRIVER = Kind(
    "rdma-no-driver",
    Level.PROBLEM,
    "NIXL's packages bring a libibverbs of their own, with a driver for NVIDIA's cards (mlx5) alone. UCX does not see "
    "this card, and uses others, or TCP without a word.",
    "Install the distribution's libibverbs and its drivers (Debian, Ubuntu: apt-get install ibverbs-providers; Fedora, "
    "RHEL: dnf install libibverbs), and put a link to it in the place of NIXL's: docs/rdma.md.",
)
REFUSED = Kind(
    "rdma-refused",
    Level.PROBLEM,
    "UCX sees this card and makes no agent with it. It uses others, or TCP without a word.",
    "Read what UCX says. UCX knows InfiniBand and RoCE; iWARP it does not. UCX_IB_GID_INDEX, if set, has to be that of "
    "a GID that the port has.",
)
NOT_REGISTERED = Kind(
    "rdma-not-registered",
    Level.PROBLEM,
    "No memory can be registered with this card: an engine is refused with NixlError. It does not move over TCP "
    "instead.",
    "Read what is said here, and the finding of `locked-memory`. Until that is mended, UCX_TLS=tcp,cma goes without "
    "the card.",
)
NOT_TRIED = Kind(
    "rdma-not-tried", Level.UNKNOWN, "Whether NIXL can use the card was not tried.", "pip install 'kvferry[nixl]'"
)
KINDS = (NONE, USABLE, DOWN, NOT_GIVEN, NO_DRIVER, REFUSED, NOT_REGISTERED, NOT_TRIED)

SIZE = 64 << 20
"""Bytes that are registered: more than what distributions let a process lock by default (8 MiB)."""


@dataclass(frozen=True)
class Port:
    """A port of a card.

    Attributes:
        name: as UCX names it, such as ``mlx5_0:1``.
        active: whether it is.
        said: its state, rate and link layer.
    """

    name: str
    active: bool
    said: str

    @property
    def device(self) -> str:
        """The card."""
        return self.name.partition(":")[0]


def check(host: Host) -> list[Finding]:
    """Look at each port of each card, and have UCX try those that should work."""
    found = ports(host)
    if not found:
        return [NONE.found("no device in /sys/class/infiniband")]
    findings, tried = [], []
    for port in found:
        if not port.active:
            findings.append(DOWN.found(port.said))
        elif problem := unopened(host, port.device):
            findings.append(NOT_GIVEN.found(f"{port.said}: {problem}"))
        else:
            tried.append(port)
    return [*(try_out(tried) if tried else ()), *findings]


def ports(host: Host) -> list[Port]:
    """Return the ports of all cards, as the kernel tells of them."""
    found = []
    for device in rdma_devices(host):
        for number in host.names(f"/sys/class/infiniband/{device}/ports"):
            folder = f"/sys/class/infiniband/{device}/ports/{number}"
            state, rate = host.text(f"{folder}/state"), host.text(f"{folder}/rate")
            told = f"{state.partition(': ')[2] or state}, {rate}, {host.text(f'{folder}/link_layer')}"
            found.append(Port(f"{device}:{number}", "ACTIVE" in state, f"{device}:{number} {told}"))
    return found


def unopened(host: Host, device: str) -> str:
    """Say why the device file of a card cannot be opened; empty if it can."""
    verbs = "/sys/class/infiniband_verbs"
    names = [name for name in host.names(verbs) if host.text(f"{verbs}/{name}/ibdev") == device]
    if not names:
        return "it has no device file; is the module ib_uverbs loaded?"
    path = f"/dev/infiniband/{names[0]}"
    try:
        os.close(os.open(host.path(path), os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def try_out(tried: list[Port]) -> list[Finding]:
    """Make an agent with each of these ports alone, and register memory with it."""
    from kvferry._transport import nixl_binding
    from kvferry.errors import NixlMissing

    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        log = Path(folder) / f"ucx.{os.getpid()}"
        # Set before NIXL is loaded.
        os.environ["UCX_LOG_FILE"] = str(Path(folder) / "ucx.%p")
        try:
            nixl = nixl_binding.load()
        except NixlMissing as error:
            return [NOT_TRIED.found(f"{port.said}: {error.message}") for port in tried]
        return [_try_port(nixl, port, log) for port in tried]


def _try_port(nixl: object, port: Port, log: Path) -> Finding:
    from kvferry._transport import locked_memory, nixl_binding, rdma_cards
    from kvferry._transport.nixl_options import NixlOptions
    from kvferry.errors import NixlError
    from kvferry.host_memory import HostMemory

    # UCX reads them whenever an agent is made. Without TCP, so that it cannot take that instead.
    os.environ |= {"UCX_NET_DEVICES": port.name, "UCX_TLS": "ib"}
    known = len(written(log))
    try:
        agent, backend = nixl_binding.new_agent(nixl, f"doctor-{port.name}", NixlOptions(), progress_thread=False)
    except NixlError as error:
        drivers = rdma_cards.with_driver()
        if drivers is not None and port.device not in drivers:
            return NO_DRIVER.found(f"{port.said}: UCX's libibverbs has no driver for it", link())
        if locked_memory.too_little():
            return NOT_REGISTERED.found(f"{port.said}: {error}")
        return REFUSED.found(f"{port.said}: {error}{complaints(written(log)[known:])}")
    memory = HostMemory(SIZE)
    try:
        nixl_binding.register(nixl, agent, backend, [memory.region])
    except NixlError as error:
        return NOT_REGISTERED.found(f"{port.said}: {error}{complaints(written(log)[known:])}")
    return USABLE.found(f"{port.said}: NIXL's UCX uses it")


def link() -> str:
    """Say the command that has UCX use the distribution's libibverbs; empty if it does so already, or there is none."""
    from kvferry._transport.rdma_cards import mapped

    # kvferry loads the distribution's; UCX's modules lie in a folder of that of the wheel's libraries.
    theirs = next((path.with_name("libibverbs.so.1") for path in mapped("/libibverbs.so.1")), None)
    wheel = next((path.parents[1] for path in mapped("/libuct_ib.so")), None)
    own = next(iter(wheel.glob("libibverbs-*.so*")), None) if wheel else None
    if theirs is None or own is None or own.is_symlink():
        return ""
    return f"ln -sf {theirs} {own}"
