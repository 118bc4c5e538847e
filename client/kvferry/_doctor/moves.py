"""Moves some memory between two processes of this host over NIXL, and says by which way and how fast.

Both processes are made as engines make theirs, with a serving and a reading agent. UCX's own log says which transport
it took. Time is compared with a copy of as many bytes within one process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host
from kvferry._doctor.isolation import ended, python
from kvferry._doctor.packages import version_of

if TYPE_CHECKING:
    from kvferry._transport.nixl_agent import ReadHandle

BY_CMA = Kind("reads-by-cma", Level.OK)
BY_TCP = Kind(
    "reads-by-tcp",
    Level.PROBLEM,
    "Reads between engines of this host go over TCP, without a message: 4 to 14 times slower than by CMA, and with CPU "
    "at the source.",
    "See the findings of `cma` and `environment`: they say what keeps UCX from CMA.",
)
BY_ANOTHER = Kind(
    "reads-by-another-way", Level.UNKNOWN, "kvferry's numbers are of CMA and TCP; this way was not measured."
)
SLOW = Kind(
    "reads-slow",
    Level.WARNING,
    "Reads by CMA reach half of a copy's speed and more where the machine is idle.",
    "Run it again when the host is idle. If it stays so, look at `huge-pages` and `cpus`.",
)
UNUSABLE = Kind(
    "nixl-unusable",
    Level.PROBLEM,
    "No engine can move bytes here: NIXL is installed, but does not work.",
    "Read what NIXL and UCX say, and the finding of `cma`. UCX_TLS, if set, has to contain tcp; loopback or a card has "
    "to be up.",
)
ENDS_BADLY = Kind(
    "nixl-ends-badly",
    Level.PROBLEM,
    "Reads work, but a process that used NIXL does not end in order: a supervisor takes each end of an engine for a "
    "crash.",
    "Read what the process wrote. Two copies of a library in one process can be the reason: docs/nixl.md, Libraries "
    "loaded twice.",
)
NOT_TRIED = Kind("moves-not-tried", Level.UNKNOWN, "Nothing was measured.", "pip install 'kvferry[nixl]'")
KINDS = (BY_CMA, BY_TCP, BY_ANOTHER, SLOW, UNUSABLE, ENDS_BADLY, NOT_TRIED)

SIZE = 64 << 20
ROUNDS = 3
SHARE = 0.2
"""Of a copy's speed, below which a read by CMA is slow: it reached 0.41 to 1.13 (docs/nixl.md)."""
_WAIT = 20.0


def check(host: Host) -> list[Finding]:
    """Read `SIZE` bytes of another process `ROUNDS` times, and look at how that process ends."""
    from kvferry.errors import KvferryError, NixlMissing

    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        # Set before NIXL is loaded. Its lines are read below, and not shown.
        log = Path(folder) / f"ucx.{os.getpid()}"
        os.environ |= {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(Path(folder) / "ucx.%p")}
        try:
            rate, copies, code = _measure()
        except NixlMissing as error:
            return [NOT_TRIED.found(error.message)]
        except (KvferryError, OSError, subprocess.SubprocessError) as error:
            return [UNUSABLE.found(f"{error}{complaints(written(log))}")]
        text = written(log)
    version = re.search(r"UCX\s+INFO\s+Version (\S+)", text)
    way = way_of(text)
    share = rate / copies
    said = (
        f"NIXL {version_of('nixl') or '?'} with UCX {version[1] if version else '?'} read {SIZE >> 20} MiB from "
        f"another "
        f"process by {way or 'a way that it does not tell'} at {rate / 1e9:.2f} GB/s: {share:.2f} of a copy in "
        f"one process "
        f"({copies / 1e9:.2f} GB/s)"
    )
    if way.startswith("tcp"):
        read = BY_TCP
    elif way.startswith("cma"):
        read = BY_CMA if share >= SHARE else SLOW
    else:
        read = BY_ANOTHER
    findings = [read.found(said)]
    if code:
        findings.append(ENDS_BADLY.found(f"the process that was read from ended {ended(code)}"))
    return findings


