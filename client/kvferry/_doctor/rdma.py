"""Whether NIXL's UCX can use each RDMA card, and if not, why. UCX tries one card at a time."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvferry._doctor.check import Finding, Host, finding
from kvferry._doctor.moves import complaints, ucx_log

SIZE = 64 << 20  # Bytes to register: more than distributions let a process lock by default (8 MiB)


def check(host: Host) -> list[Finding]:
    findings, tried = [], {}
    for device in host.rdma_devices():
        for number in host.names(f"/sys/class/infiniband/{device}/ports"):
            state, rate, link = (
                host.text(f"/sys/class/infiniband/{device}/ports/{number}/{name}")
                for name in ("state", "rate", "link_layer")
            )
            # The name in UCX.
            port = f"{device}:{number}"
            said = f"{port} {state.partition(': ')[2] or state}, {rate}, {link}"
            if "ACTIVE" not in state:
                findings.append(finding("rdma-port-down", said))
            elif problem := _unopened(host, device):
                findings.append(finding("rdma-not-given", f"{said}: {problem}"))
            else:
                tried[port] = said
    if not findings and not tried:
        return [finding("rdma-none", "no device in /sys/class/infiniband")]
    return [*(_try_out(tried) if tried else ()), *findings]


def _unopened(host: Host, device: str) -> str:
    """Return why the device file of a card cannot be opened; empty if it can."""
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


def _try_out(tried: dict[str, str]) -> list[Finding]:
    from kvferry._transport import nixl_binding
    from kvferry.errors import NixlMissing

    with ucx_log() as written:
        try:
            nixl = nixl_binding.load()
        except NixlMissing as error:
            return [finding("rdma-not-tried", f"{said}: {error.message}") for said in tried.values()]
        return [_try_port(nixl, port, said, written) for port, said in tried.items()]


def _try_port(nixl: object, port: str, said: str, written: Callable[[], str]) -> Finding:
    from kvferry._transport import nixl_binding, rdma_cards
    from kvferry._transport.nixl_options import NixlOptions
    from kvferry.errors import NixlError
    from kvferry.host_memory import HostMemory

    # UCX reads the variables whenever an agent is made. Without TCP, so that UCX cannot fall back to it.
    os.environ |= {"UCX_NET_DEVICES": port, "UCX_TLS": "ib"}
    known = len(written())
    try:
        agent, backend = nixl_binding.new_agent(nixl, f"doctor-{port}", NixlOptions(), progress_thread=False)
    except NixlError as error:
        drivers = rdma_cards.with_driver()
        if drivers is not None and port.partition(":")[0] not in drivers:
            return finding("rdma-no-driver", f"{said}: UCX's libibverbs has no driver for it", _link())
        if rdma_cards.too_little():
            return finding("rdma-not-registered", f"{said}: {error}")
        return finding("rdma-refused", f"{said}: {error}{complaints(written()[known:])}")
    memory = HostMemory(SIZE)
    try:
        nixl_binding.register(nixl, agent, backend, [memory.region])
    except NixlError as error:
        return finding("rdma-not-registered", f"{said}: {error}{complaints(written()[known:])}")
    return finding("rdma-usable", f"{said}: NIXL's UCX uses it")


def _link() -> str:
    """Return the command that makes UCX use the distribution's libibverbs; empty if it does, or there is none."""
    from kvferry._transport.rdma_cards import mapped

    # kvferry loads the distribution's library. The wheel's libraries are in the parent of the folder of UCX's modules.
    theirs = next((path.with_name("libibverbs.so.1") for path in mapped("/libibverbs.so.1")), None)
    wheel = next((path.parents[1] for path in mapped("/libuct_ib.so")), None)
    own = next(iter(wheel.glob("libibverbs-*.so*")), None) if wheel else None
    return "" if theirs is None or own is None or own.is_symlink() else f"ln -sf {theirs} {own}"
