"""Moves memory between two processes of this host over NIXL, and finds transport and speed.

The two processes have a serving and a reading agent, as engines have. UCX's log names the transport. The speed is
compared with a copy of as many bytes within one process.
"""

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
from kvferry._doctor.software import version_of

if TYPE_CHECKING:
    from kvferry._transport.nixl_agent import AgentInfo, ReadHandle

SIZE = 64 << 20
ROUNDS = 3
SHARE = 0.2  # Fraction of a copy's speed below which a read by CMA is slow; measured were 0.41 to 1.13 (docs/nixl.md)
_WAIT = 20.0


def check(host: Host) -> list[Finding]:
    """Read `SIZE` bytes of another process `ROUNDS` times, and check how that process ends."""
    from kvferry.errors import KvferryError, NixlMissing

    with ucx_log(UCX_LOG_LEVEL="info", UCX_PROTO_INFO="y") as written:
        try:
            rate, copies, code = _measure()
        except NixlMissing as error:
            return [finding("moves-not-tried", error.message)]
        except (KvferryError, OSError, subprocess.SubprocessError) as error:
            return [finding("nixl-unusable", f"{error}{complaints(written())}")]
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
def ucx_log(**settings: str) -> Iterator[Callable[[], str]]:
    """Have UCX, which must not be loaded yet, write its log to a file. Yields a function that flushes the log, which
    UCX does not do, and returns it."""
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        os.environ |= {"UCX_LOG_FILE": str(Path(folder) / "ucx.%p"), **settings}
        log = Path(folder) / f"ucx.{os.getpid()}"

        def written() -> str:
            ctypes.CDLL(None).fflush(None)
            return log.read_text(errors="replace") if log.exists() else ""

        yield written


def complaints(text: str) -> str:
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

    command = python("from kvferry._doctor.moves import serve; serve()")
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
            kinds = MemoryPair(MemoryKind.DRAM, 0, MemoryKind.DRAM, 0)
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
