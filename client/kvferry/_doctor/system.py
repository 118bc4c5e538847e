"""Checks of this host's packages and environment variables, and of its memory, files, cores and GPUs."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from kvferry._doctor.check import Finding, Host, finding

RANGES: dict[str, tuple[str, str]] = {
    "grpcio": ("1.84", "2"),
    "protobuf": ("4.25.3", "8"),
    "numpy": ("1.26", ""),
    "nixl": ("1.5.1", "2"),
}
"""The first version that kvferry accepts, and the first too new one, as in pyproject.toml."""

SERVER = ("uvloop", "grpcio-health-checking", "grpcio-reflection", "pydantic")

_RDMA = {"ib", "rc", "rc_v", "rc_x", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x", "srd"}
_CUDA = {"cuda", "cuda_copy", "cuda_ipc", "gpu"}

ENOUGH_FILES = 4096
THROTTLED_SHARE = 0.05
_TRIED = 16 << 20
_CAP_IPC_LOCK = 14


def version_of(package: str) -> str:
    """Return the installed version of a package; empty: not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _parts(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparisons: ``1.85.1`` as (1, 85, 1)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def packages(host: Host) -> list[Finding]:
    found = {package: version_of(package) for package in (*RANGES, "torch")}
    findings = []
    for package, (first, beyond) in RANGES.items():
        version = found[package]
        if version and (_parts(version) < _parts(first) or (beyond and _parts(version) >= _parts(beyond))):
            wanted = f">={first}{f',<{beyond}' if beyond else ''}"
            said = f"{package} {version}; kvferry needs {wanted}"
            findings.append(finding("package-out-of-range", said, f"pip install '{package}{wanted}'"))
    fit = not findings
    if not found["nixl"]:
        findings.append(finding("nixl-missing", "NIXL is not installed for this Python"))
    elif util.find_spec("grpc_tools") is not None:
        said = f"grpcio-tools {version_of('grpcio-tools')} beside nixl {found['nixl']}"
        findings.append(finding("grpc-tools-beside-nixl", said))
    if missing := [package for package in SERVER if not version_of(package)]:
        findings.append(finding("server-missing", f"not installed: {', '.join(missing)}"))
    installed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    where = f"Python {platform.python_version()}, kvferry {version_of('kvferry') or 'from its source'}, {installed}"
    return [finding("packages-fit", where), *findings] if fit else findings


def _small(value: str) -> bool:
    """Whether a size such as ``8k`` is smaller than the segments that kvferry sets."""
    found = re.fullmatch(r"(\d+)([kmg]?)b?", value)
    return found is not None and int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]] < 256 << 10


_VARIABLES: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("UCX_TCP_TX_SEG_SIZE", "ucx-tcp-segments", _small),
    ("UCX_TCP_RX_SEG_SIZE", "ucx-tcp-segments", _small),
    ("UCX_TCP_USER_TIMEOUT", "ucx-tcp-user-timeout", lambda value: value != "inf"),
    ("UCX_RCACHE_MAX_UNRELEASED", "ucx-rcache-unbounded", lambda value: value in ("inf", "infinity")),
    ("PYTORCH_CUDA_ALLOC_CONF", "torch-expandable-segments", lambda value: "expandable_segments:true" in value),
    ("PYTORCH_ALLOC_CONF", "torch-expandable-segments", lambda value: "expandable_segments:true" in value),
)
"""Variables of which the value, in small letters and without spaces, decides alone."""


def environment(host: Host) -> list[Finding]:
    findings = _transports(host)
    for name, kind, bad in _VARIABLES:
        value = host.environ.get(name, "").lower().replace(" ", "")
        if value and bad(value):
            findings.append(finding(kind, f"{name}={host.environ[name]}"))
    if not findings:
        set_here = ", ".join(sorted(name for name in host.environ if name.startswith(("UCX_", "NIXL_", "GRPC_"))))
        said = f"set, and harmless: {set_here}" if set_here else "nothing is set"
        findings.append(finding("environment-clear", said))
    return findings


def _allowed(value: str, names: set[str]) -> bool:
    """Whether UCX_TLS lets UCX use one of these transports; ``^a,b`` means all but a and b."""
    listed = {name.strip().lstrip("\\").partition(":")[0] for name in value.lower().lstrip("^").split(",")}
    if value.startswith("^"):
        return not names & listed
    return "all" in listed or bool(names & listed)


def _transports(host: Host) -> list[Finding]:
    value = host.environ.get("UCX_TLS", "")
    if not value:
        return []
    rdma, of_rdma = bool(host.rdma_devices()), _allowed(value, _RDMA)
    if value.startswith("^"):
        cma = _allowed(value, {"cma"}) and _allowed(value, {"sm", "shm"})
    else:
        cma = _allowed(value, {"cma", "sm", "shm"})
    lacking = {
        "ucx-tls-without-tcp": not _allowed(value, {"tcp"}) and not (rdma and of_rdma),
        "ucx-tls-without-cma": not cma,
        "ucx-tls-without-rdma": rdma and not of_rdma,
        "ucx-tls-without-cuda": bool(host.gpus()) and not _allowed(value, _CUDA),
    }
    return [finding(name, f"UCX_TLS={value}") for name, lacks in lacking.items() if lacks]


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
