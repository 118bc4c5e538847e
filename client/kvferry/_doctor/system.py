"""Checks of the system: memory, files, cores and GPUs."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from kvferry._doctor.check import Finding, Host, finding

ENOUGH_FILES = 4096
THROTTLED_SHARE = 0.05

_TRIED = 16 << 20
_CAP_IPC_LOCK = 14


def huge_pages(host: Host) -> list[Finding]:
    """Read the kernel's mode, the word in brackets, and try to get huge pages: reads from a source in pages of 2 MiB
    are up to twice as fast as from pages of 4 KiB (docs/nixl.md)."""
    from kvferry.host_memory import HostMemory

    mode = host.text("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]
    if mode in ("", "never"):
        return [finding("huge-pages-off", "transparent huge pages: never" if mode else "the kernel has none")]
    memory = HostMemory(_TRIED)
    given = min(memory.huge_bytes(), _TRIED)
    said = f"mode {mode}; {given >> 20} of {_TRIED >> 20} MiB came in huge pages"
    if not given:
        allowed = host.status().get("THP_enabled", "1")
        return [finding("huge-pages-not-given", f"{said}; THP_enabled of this process: {allowed}")]
    asks = mode == "madvise" and host.environ.get("THP_MEM_ALLOC_ENABLE") != "1"
    return [finding("huge-pages-on-request" if asks else "huge-pages-given", said)]


def locked_memory(host: Host) -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"RLIMIT_MEMLOCK: {_size(soft)}, and at most {_size(hard)}"
    if soft == resource.RLIM_INFINITY:
        return [finding("locked-memory-enough", "RLIMIT_MEMLOCK: unlimited")]
    if not host.rdma_devices():
        said += "; it does not matter without RDMA, since nothing is locked"
    elif host.capable(_CAP_IPC_LOCK):
        said += "; it does not bind this process, which has CAP_IPC_LOCK, as root has"
    else:
        return [finding("locked-memory-little", said)]
    return [finding("locked-memory-enough", said)]


def open_files(host: Host) -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"RLIMIT_NOFILE: {soft:,}, and at most {hard:,}"
    return [finding("open-files-enough" if soft >= ENOUGH_FILES else "open-files-few", said)]


def cpus(host: Host) -> list[Finding]:
    allowed, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota, times, stopped = _quota(host)
    said = f"may run on {allowed} of {all_cores} cores"
    if quota:
        said += f", for {quota:g} cores' time (cgroup)"
    findings = [finding("cpus-enough" if min(allowed, quota or allowed) >= 2 else "cpus-few", said)]
    if times and stopped / times > THROTTLED_SHARE:
        said = f"stopped in {stopped:,} of {times:,} periods ({stopped / times:.0%})"
        findings.append(finding("cpus-throttled", said))
    return findings


def _quota(host: Host) -> tuple[float, int, int]:
    """Return the cores' time that the cgroup allows (0: all), its periods, and the periods in which it was stopped."""
    path = host.text("/proc/self/cgroup").rpartition("::")[2].strip("/")
    for name in (path, *(str(above) for above in Path(path).parents)):
        folder = f"/sys/fs/cgroup/{name}"
        limit, _, period = host.text(f"{folder}/cpu.max").partition(" ")
        if limit.isdigit() and period.isdigit() and int(period):
            stat = dict(re.findall(r"^(\w+) (\d+)$", host.text(f"{folder}/cpu.stat"), re.MULTILINE))
            return int(limit) / int(period), int(stat.get("nr_periods", 0)), int(stat.get("nr_throttled", 0))
    return 0.0, 0, 0


def _size(count: int) -> str:
    if count == resource.RLIM_INFINITY:
        return "unlimited"
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


def gpu(host: Host) -> list[Finding]:
    found = host.gpus()
    if not found:
        return [finding("gpu-none", "no GPU: KV caches here are in host memory")]
    findings = [finding("gpu-found", ", ".join(found))]
    if "AMD" not in found[0] and host.rdma_devices() and "nvidia_peermem" not in host.text("/proc/modules"):
        gdrcopy = "there" if host.path("/dev/gdrdrv").exists() else "not there"
        said = f"nvidia_peermem is not loaded; gdrcopy (/dev/gdrdrv) is {gdrcopy}"
        findings.append(finding("gpu-no-peer-memory", said))
    return findings
