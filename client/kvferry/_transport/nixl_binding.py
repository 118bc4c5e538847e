"""NIXL's Python binding: the only file that imports it. UCX's options are in `kvferry._transport.nixl_options`.

What is below NIXL's Python API is used directly, for two reasons:

- that API fixes the progress thread's delay at 0, which burns a core per idle agent;
- its handle objects release themselves when they are collected, on whatever thread that happens. With NIXL's locks off,
  as they are here, that is a crash; with them on it stops the whole interpreter. Here handles are plain numbers.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvferry._transport.nixl_options import PROGRESS_DELAY_US, NixlOptions
from kvferry.errors import NixlError, NixlMissing
from kvferry.geometry.model import MemoryKind, MemoryRegion

T = TypeVar("T")


def load() -> Any:
    """NIXL's binding; raises `NixlMissing`. Loading it takes a second or two, so this is called on first use."""
    # UCX writes what goes wrong to standard output, which belongs to the program. It reads this when it is loaded.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    # Importing NIXL makes the logging of the whole process swallow its own errors.
    raise_exceptions = logging.raiseExceptions
    try:
        # By this name, because the package chooses the build that suits the machine's CUDA.
        from nixl import _bindings

        return _bindings
    except ImportError as error:
        raise NixlMissing(
            f"NIXL cannot be loaded ({error}); it comes with: pip install 'kvferry[nixl]'", problem=str(error)
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions


def new_agent(nixl: Any, name: str, options: NixlOptions, *, progress_thread: bool) -> tuple[Any, Any]:
    """A new agent and its UCX backend; raises `NixlError`."""
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress_thread
    config.pthrDelay = PROGRESS_DELAY_US
    config.useListenThread = False
    config.lthrDelay = PROGRESS_DELAY_US
    config.captureTelemetry = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = call("nixlAgent", "", lambda: nixl.nixlAgent(name, config))
    return agent, call("createBackend", "", lambda: agent.createBackend("UCX", options.backend()))


def register(nixl: Any, agent: Any, backend: Any, regions: Sequence[MemoryRegion]) -> None:
    """Register memory with an agent; raises `NixlError`."""
    for kind in MemoryKind:
        rows = [[region.base, region.length, region.device] for region in regions if region.memory_kind is kind]
        if rows:
            segments = nixl.nixlRegDList(memory_type(nixl, kind), np.array(rows, np.uint64))
            call("registerMem", "", functools.partial(agent.registerMem, segments, [backend]))


def memory_type(nixl: Any, kind: MemoryKind) -> Any:
    """NIXL's name of a memory kind."""
    return nixl.VRAM_SEG if kind is MemoryKind.VRAM else nixl.DRAM_SEG


def call(name: str, peer: str, function: Callable[[], T]) -> T:
    """Call `function`, NIXL's function `name` on `peer` or, where that is empty, on none. Whatever it raises becomes a
    `NixlError`: NIXL's exceptions have no common base."""
    problem = ""
    try:
        return function()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    # Raised here, without a cause: a traceback would keep the agent alive that the caller may be about to destroy.
    about = f" (peer {peer!r})" if peer else ""
    raise NixlError(f"NIXL {name}{about}: {problem}", call=name, peer=peer, problem=problem)
