"""Limits that the system and its containers set: memory, files, CPUs, shared memory."""

from __future__ import annotations

import os
import resource

from kvferry._doctor.devices import rdma_devices
from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

LOCKED = Kind("locked-memory-enough", Level.OK)
LOCKED_LITTLE = Kind(
    "locked-memory-little",
    Level.PROBLEM,
    "An RDMA card locks the memory that is registered with it. A KV cache that is larger than the limit cannot be "
    "registered: NixlError, and no way over TCP.",
    "Lift it where engines start: LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker), ulimit -l unlimited.",
)
FILES = Kind("open-files-enough", Level.OK)
FILES_FEW = Kind(
    "open-files-few",
    Level.WARNING,
    "A NIXL agent takes 19 files and one more for each peer; a node server takes one for each connection. A process "
    "that has none left fails in odd ways.",
    "LimitNOFILE=65536 (systemd), --ulimit nofile=65536 (docker), ulimit -n 65536. kvferryd raises its own soft limit "
    "to the hard one; engines do not.",
)
CPUS = Kind("cpus-enough", Level.OK)
CPUS_FEW = Kind(
    "cpus-few",
    Level.WARNING,
    "An engine, its reading thread and a node server take turns on one core: reads wait for steps, and steps "
    "for reads.",
    "Give it at least 2 cores. From 4 on, kvferry reads with two agents where the source is on this host.",
)
CPUS_THROTTLED = Kind(
    "cpus-throttled",
    Level.WARNING,
    "The container was stopped for part of the time because its CPU quota was used up. Renewals, reads and node "
    "servers stand still meanwhile.",
    "Raise the CPU limit (Kubernetes: resources.limits.cpu), or leave it out and keep the request.",
)
SHARED = Kind("shared-memory-enough", Level.OK)
SHARED_LITTLE = Kind(
    "shared-memory-little",
    Level.WARNING,
    "Engines with several workers, such as vLLM, exchange messages there, and end with a bus error when it is full. "
    "kvferry itself does not use /dev/shm.",
    "docker run --shm-size 8g or --ipc host; Kubernetes: an emptyDir with medium: Memory at /dev/shm.",
)
LOCKED_KINDS = (LOCKED, LOCKED_LITTLE)
FILES_KINDS = (FILES, FILES_FEW)
CPU_KINDS = (CPUS, CPUS_FEW, CPUS_THROTTLED)
SHARED_KINDS = (SHARED, SHARED_LITTLE)

ENOUGH_FILES = 4096
ENOUGH_SHARED = 1 << 30
THROTTLED_SHARE = 0.05
_CAP_IPC_LOCK = 14


def check_locked_memory(host: Host) -> list[Finding]:
    """Compare RLIMIT_MEMLOCK with what RDMA needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"RLIMIT_MEMLOCK: {_size(soft)}, and at most {_size(hard)}"
    if soft == resource.RLIM_INFINITY:
        return [LOCKED.found("RLIMIT_MEMLOCK: unlimited")]
    if not rdma_devices(host):
        return [LOCKED.found(f"{said}; it does not matter without RDMA, since nothing is locked")]
    if int(host.status().get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return [LOCKED.found(f"{said}; it does not bind this process, which has CAP_IPC_LOCK, as root has")]
    return [LOCKED_LITTLE.found(said)]


def check_open_files(host: Host) -> list[Finding]:
    """Compare RLIMIT_NOFILE with what agents and connections take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"RLIMIT_NOFILE: {soft:,}, and at most {hard:,}"
    return [FILES.found(said) if soft >= ENOUGH_FILES else FILES_FEW.found(said)]


def check_cpus(host: Host) -> list[Finding]:
    """Count the cores that this process may use, and how often its container was stopped."""
    allowed, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota, times, stopped = _quota(host)
    said = f"may run on {allowed} of {all_cores} cores"
    if quota:
        said += f", for {quota:g} cores' time (cgroup)"
    findings = []
    usable = min(allowed, quota or allowed)
    findings.append((CPUS if usable >= 2 else CPUS_FEW).found(said))
    if times and stopped / times > THROTTLED_SHARE:
        findings.append(CPUS_THROTTLED.found(f"stopped in {stopped:,} of {times:,} periods ({stopped / times:.0%})"))
    return findings


def check_shared_memory(host: Host) -> list[Finding]:
    """Measure /dev/shm."""
    try:
        found = os.statvfs(host.path("/dev/shm"))
    except OSError:
        return [SHARED_LITTLE.found("there is no /dev/shm")]
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    said = f"/dev/shm: {_size(size)}, {_size(free)} free"
    return [SHARED.found(said) if size >= ENOUGH_SHARED else SHARED_LITTLE.found(said)]


def _quota(host: Host) -> tuple[float, int, int]:
    """The cores' time that the cgroup allows (0: all), its periods, and those in which it was stopped."""
    for unified, folder in _cgroups(host):
        if unified:
            limit, _, period = host.text(f"{folder}/cpu.max").partition(" ")
        else:
            limit, period = host.text(f"{folder}/cpu.cfs_quota_us"), host.text(f"{folder}/cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(period):
            lines = (line.split() for line in host.text(f"{folder}/cpu.stat").splitlines())
            stat = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
            return int(limit) / int(period), stat.get("nr_periods", 0), stat.get("nr_throttled", 0)
    return 0.0, 0, 0


def _cgroups(host: Host) -> list[tuple[bool, str]]:
    """The folders of this process's cgroup and of those above it, the nearest first; whether each is of version 2."""
    folders = []
    for line in host.text("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if not controllers else ("/sys/fs/cgroup/cpu",)
        names = [name for name in path.split("/") if name and name != ".."]
        folders += [
            (not controllers, "/".join([root, *names[:depth]])) for depth in range(len(names), -1, -1) for root in roots
        ]
    return folders


def _size(count: int) -> str:
    if count == resource.RLIM_INFINITY:
        return "unlimited"
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"
