"""GPUs and network cards, as the system's files tell."""

from __future__ import annotations

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host
from kvferry._doctor.packages import version_of

NO_GPU = Kind("gpu-none", Level.OK)
GPU = Kind(
    "gpu-found",
    Level.OK,
    "kvferry's guarantees have been shown on host memory; CONTRIBUTING.md says what was run on GPUs.",
)
GPU_HIDDEN = Kind(
    "gpu-hidden",
    Level.WARNING,
    "This process sees no GPU: CUDA_VISIBLE_DEVICES is set and names none.",
    "Unset CUDA_VISIBLE_DEVICES, or name devices.",
)
GPU_NOT_GIVEN = Kind(
    "gpu-not-given",
    Level.PROBLEM,
    "The driver knows GPUs whose device files are not here, so that CUDA cannot open them. That is usual in a "
    "container that was started without them.",
    "Give the container its GPUs (docker run --gpus all; Kubernetes: resources, nvidia.com/gpu).",
)
GPU_TORCH = Kind(
    "gpu-torch-for-cpu",
    Level.WARNING,
    "This torch was built without CUDA: it cannot see the GPU.",
    "Where engines run on the GPU, install a build of torch for its CUDA.",
)
GPU_PEER_MEMORY = Kind(
    "gpu-no-peer-memory",
    Level.WARNING,
    "RDMA cards reach a GPU's memory by nvidia_peermem or by dma-buf. The module is not loaded; without dma-buf too, "
    "bytes take the way over the host's memory.",
    "On the host: modprobe nvidia_peermem. With the open driver and a recent kernel dma-buf does the same; UCX's log "
    "(UCX_LOG_LEVEL=info) shows which way it takes.",
)
NETWORK = Kind("network-found", Level.OK)
LOOPBACK_ONLY = Kind(
    "network-loopback-only",
    Level.WARNING,
    "No other node can reach engines here, nor they any other. UCX has no address that another host could use.",
    "Give the container a network; for RDMA usually the host's (hostNetwork: true, docker run --network host).",
)
NETWORK_SLOW = Kind(
    "network-slow",
    Level.WARNING,
    "Over TCP a read cannot be faster than the card: a gigabyte takes 8 s at 1 Gbit/s.",
    "If there is a faster card, use its address (--advertise) and name it in UCX_NET_DEVICES.",
)
GPU_KINDS = (NO_GPU, GPU, GPU_HIDDEN, GPU_NOT_GIVEN, GPU_TORCH, GPU_PEER_MEMORY)
NETWORK_KINDS = (NETWORK, LOOPBACK_ONLY, NETWORK_SLOW)

SLOW_MBITS = 10_000


def gpus(host: Host) -> list[str]:
    """Return the GPUs that the system knows: NVIDIA's by model, and whether there are AMD's."""
    found = []
    for name in host.names("/proc/driver/nvidia/gpus"):
        lines = host.text(f"/proc/driver/nvidia/gpus/{name}/information").splitlines()
        found.append(next((line.partition(":")[2].strip() for line in lines if line.startswith("Model")), name))
    # Without /proc/driver, as some sandboxes are, the device files remain.
    if not found:
        found = [name for name in host.names("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return found or (["an AMD GPU (/dev/kfd)"] if host.path("/dev/kfd").exists() else [])


def rdma_devices(host: Host) -> list[str]:
    """Return the names of RDMA devices, such as ``mlx5_0``."""
    return host.names("/sys/class/infiniband")


def check_gpu(host: Host) -> list[Finding]:
    """Look for GPUs, and for what they need to be read by other processes and cards."""
    found = gpus(host)
    if not found:
        return [NO_GPU.found("no GPU: KV caches here are in host memory")]
    findings = [GPU.found(", ".join(found))]
    nvidia = "AMD" not in found[0]
    if nvidia and not any(name[6:].isdigit() for name in host.names("/dev") if name.startswith("nvidia")):
        findings.append(
            GPU_NOT_GIVEN.found(f"{len(found)} in /proc/driver/nvidia/gpus, none as /dev/nvidia0 or the like")
        )
    if host.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "none", "NoDevFiles"):
        findings.append(GPU_HIDDEN.found(f"CUDA_VISIBLE_DEVICES={host.environ['CUDA_VISIBLE_DEVICES']!r}"))
    if version_of("torch").endswith("+cpu"):
        findings.append(GPU_TORCH.found(f"torch {version_of('torch')}"))
    if nvidia and rdma_devices(host) and "nvidia_peermem" not in host.text("/proc/modules"):
        gdrcopy = "there" if host.path("/dev/gdrdrv").exists() else "not there"
        findings.append(GPU_PEER_MEMORY.found(f"nvidia_peermem is not loaded; gdrcopy (/dev/gdrdrv) is {gdrcopy}"))
    return findings


def check_network(host: Host) -> list[Finding]:
    """Look at the network cards of this network namespace."""
    cards, fastest = [], 0
    for name in host.names("/sys/class/net"):
        state = host.text(f"/sys/class/net/{name}/operstate")
        # Dummy and loopback interfaces are always "unknown", and so are some virtual cards: those have a peer's index.
        if name == "lo" or state not in ("up", "unknown"):
            continue
        speed = host.text(f"/sys/class/net/{name}/speed")
        known = int(speed) if speed.isdigit() else 0
        fastest = max(fastest, known)
        told = f"{known / 1000:g} Gbit/s" if known else "speed not told"
        cards.append((known, f"{name} ({told}, MTU {host.text(f'/sys/class/net/{name}/mtu')})"))
    if not cards:
        return [LOOPBACK_ONLY.found("no card but loopback is up")]
    said = ", ".join(text for _, text in cards)
    if all(known for known, _ in cards) and fastest < SLOW_MBITS and not rdma_devices(host):
        return [NETWORK_SLOW.found(said)]
    return [NETWORK.found(said)]
