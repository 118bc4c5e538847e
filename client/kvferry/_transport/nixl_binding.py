"""NIXL's Python binding: the only file that imports NIXL. UCX's options are in `kvferry._transport.nixl_options`.

The layer below NIXL's Python API is used directly, for two reasons:

- that API fixes the progress thread's delay at 0, which burns a core per idle agent;
- its handle objects release themselves when they are collected, on whatever thread collects them. With NIXL's locks
  off, as here, that is a crash; with the locks on it stops the whole interpreter. Here handles are plain numbers.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from kvferry._logs import Log
from kvferry._transport import host_network
from kvferry._transport.nixl_options import PROGRESS_DELAY_US, NixlOptions
from kvferry.errors import NixlError, NixlMissing
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind

T = TypeVar("T")

BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""NIXL's builds, in the order of ``_load_cuda_backend`` in its nixl/__init__.py, 1.5.1."""

logger = Log(__name__)

ENVIRONMENT = {
    # UCX writes its errors to standard output, which belongs to the program.
    "UCX_LOG_FILE": "stderr",
    # UCX's cache of registrations was seen to leak without a limit (vLLM 0.32.0, vllm/distributed/nixl_utils.py).
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
}
"""Settings that UCX finds in its environment when it is loaded, unless the user has set them."""


def load() -> Any:
    """NIXL's binding; raises `NixlMissing`. Loading takes a second or two, so this is called on first use."""
    packages = packages_for(sys.modules.get("torch"))
    loaded = [package for package in packages if package in sys.modules]
    for name, value in ENVIRONMENT.items():
        if loaded and name not in os.environ:
            logger.warning("%s was imported before kvferry could set %s=%s: set it yourself", loaded[0], name, value)
        elif not loaded:
            os.environ.setdefault(name, value)
    _load_verbs_of_system()
    # Importing NIXL makes the logging of the whole process swallow its own errors.
    raise_exceptions = logging.raiseExceptions
    problems = []
    try:
        for package in packages:
            try:
                return import_module(f"{package}._bindings")
            except ImportError as error:
                problems.append(f"{package}: {error}")
    finally:
        logging.raiseExceptions = raise_exceptions
    problem = "; ".join(problems)
    message = f"NIXL cannot be loaded ({problem}); it comes with: pip install 'kvferry[nixl]'"
    raise NixlMissing(message, problem=problem) from None


def _load_verbs_of_system() -> None:
    """Load the distribution's RDMA library, where there is one, before UCX does.

    NIXL's wheel brings libibverbs and libnl of its own, and UCX loads the distribution's beside them, which
    `libefa.so.1` needs. Loaded by UCX, the distribution's libnl calls functions of the wheel's: its destructor takes an
    entry off a list that the entry was never on, and the process ends with SIGSEGV (docs/nixl.md, Libraries loaded
    twice). A library loaded alone finds its own functions first. UCX loads its modules when the first agent is made, so
    this helps also where NIXL was imported before.
    """
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")


def packages_for(torch: Any) -> tuple[str, ...]:
    """The packages that may hold NIXL, the best first. `torch` is the module, which knows the machine's CUDA or ROCm,
    or None if it is not imported. While another thread imports it, the module may not know yet.

    The package ``nixl`` chooses among ``nixl_cu12`` and ``nixl_cu13``; where ``nixl`` is not installed, those are
    tried. The build for ROCm has its own name, as vLLM knows (vLLM 0.32.0, ``vllm/distributed/nixl_utils.py``).
    """
    if not hasattr(torch, "version"):
        # Memory of a device needs torch, and any build moves the host's. To choose, ``nixl`` would import torch, which
        # takes seconds in each process.
        return *BUILDS, "nixl"
    if torch.version.hip is not None:
        return "nixl_rocm", "nixl"
    if torch.version.cuda is not None:
        return "nixl", f"nixl_cu{torch.version.cuda.partition('.')[0]}"
    return "nixl", "nixl_cu13", "nixl_cu12"


def new_agent(nixl: Any, name: str, options: NixlOptions, *, progress_thread: bool) -> tuple[Any, Any]:
    """A new agent and its backend; raises `NixlError`.

    NIXL's own threads for transfers stay off. Each would be another UCX worker, which takes doorbell pages (UARs) of an
    InfiniBand card, and other libraries fail when none are left: vLLM limits them for that reason. A rank of kvferry
    has two workers, of its serving agent and of its reading agent.
    """
    problem = host_network.too_little_to_begin(options.ucx_tls) if options.backend == "UCX" else ""
    if problem:
        raise NixlError(f"NIXL createBackend: {problem}", call="createBackend", peer="", problem=problem)
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress_thread
    config.pthrDelay = PROGRESS_DELAY_US
    config.useListenThread = False
    config.captureTelemetry = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = call("nixlAgent", "", lambda: nixl.nixlAgent(name, config))
    with host_network.expected() if options.backend == "UCX" else nullcontext():
        return agent, call("createBackend", "", lambda: agent.createBackend(options.backend, options.parameters()))


def register(nixl: Any, agent: Any, backend: Any, regions: Sequence[MemoryRegion]) -> None:
    """Register memory with an agent; raises `NixlError`."""
    for kind in MemoryKind:
        rows = [[region.base, region.length, region.device] for region in regions if region.memory_kind is kind]
        if rows:
            segments = nixl.nixlRegDList(memory_type(nixl, kind), np.array(rows, np.uint64))
            call("registerMem", "", functools.partial(agent.registerMem, segments, [backend]))


def memory_type(nixl: Any, kind: MemoryKind) -> Any:
    return nixl.VRAM_SEG if kind is MemoryKind.VRAM else nixl.DRAM_SEG


def call(name: str, peer: str, function: Callable[[], T]) -> T:
    """Call `function`, NIXL's function `name` for `peer` (empty: for no peer). Any exception becomes a `NixlError`:
    NIXL's exceptions have no common base."""
    try:
        return function()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if name == "registerMem" and (limit := host_network.too_little()):
        problem += f"; {limit}"
    # Raised here, without a cause: a traceback would keep alive the agent that the caller may be about to destroy.
    about = f" (peer {peer!r})" if peer else ""
    raise NixlError(f"NIXL {name}{about}: {problem}", call=name, peer=peer, problem=problem)
