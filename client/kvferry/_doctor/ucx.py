"""What NIXL's UCX can use here: moves memory between two processes of this host, and tries out each RDMA card."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from kvferry._doctor.check import Finding, Host, ended, finding, python
from kvferry._doctor.system import version_of

if TYPE_CHECKING:
    from kvferry._transport.nixl_agent import AgentInfo, ReadHandle

SIZE = 64 << 20  # Bytes; more than distributions let a process lock by default (8 MiB)
ROUNDS = 3
SHARE = 0.2  # Fraction of a copy's speed below which a read by CMA is slow; measured were 0.41 to 1.13 (docs/nixl.md)
_WAIT = 20.0


def moves(host: Host) -> list[Finding]:
    """Read `SIZE` bytes of another process `ROUNDS` times, and check how that process ends. UCX's log names the
    transport. The speed is compared with a copy of as many bytes within one process."""
    from kvferry.errors import KvferryError, NixlMissing

    with _ucx_log(UCX_LOG_LEVEL="info", UCX_PROTO_INFO="y") as written:
        try:
            rate, copies, code = _measure()
        except NixlMissing as error:
            return [finding("moves-not-tried", error.message)]
        except (KvferryError, OSError, subprocess.SubprocessError) as error:
            return [finding("nixl-unusable", f"{error}{_complaints(written())}")]
        text = written()
    version, way, share = re.search(r"UCX\s+INFO\s+Version (\S+)", text), _way(text), rate / copies
    said = (
        f"NIXL {version_of('nixl') or '?'} with UCX {version[1] if version else '?'} read {SIZE >> 20} MiB from "
        f"another process by {way or 'a way that it does not tell'} at {rate / 1e9:.2f} GB/s: {share:.2f} of a copy in "
        f"one process ({copies / 1e9:.2f} GB/s)"
    )
    by_cma = "reads-by-cma" if share >= SHARE else "reads-slow"
    known = {"tcp": "reads-by-tcp", "cma": by_cma}
    findings = [finding(known.get(way[:3], "reads-by-another-way"), said)]
    if code:
        findings.append(finding("nixl-ends-badly", f"the process that was read from ended {ended(code)}"))
    return findings


@contextmanager
def _ucx_log(**settings: str) -> Iterator[Callable[[], str]]:
    """Have UCX, which must not be loaded yet, write its log to a file. Yields a function that returns the log."""
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        os.environ |= {"UCX_LOG_FILE": str(Path(folder) / "ucx.%p"), **settings}
        log = Path(folder) / f"ucx.{os.getpid()}"

        def written() -> str:
            # UCX does not flush it.
            ctypes.CDLL(None).fflush(None)
            return log.read_text(errors="replace") if log.exists() else ""

        yield written


def _complaints(text: str) -> str:
    lines = [line.partition("UCX  ERROR")[2].strip() for line in text.splitlines() if "UCX  ERROR" in line]
    return f". UCX: {'; '.join(lines[:3])}" if lines else ""


def _way(text: str) -> str:
    """Find the transport of large reads in UCX's log (UCX_PROTO_INFO), such as ``cma/memory``; empty if unknown."""
    last = text.rpartition("remote memory read by ucp_get")[2].splitlines()[1:9] if "by ucp_get" in text else []
    rows = [row.split("|")[1:4] for row in last if row.count("|") == 4]
    return next((config.strip() for limits, _, config in rows if "inf" in limits), "")


def _measure() -> tuple[float, float, int]:
    """Return bytes per second of the fastest read and the fastest copy, and the source process's return code."""
    import numpy as np

    from kvferry._transport.nixl_agent import NixlOptions, ReadingAgent
    from kvferry.geometry.plane import MemoryKind
    from kvferry.host_memory import HostMemory
    from kvferry.planner.descriptors import Descriptors, MemoryPair

    command = python("from kvferry._doctor.ucx import serve; serve()")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as source:
        try:
            memory, other = HostMemory(SIZE), HostMemory(SIZE)
            agent = ReadingAgent(f"doctor-reader-{os.getpid()}", [memory.region], NixlOptions())
            try:
                info: AgentInfo = pickle.load(cast("IO[bytes]", source.stdout))
            except EOFError:
                raise ConnectionError("the process that should have been read from ended") from None
            agent.add_peer(info)
            _seconds(agent.warm_up(info.name))
            kinds = MemoryPair((MemoryKind.DRAM, 0), (MemoryKind.DRAM, 0))
            one = [np.array([value], np.uint64) for value in (info.regions[0].base, memory.region.base, SIZE)]
            reads = [_seconds(agent.make(info.name, Descriptors(kinds, *one))) for _ in range(ROUNDS)]
            if not (memory.array[:: 1 << 20] == 7).all():
                raise ConnectionError("the bytes that arrived are not those of the source")
            copies = []
            for _ in range(ROUNDS):
                started = time.monotonic()
                other.array[:] = memory.array
                copies.append(time.monotonic() - started)
            agent.destroy()
            source.communicate(timeout=_WAIT)
        finally:
            source.kill()
    return SIZE / min(reads), SIZE / min(copies), source.returncode


