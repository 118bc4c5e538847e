"""Which environment variables make UCX, NIXL or gRPC slow, or keep them from working."""

from __future__ import annotations

import re

from kvferry._doctor.devices import gpus, rdma_devices
from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

CLEAR = Kind("environment-clear", Level.OK)
TLS_WITHOUT_TCP = Kind(
    "ucx-tls-without-tcp",
    Level.PROBLEM,
    "kvferry has UCX report the death of peers, which its shared memory cannot. Without tcp, or an RDMA transport, no "
    "agent can be made.",
    "Add tcp to UCX_TLS, or unset it.",
)
TLS_WITHOUT_CMA = Kind(
    "ucx-tls-without-cma",
    Level.WARNING,
    "Reads between processes of this host do not use CMA but TCP, which is 4 to 14 times slower and takes CPU at the "
    "source.",
    "Add cma to UCX_TLS, or unset it.",
)
TLS_WITHOUT_RDMA = Kind(
    "ucx-tls-without-rdma",
    Level.WARNING,
    "This host has RDMA devices, and UCX_TLS keeps UCX from using them: reads from other nodes go over TCP.",
    "Add rc to UCX_TLS, or unset it.",
)
TLS_WITHOUT_CUDA = Kind(
    "ucx-tls-without-cuda",
    Level.WARNING,
    "This host has GPUs, and UCX_TLS keeps UCX from copying to and from their memory: a KV cache on a GPU may "
    "not move.",
    "Add cuda_copy and cuda_ipc to UCX_TLS, or unset it.",
)
DEVICES_MISSING = Kind(
    "ucx-net-devices-missing",
    Level.PROBLEM,
    "UCX uses only the devices that UCX_NET_DEVICES names. Names that are not there give no connection, or one that "
    "lacks its card.",
    "Correct UCX_NET_DEVICES, or unset it: UCX then chooses.",
)
SEGMENTS = Kind(
    "ucx-tcp-segments",
    Level.WARNING,
    "kvferry sets segments of 256 KiB, and the environment takes precedence. With UCX's own 8 KiB, reads over TCP are "
    "about 3 times slower.",
    "Unset UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE.",
)
USER_TIMEOUT = Kind(
    "ucx-tcp-user-timeout",
    Level.WARNING,
    "A cut connection is reported early. But a process on either side of a cut that heals was seen to abort where both "
    "sides had set it.",
    "Unset UCX_TCP_USER_TIMEOUT unless a supervisor restarts engines: a read has its own deadline.",
)
RCACHE = Kind(
    "ucx-rcache-unbounded",
    Level.WARNING,
    "UCX's cache of registered memory was seen by vLLM to grow without a limit. kvferry limits it to 1024 only where "
    "the variable is not set.",
    "Unset UCX_RCACHE_MAX_UNRELEASED, or set it to 1024.",
)
VERBOSE = Kind(
    "verbose-logging",
    Level.WARNING,
    "The library writes lines for each call or transfer, which costs time and fills logs.",
    "Unset it once you have what you were looking for.",
)
ROOTS_MISSING = Kind(
    "grpc-roots-missing",
    Level.PROBLEM,
    "gRPC takes the system's authorities from this file: TLS without a tls.ca of one's own fails.",
    "Correct GRPC_DEFAULT_SSL_ROOTS_FILE_PATH or unset it; or always give tls.ca (--tls-ca).",
)
PLUGINS_MISSING = Kind(
    "nixl-plugins-missing",
    Level.PROBLEM,
    "NIXL looks for its backends in the folder that NIXL_PLUGIN_DIR names, and does not find UCX there.",
    "Unset NIXL_PLUGIN_DIR: NIXL's packages bring their plugins.",
)
EXPANDABLE = Kind(
    "torch-expandable-segments",
    Level.WARNING,
    "kvferry refuses to register a KV cache on a GPU that lies in torch's expandable segments.",
    "Take expandable_segments:True out of the variable for engines.",
)
KINDS = (
    *(CLEAR, TLS_WITHOUT_TCP, TLS_WITHOUT_CMA, TLS_WITHOUT_RDMA, TLS_WITHOUT_CUDA, DEVICES_MISSING, SEGMENTS),
    *(USER_TIMEOUT, RCACHE, VERBOSE, ROOTS_MISSING, PLUGINS_MISSING, EXPANDABLE),
)

