"""A process that serves a buffer over NIXL, and the memory that tests read it into."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace, TracebackType
from typing import cast

import numpy as np
import numpy.typing as npt

from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.transport import TransferPart
from kvferry.geometry import MemoryKind, MemoryRegion
from kvferry.planner.descriptors import Descriptors, MemoryPair
from kvferry.planner.expansion import SourceDescriptors
from tests.support.loaded_processes import LOADED
from tests.support.waiting import stop

Bytes = npt.NDArray[np.uint8]

DRAM = MemoryPair((MemoryKind.DRAM, 0), (MemoryKind.DRAM, 0))
POISON = 0xA5
SOON = 20.0
"""Seconds within which even a busy machine is done."""


def content(seed: int, size: int) -> Bytes:
    """The content of a source's memory: every 4 bytes encode their position and their source."""
    return (np.arange(size // 4, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed)).view(np.uint8)


class Source:
    """A serving process. Starts at once; `info` waits for it."""

    def __init__(self, ucx_tls: str = "", *, size: int = 8 << 20, name: str = "") -> None:
        self.pipe, theirs = LOADED.Pipe()
        self.name = name or f"source-{secrets.token_hex(6)}"
        self.size = size
        self.bytes = content(len(self.name), size)
        job = (self.name, ucx_tls, size, theirs)
        self.process = LOADED.Process(target=_serve, args=job, daemon=True)
        self.process.start()
        theirs.close()
        self._info: AgentInfo | None = None
        self._stopped = False

    @property
    def info(self) -> AgentInfo:
        """The serving agent."""
        if self._info is None:
            assert self.pipe.poll(SOON), "the source did not start"
            self._info = self.pipe.recv()
        return self._info

    @property
    def base(self) -> int:
        """The address of its memory there."""
        return self.info.regions[0].base

    def cpu_seconds(self) -> float:
        """CPU time that it has used."""
        self.pipe.send("cpu")
        assert self.pipe.poll(SOON)
        return float(self.pipe.recv())

    def stop(self) -> None:
        """SIGSTOP; waits until it has stopped."""
        self._stopped = True
        stop(self._pid)

    def resume(self) -> None:
        """SIGCONT."""
        self._stopped = False
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; waits until it is gone."""
        self.process.kill()
        self.process.join()

    def alive(self) -> bool:
        """Whether it serves on."""
        return self.process.is_alive() and self.cpu_seconds() >= 0

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _serve(name: str, ucx_tls: str, size: int, pipe: Connection) -> None:
    # NIXL's package imports torch to ask for its CUDA version, a second per process that no test needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from kvferry._transport.nixl_agent import NixlOptions, ServingAgent

    memory = content(len(name), size)
    region = MemoryRegion(MemoryKind.DRAM, 0, memory.ctypes.data, memory.nbytes)
    agent = ServingAgent(name, [region], NixlOptions(ucx_tls=ucx_tls))
    pipe.send(agent.info)
    try:
        while True:
            pipe.recv()
            pipe.send(time.process_time())
    except EOFError:
        return


class Memory:
    """The destination: poisoned, with the bytes that a test expects in it."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self.expected = self.bytes.copy()
        self.base: int = self.bytes.ctypes.data
        self.region = MemoryRegion(MemoryKind.DRAM, 0, self.base, size)

    def pieces(self, source: Source, pieces: Sequence[tuple[int, int, int]]) -> Descriptors:
        """Descriptors for (offset at the source, offset here, length), expected to arrive."""
        for theirs, mine, length in pieces:
            self.expected[mine : mine + length] = source.bytes[theirs : theirs + length]
        theirs_, mine_, lengths = (np.array([piece[i] for piece in pieces], np.uint64) for i in range(3))
        return raw(theirs_ + np.uint64(source.base), mine_ + np.uint64(self.base), lengths)

    def all_of(self, source: Source, *, at: int = 0) -> Descriptors:
        """One descriptor for all of the source's memory."""
        return self.pieces(source, [(0, at, source.size)])

    def right(self) -> bool:
        """Whether everything expected is here, and every other byte as it was."""
        return bool(np.array_equal(self.bytes, self.expected))

    def untouched(self) -> bool:
        """Whether nothing was written."""
        return bool((self.bytes == POISON).all())


def raw(
    source: Sequence[int] | npt.NDArray[np.uint64],
    destination: Sequence[int] | npt.NDArray[np.uint64],
    length: Sequence[int] | npt.NDArray[np.uint64],
    memory: MemoryPair = DRAM,
) -> Descriptors:
    """Descriptors by address."""
    arrays = (np.array(values, np.uint64) for values in (source, destination, length))
    return Descriptors(memory, *arrays)


def raw_part(info: AgentInfo, descriptors: Sequence[Descriptors] = ()) -> TransferPart:
    """A part of a transfer that reads these from this agent."""
    return info, SourceDescriptors(0, tuple(descriptors))


def local_source(name: str = "source", size: int = 2 << 20) -> Source:
    """A source whose memory is this process's."""
    held = content(len(name), size)
    region = MemoryRegion(MemoryKind.DRAM, 0, held.ctypes.data, size)
    info = AgentInfo(name, b"", b"", (region,))
    return cast(Source, SimpleNamespace(base=region.base, bytes=held, info=info, size=size))