def _seconds(handle: ReadHandle) -> float:
    """Post a read, and return the seconds until its end."""
    from kvferry._transport.nixl_agent import HandleState

    started = time.monotonic()
    state = handle.post()
    while state is HandleState.MOVING and time.monotonic() - started < _WAIT:
        time.sleep(0.0001)
        state = handle.check()
    if state is not HandleState.DONE:
        raise TimeoutError(f"a read did not end within {_WAIT:.0f} s")
    took = time.monotonic() - started
    handle.release()
    return took


def serve() -> None:
    """Run the source process, until its input ends."""
    from kvferry._transport.nixl_agent import ServingAgent
    from kvferry.host_memory import HostMemory

    memory = HostMemory(SIZE)
    memory.array[:] = 7
    agent = ServingAgent(f"doctor-source-{os.getpid()}", [memory.region])
    sys.stdout.buffer.write(pickle.dumps(agent.info))
    sys.stdout.flush()
    sys.stdin.read()
    agent.close()


def rdma(host: Host) -> list[Finding]:
    """Find whether UCX can use each RDMA card, and if not, why. UCX tries one card at a time."""
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

    with _ucx_log() as written:
        try:
            nixl = nixl_binding.load()
        except NixlMissing as error:
            return [finding("rdma-not-tried", f"{said}: {error.message}") for said in tried.values()]
        return [_try_port(nixl, port, said, written) for port, said in tried.items()]


def _try_port(nixl: object, port: str, said: str, written: Callable[[], str]) -> Finding:
    from kvferry._transport import host_network, nixl_binding
    from kvferry._transport.nixl_options import NixlOptions
    from kvferry.errors import NixlError
    from kvferry.host_memory import HostMemory

    # UCX reads the variables whenever an agent is made. Without TCP, so that UCX cannot fall back to it.
    os.environ |= {"UCX_NET_DEVICES": port, "UCX_TLS": "ib"}
    known = len(written())
    try:
        agent, backend = nixl_binding.new_agent(nixl, f"doctor-{port}", NixlOptions(), progress_thread=False)
    except NixlError as error:
        drivers = host_network.with_driver()
        if drivers is not None and port.partition(":")[0] not in drivers:
            return finding("rdma-no-driver", f"{said}: UCX's libibverbs has no driver for it", _link())
        if host_network.too_little():
            return finding("rdma-not-registered", f"{said}: {error}")
        return finding("rdma-refused", f"{said}: {error}{_complaints(written()[known:])}")
    memory = HostMemory(SIZE)
    try:
        nixl_binding.register(nixl, agent, backend, [memory.region])
    except NixlError as error:
        return finding("rdma-not-registered", f"{said}: {error}{_complaints(written()[known:])}")
    return finding("rdma-usable", f"{said}: NIXL's UCX uses it")


def _link() -> str:
    """Return the command that makes UCX use the distribution's libibverbs; empty if it does, or there is none."""
    from kvferry._transport.host_network import mapped

    # kvferry loads the distribution's library. The wheel's libraries are in the parent of the folder of UCX's modules.
    theirs = next((path.with_name("libibverbs.so.1") for path in mapped("/libibverbs.so.1")), None)
    wheel = next((path.parents[1] for path in mapped("/libuct_ib.so")), None)
    own = next(iter(wheel.glob("libibverbs-*.so*")), None) if wheel else None
    return "" if theirs is None or own is None or own.is_symlink() else f"ln -sf {theirs} {own}"