_RDMA = frozenset(
    {"ib", "rc", "rc_v", "rc_x", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x", "srd"}
)
_CUDA = frozenset({"cuda", "cuda_copy", "cuda_ipc", "gpu"})
_VERBOSE = {
    "UCX_LOG_LEVEL": ("debug", "trace", "trace_req", "trace_data", "trace_async", "trace_func", "trace_poll", "data"),
    "NIXL_LOG_LEVEL": ("debug", "trace"),
    "GRPC_VERBOSITY": ("debug", "info"),
}


def check(host: Host) -> list[Finding]:
    """Look at the variables of UCX, NIXL, gRPC and torch's allocator."""
    findings = [*_transports(host), *_tcp(host), *_devices(host), *_logging(host), *_files(host)]
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in host.environ.get(name, "").lower().replace(" ", ""):
            findings.append(EXPANDABLE.found(f"{name}={host.environ[name]}"))
    set_here = sorted(name for name in host.environ if name.startswith(("UCX_", "NIXL_", "GRPC_")))
    if not findings:
        findings.append(CLEAR.found(f"set, and harmless: {', '.join(set_here)}" if set_here else "nothing is set"))
    return findings


def _allowed(value: str, names: frozenset[str]) -> bool:
    """Whether UCX_TLS lets UCX use one of these transports; ``^a,b`` is all but those."""
    listed = {name.strip().lstrip("\\").partition(":")[0] for name in value.lower().lstrip("^").split(",")}
    if value.startswith("^"):
        return not names & listed
    return "all" in listed or bool(names & listed)


def _transports(host: Host) -> list[Finding]:
    value = host.environ.get("UCX_TLS", "")
    if not value:
        return []
    said, findings = f"UCX_TLS={value}", []
    rdma = bool(rdma_devices(host))
    if not _allowed(value, frozenset({"tcp"})) and not (rdma and _allowed(value, _RDMA)):
        findings.append(TLS_WITHOUT_TCP.found(said))
    if value.startswith("^"):
        excluded = not (_allowed(value, frozenset({"cma"})) and _allowed(value, frozenset({"sm", "shm"})))
    else:
        excluded = not _allowed(value, frozenset({"cma", "sm", "shm"}))
    if excluded:
        findings.append(TLS_WITHOUT_CMA.found(said))
    if rdma and not _allowed(value, _RDMA):
        findings.append(TLS_WITHOUT_RDMA.found(said))
    if gpus(host) and not _allowed(value, _CUDA):
        findings.append(TLS_WITHOUT_CUDA.found(said))
    return findings


def _tcp(host: Host) -> list[Finding]:
    findings = []
    for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        size = _bytes(host.environ.get(name, ""))
        if size is not None and size < 256 << 10:
            findings.append(SEGMENTS.found(f"{name}={host.environ[name]}"))
    if host.environ.get("UCX_TCP_USER_TIMEOUT", "inf") not in ("", "inf"):
        findings.append(USER_TIMEOUT.found(f"UCX_TCP_USER_TIMEOUT={host.environ['UCX_TCP_USER_TIMEOUT']}"))
    if host.environ.get("UCX_RCACHE_MAX_UNRELEASED", "").lower() in ("inf", "infinity"):
        findings.append(RCACHE.found(f"UCX_RCACHE_MAX_UNRELEASED={host.environ['UCX_RCACHE_MAX_UNRELEASED']}"))
    return findings


def _bytes(text: str) -> int | None:
    found = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]] if found else None


def _devices(host: Host) -> list[Finding]:
    value = host.environ.get("UCX_NET_DEVICES", "")
    if value in ("", "all") or value.startswith("^"):
        return []
    there = [*host.names("/sys/class/net"), *rdma_devices(host)]
    named = [name.strip().partition(":")[0] for name in value.split(",")]
    # UCX takes patterns too; those are left to it.
    missing = [name for name in named if name not in there and name != "all" and not set(name) & set("*?[")]
    if not missing:
        return []
    return [
        DEVICES_MISSING.found(f"UCX_NET_DEVICES={value}; not there: {', '.join(missing)}; there: {', '.join(there)}")
    ]


def _logging(host: Host) -> list[Finding]:
    said = [
        f"{name}={host.environ[name]}"
        for name, levels in _VERBOSE.items()
        if host.environ.get(name, "").lower() in levels
    ]
    if host.environ.get("GRPC_TRACE", "none") not in ("", "none"):
        said.append(f"GRPC_TRACE={host.environ['GRPC_TRACE']}")
    return [VERBOSE.found(", ".join(said))] if said else []


def _files(host: Host) -> list[Finding]:
    findings = []
    roots = host.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "")
    if roots and not host.text(roots):
        findings.append(
            ROOTS_MISSING.found(f"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH={roots}, which cannot be read or is empty")
        )
    plugins = host.environ.get("NIXL_PLUGIN_DIR", "")
    if plugins and "libplugin_UCX.so" not in host.names(plugins):
        findings.append(PLUGINS_MISSING.found(f"NIXL_PLUGIN_DIR={plugins}, which has no libplugin_UCX.so"))
    return findings