def way_of(text: str) -> str:
    """Return the transport of large reads from UCX's log (UCX_PROTO_INFO), as ``cma/memory``; empty if not told."""
    lines = text.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        if "remote memory read by ucp_get" in lines[number]:
            rows = [row.split("|")[1:4] for row in lines[number + 1 : number + 9] if row.count("|") == 4]
            large = [config.strip() for limits, _, config in rows if "inf" in limits]
            return large[0] if large else ""
    return ""


def written(log: Path) -> str:
    """Return what UCX has written to its log until now; it does not flush it itself."""
    ctypes.CDLL(None).fflush(None)
    return log.read_text(errors="replace") if log.exists() else ""


def complaints(text: str) -> str:
    """Return what UCX's log says of errors."""
    lines = [line.partition("UCX  ERROR")[2].strip() for line in text.splitlines() if "UCX  ERROR" in line]
    return f". UCX: {'; '.join(lines[:3])}" if lines else ""


def _measure() -> tuple[float, float, int]:
    """Bytes per second of the fastest read, and of the fastest copy in this process; how the process that was read from
    ended, as `subprocess` tells it."""
    import numpy as np

    from kvferry._transport.nixl_agent import AgentInfo, NixlOptions, ReadingAgent
    from kvferry.errors import NixlError
    from kvferry.geometry.model import MemoryRegion
    from kvferry.geometry.plane import MemoryKind
    from kvferry.host_memory import HostMemory
    from kvferry.planner.descriptors import MemoryPair, RawDescriptors

    command = python("from kvferry._doctor.moves import serve; serve()")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        try:
            memory, other = HostMemory(SIZE), HostMemory(SIZE)
            agent = ReadingAgent(f"doctor-reader-{os.getpid()}", [memory.region], NixlOptions())
            line = source.stdout.readline() if source.stdout else ""
            if not line:
                raise NixlError("the process that should have been read from ended", call="", peer="", problem="")
            told = json.loads(line)
            blob = bytes.fromhex(told["metadata"])
            region = MemoryRegion(MemoryKind.DRAM, 0, told["base"], SIZE)
            info = AgentInfo(told["name"], blob, bytes.fromhex(told["sha256"]), (region,))
            agent.add_peer(info)
            _finish(agent.warm_up(info.name))
            kinds = MemoryPair(MemoryKind.DRAM, 0, MemoryKind.DRAM, 0)
            one = [np.array([value], np.uint64) for value in (region.base, memory.region.base, SIZE)]
            times = []
            for _ in range(ROUNDS):
                handle = agent.make(info.name, RawDescriptors(kinds, *one))
                times.append(_finish(handle))
                handle.release()
            if not (memory.array[:: 1 << 20] == 7).all():
                raise NixlError("the bytes that arrived are not those of the source", call="", peer="", problem="")
            copies = []
            for _ in range(ROUNDS):
                started = time.monotonic()
                other.array[:] = memory.array
                copies.append(time.monotonic() - started)
            agent.destroy()
            source.communicate(timeout=_WAIT)
        finally:
            source.kill()
    return SIZE / min(times), SIZE / min(copies), source.returncode


def _finish(handle: ReadHandle) -> float:
    """Post a read and wait for its end; the seconds that it took."""
    from kvferry._transport.nixl_agent import HandleState
    from kvferry.errors import NixlError

    started = time.monotonic()
    state = handle.post()
    while state is HandleState.MOVING and time.monotonic() - started < _WAIT:
        time.sleep(0.0001)
        state = handle.check()
    if state is not HandleState.DONE:
        raise NixlError(f"a read did not end within {_WAIT:.0f} s", call="", peer=handle.peer, problem=state.value)
    return time.monotonic() - started


def serve() -> None:
    """Be the process that is read from, until the input ends."""
    from kvferry._transport.nixl_agent import ServingAgent
    from kvferry.host_memory import HostMemory

    memory = HostMemory(SIZE)
    memory.array[:] = 7
    agent = ServingAgent(f"doctor-source-{os.getpid()}", [memory.region])
    info = agent.info
    told = {
        "name": info.name,
        "metadata": info.metadata.hex(),
        "sha256": info.sha256.hex(),
        "base": memory.region.base,
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    agent.close()
