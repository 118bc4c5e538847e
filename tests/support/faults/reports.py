"""What the processes of the suite share: what they are told to be, what they say they saw, what they hold."""

from __future__ import annotations

import ctypes
import gc
import mmap
import signal
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.caches import Model

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a process is of an engine.

    Attributes:
        address: of its node server.
        engine_id: of the engine.
        num_ranks: of the engine.
        rank: this one.
        units: heads that it holds, ``[begin, end)``.
        memory: file of its memory.
        model: shape of the cache.
        token: of the engine; empty: this process is its scheduler too.
        serve: whether others read from it.
        options: of NIXL.
        optimistic: whether short reads take no lease.
        directory: of homes, which references do not name then; empty: none.
    """

    address: str
    engine_id: str
    num_ranks: int
    rank: int
    units: tuple[int, int]
    memory: Path
    model: Model
    token: str = ""
    serve: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    optimistic: bool = False
    directory: str = ""


@dataclass(frozen=True)
class Seen:
    """How a read ended.

    Attributes:
        error: why it gave no good bytes; None: it did.
        confirmed: the home said VALID.
        moved: bytes.
        leased: it had a lease at its end.
    """

    error: Exception | None
    confirmed: bool = False
    moved: int = 0
    leased: bool = False


@dataclass(frozen=True)
class Stepped:
    """What a step of an engine has brought.

    Attributes:
        published: `Publication` of each request that was offered, in their order.
        released: each `Release` of publications.
        ended: how reads ended, by their names; each once.
        quiet: names of reads whose blocks may be reused, each once.
    """

    published: list[Any]
    released: list[Any]
    ended: dict[str, Seen]
    quiet: list[str]


@dataclass(frozen=True)
class Held:
    """What a process holds: everything that may leak.

    Attributes:
        threads, files: of the process.
        names: of its Python threads.
        objects: live objects of kvferry's types, by type: registries, leases, handles, reads.
        resident: bytes.
    """

    threads: int
    files: int
    objects: Counter[str]
    resident: int
    names: tuple[str, ...] = ()


def held() -> Held:
    """What this process holds now."""
    gc.collect()
    objects = Counter(
        f"{type(thing).__module__}.{type(thing).__qualname__}"
        for thing in gc.get_objects()
        if str(type(thing).__module__).startswith("kvferry")
    )
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        threads=len(list(Path("/proc/self/task").iterdir())),
        files=len(list(Path("/proc/self/fd").iterdir())),
        objects=objects,
        resident=pages * mmap.PAGESIZE,
        names=tuple(sorted(thread.name for thread in threading.enumerate())),
    )


def die_with_parent() -> None:
    """Be killed when the test process ends, however that ends, and even if stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
