"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry._doctor import (
    clocks,
    devices,
    environment,
    isolation,
    limits,
    moves,
    packages,
    pages,
    peer,
    rdma,
    same_host,
)
from kvferry._doctor.finding import Finding, Kind
from kvferry._doctor.host import Host


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: what it is called on the command line and in docs/doctor.md.
        looks_at: what it looks at.
        look: the function; it returns at least one finding.
        kinds: all that it can find.
        alone: seconds for which it may run in a process of its own, beside the waits for a peer; 0: it runs in this
            one.
    """

    name: str
    looks_at: str
    look: Callable[[Host], list[Finding]]
    kinds: tuple[Kind, ...]
    alone: float = 0.0

    def run(self, host: Host) -> list[Finding]:
        """Look, in a process of its own if it needs one. A check that raises is a finding too."""
        try:
            if self.alone:
                # A peer is waited for several times: its name, its port, its answers.
                return isolation.run(self.name, host, self.alone + 4 * host.timeout)
            return self.look(host)
        except Exception as error:
            return [isolation.DIED.found(f"the check `{self.name}` raised {type(error).__name__}: {error}")]


CHECKS = (
    Check("packages", "the versions of kvferry's packages", packages.check, packages.KINDS),
    Check("environment", "variables of UCX, NIXL, gRPC and torch", environment.check, environment.KINDS),
    Check("cma", "whether two processes may read each other's memory", same_host.check, same_host.KINDS, 30.0),
    Check(
        "moves",
        "a read of 64 MiB from another process over NIXL, and at how that process ends",
        moves.check,
        moves.KINDS,
        60.0,
    ),
    Check("huge-pages", "transparent huge pages: the mode, and 16 MiB of them", pages.check, pages.KINDS, 20.0),
    Check("locked-memory", "RLIMIT_MEMLOCK", limits.check_locked_memory, limits.LOCKED_KINDS),
    Check("open-files", "RLIMIT_NOFILE", limits.check_open_files, limits.FILES_KINDS),
    Check("cpus", "cores, affinity, the cgroup's quota and throttling", limits.check_cpus, limits.CPU_KINDS),
    Check("shared-memory", "the size of /dev/shm", limits.check_shared_memory, limits.SHARED_KINDS),
    Check("clock", "suspends since the start, the clock's source", clocks.check, clocks.KINDS),
    Check("gpu", "GPUs, their device files, peer memory", devices.check_gpu, devices.GPU_KINDS),
    Check(
        "rdma",
        "RDMA cards: their ports and device files, and an agent of NIXL with 64 MiB of memory on each",
        rdma.check,
        rdma.KINDS,
        60.0,
    ),
    Check("network", "network cards, their speed and MTU", devices.check_network, devices.NETWORK_KINDS),
    Check("peer", "a node server: name, port, TLS, health, version, an echo", peer.check, peer.KINDS, 60.0),
)
"""`peer` runs only if a peer is named."""

KINDS = {kind.name: kind for check in CHECKS for kind in check.kinds} | {kind.name: kind for kind in isolation.KINDS}


def examine(host: Host) -> Iterator[tuple[Check, list[Finding]]]:
    """Run all checks, one after another; each result when it is there."""
    for check in CHECKS:
        if check.name != "peer" or host.peer:
            yield check, check.run(host)
