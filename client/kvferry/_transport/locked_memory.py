"""Whether this process may lock the memory that RDMA cards read (RLIMIT_MEMLOCK)."""

from __future__ import annotations

import os
import resource
from pathlib import Path

DEVICES = Path("/dev/infiniband")
CARDS = Path("/sys/class/infiniband")
STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 14

UCX_LOCKS = 64 << 20
"""Bytes that UCX locks for the buffers of one agent, about (45 MB measured). If UCX may not lock them, NIXL's
``createBackend`` tries again for ever (docs/nixl.md, Faults over verbs)."""

VERBS = ("rc", "ud", "dc", "ib")
"""Prefixes of the names of UCX's transports over verbs."""


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
    if limit == resource.RLIM_INFINITY or not any(DEVICES.glob("uverbs*")) or _may_lock_all():
        return ""
    return (
        f"RLIMIT_MEMLOCK is {limit:,} bytes, and RDMA cards lock all memory that they read: lift it where engines "
        "start (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1, ulimit -l unlimited)"
    )


def _may_lock_all() -> bool:
    capabilities = next(line for line in STATUS.read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(capabilities.split()[1], 16) >> CAP_IPC_LOCK & 1)
