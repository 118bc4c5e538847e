"""Reads of caches above 4 GiB over NIXL, byte for byte. Their memory is hardly touched, so that it costs nothing."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import pytest

from kvferry._clock import now
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.nixl_agent import AgentInfo, NixlOptions
from kvferry._transport.transport import TransferState, Transport
from kvferry.geometry import Blocks, MemoryKind, MemoryRegion
from kvferry.planner import Path
from tests.support import large_caches as large
from tests.transport.sources import POISON, SOON

Bytes = npt.NDArray[np.uint8]

MAP_NORESERVE = 0x4000
"""Of Linux; `mmap` has no name for it."""

SIZE = large.STRIDE * large.BLOCKS
TOKENS = 8 * large.TOKENS
THEIRS = [3, 100, 257, 300, 520, 770, 1027, 1151]
MINE = [1140, 1026, 769, 600, 380, 257, 120, 2]
"""All over the 20 GiB, and so that each address that wraps at 32 bits is one of the memory's, too."""


def sparse() -> tuple[mmap.mmap, int]:
    """Reserved memory, and its address."""
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def block(base: int, number: int) -> Bytes:
    """The bytes of a block."""
    found: Bytes = np.ctypeslib.as_array(
        (ctypes.c_uint8 * large.BLOCK_BYTES).from_address(base + number * large.STRIDE)
    )
    return found


def content(number: int) -> Bytes:
    """The content of the source's block."""
    return np.random.default_rng(number).integers(0, 256, large.BLOCK_BYTES, np.uint8)


def _serve(pipe: Connection) -> None:
    # As in `tests.transport.sources`.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from kvferry._transport.nixl_agent import ServingAgent

    memory, base = sparse()
    # Every block of the request, and those that are multiples of 4 GiB away, where a wrapped address would read.
    for number in {other % large.BLOCKS for id_ in THEIRS for other in range(id_, id_ + large.BLOCKS, 256)}:
        block(base, number)[:] = content(number)
    agent = ServingAgent("large", [MemoryRegion(MemoryKind.DRAM, 0, base, SIZE)])
    pipe.send((agent.info, base))
    pipe.poll(None)
    del memory


@pytest.fixture(scope="module")
def source() -> Iterator[tuple[AgentInfo, int]]:
    """A process that serves 20 GiB."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    assert mine.poll(SOON)
    yield mine.recv()
    process.kill()
    process.join()


@pytest.mark.slow
@pytest.mark.parametrize("path", [Path.DIRECT, Path.STAGED])
def test_blocks_beyond_4_gib_arrive_where_they_belong(path: Path, source: tuple[AgentInfo, int]) -> None:
    info, theirs = source
    memory, base = sparse()
    for number in MINE:
        block(base, number)[:] = POISON
    plan = large.planned(large.plane(theirs, heads_first=path is Path.DIRECT), large.plane(base), path)
    expansion = plan.expand({"full": Blocks(THEIRS)}, {"full": Blocks(MINE)}, (0, TOKENS))
    (planned,) = expansion.sources
    assert bool(planned.staged) == (path is Path.STAGED)
    read = Transport(RankMemory([MemoryRegion(MemoryKind.DRAM, 0, base, SIZE)], keep=memory), NixlOptions())
    transfer = read.start([(info, planned)], deadline=now() + SOON, label="large")
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.DONE, transfer.error
    for given, mine in zip(THEIRS, MINE, strict=True):
        expected = content(given)
        if path is Path.STAGED:
            shape = (large.TOKENS, large.HEADS, large.STATE)
            expected = expected.reshape(shape).transpose(1, 0, 2).reshape(-1)
        assert np.array_equal(block(base, mine), expected), f"block {given} to {mine}"
    assert read.close(SOON)
