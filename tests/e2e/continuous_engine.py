"""An engine that publishes and reads all the time: the process of `test_rolling_restart.py`.

Its engine publishes requests of random bytes, hands each reference to the next engine, and writes other bytes over what
was released. What it gets from the engine before it, it reads and compares.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.caches import POISON, Model, kv
from tests.support.faults.reports import die_with_parent
from tests.support.loaded_processes import LOADED

BLOCKS = 4
"""Of a request."""
AT_ONCE = 4
"""Reads under way, and references that wait for a reader."""
PINNED = 32
"""Requests that an engine has room for. Whatever its home knew when it was restarted stays pinned for a max_ttl."""
MODEL = Model(num_blocks=BLOCKS * (PINNED + AT_ONCE))
PACE = 0.05
"""Seconds between requests: a load, but none that takes all of the machine."""
PATIENCE = 60.0

Reference = tuple[str, int]
"""What a router would pass on, and the seed of the bytes."""


@dataclass
class Report:
    """What an engine saw.

    Attributes:
        published: requests that it offered.
        released: its publications by outcome.
        read: reads that brought the right bytes.
        wrong: reads that brought others.
        failures: of reads and publications.
    """

    published: int = 0
    released: Counter[str] = field(default_factory=Counter)
    read: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)


class ContinuousEngine:
    """The process, as the test sees it. Starts at once.

    Args:
        address: its node server.
        name: engine_id.
        inbox, outbox: queues of references to read, and for those that it publishes.
    """

    def __init__(self, address: str, name: str, inbox: Any, outbox: Any) -> None:
        self._pipe, theirs = LOADED.Pipe()
        job = (address, name, inbox, outbox, theirs)
        self._process = LOADED.Process(target=_run, args=job, daemon=True)
        self._process.start()
        theirs.close()

    def reads_more(self, count: int) -> Report:
        """Wait until this many more reads have ended. Returns what it has seen by then."""
        return self._ask("reads_more", count)

    def stop_publishing(self) -> Report:
        """Publish no more, and wait until everything that was published has been released."""
        return self._ask("stop_publishing")

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(PATIENCE)

    def _ask(self, command: str, *arguments: int) -> Report:
        self._pipe.send((command, arguments))
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"the engine did not answer {command}")
        found: Report = self._pipe.recv()
        return found


def _run(address: str, name: str, inbox: Any, outbox: Any, pipe: Connection) -> None:
    die_with_parent()
    # NIXL's package imports torch to ask for its CUDA version, a second per process that no test needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from kvferry import Client, EngineSpec, Interval, MemoryKind, MemoryRegion
    from kvferry._control import acquisition

    # How long a home is away is how long the test takes over it, on a machine that may be busy. When a read gives up on
    # its home is for tests/e2e/test_liveness.py.
    acquisition.HOME_PATIENCE = PATIENCE
    cells = np.full(MODEL.rank_bytes(Interval(0, MODEL.heads)), POISON, np.uint8)
    base = cells.ctypes.data
    with Client(address) as client:
        cache = client.register_cache(
            EngineSpec(name, (MODEL.group(),)),
            planes=MODEL.planes(Interval(0, MODEL.heads), base),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, base, cells.nbytes)],
            keep=cells,
        )
        engine = _Engine(cache, cells, inbox, outbox)
        engine.start()
        while True:
            try:
                command, arguments = pipe.recv()
            except EOFError:
                return
            getattr(engine, command)(*arguments)
            pipe.send(engine.report)


class _Engine:
    """One thread publishes, some read."""

    def __init__(self, cache: Any, cells: npt.NDArray[np.uint8], inbox: Any, outbox: Any) -> None:
        self._cache, self._inbox, self._outbox = cache, inbox, outbox
        # Tensors by (layer, component): [block, head, token, byte], by plain reshaping.
        shape = (MODEL.layers, len(MODEL.components), MODEL.num_blocks, MODEL.heads, MODEL.block_tokens, -1)
        self._memory = cells.reshape(shape)
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self.report = Report()
        self._publisher = threading.Thread(target=self._publish, daemon=True)

    def start(self) -> None:
        self._publisher.start()
        for slot in range(AT_ONCE):
            threading.Thread(target=self._read, args=(_blocks(PINNED + slot),), daemon=True).start()

    def reads_more(self, count: int) -> None:
        with self._changed:
            wanted = self.report.read + count
            self._changed.wait_for(lambda: self.report.read >= wanted or bool(self.report.failures), PATIENCE)

    def stop_publishing(self) -> None:
        self._stopping.set()
        self._publisher.join(PATIENCE)

    def _publish(self) -> None:
        from kvferry import Blocks
        from kvferry.errors import KvferryError

        seeds, free, pinned = itertools.count(), [_blocks(slot) for slot in range(PINNED)], dict[int, list[int]]()
        while pinned or not self._stopping.is_set():
            if free and not self._stopping.is_set():
                ids, seed = free.pop(), next(seeds)
                self._memory[:, :, ids] = _content(seed)
                try:
                    publication = self._cache.session.publish(
                        f"request-{seed}", {"full": Blocks(ids)}, timeout=PATIENCE
                    )
                except KvferryError as error:
                    self._note(f"publishing: {error!r}")
                    return
                pinned[publication.number] = ids
                self.report.published += 1
                self._outbox.put((publication.reference, seed))
            for release in self._cache.session.released(timeout=PACE):
                ids = pinned.pop(release.publication, [])
                if not ids:
                    self._note(f"publication {release.publication} was released twice")
                    continue
                self._memory[:, :, ids] = POISON
                free.append(ids)
                self.report.released[release.outcome.name] += 1

    def _read(self, ids: list[int]) -> None:
        from kvferry import Blocks
        from kvferry.errors import KvferryError

        while True:
            reference, seed = self._inbox.get()
            try:
                self._cache.read(reference, {"full": Blocks(ids)}).result(PATIENCE)
            except (KvferryError, TimeoutError) as error:
                self._note(f"reading: {error!r}")
                continue
            right = np.array_equal(self._memory[:, :, ids], _content(seed))
            with self._changed:
                self.report.read += right
                self.report.wrong += not right
                self._changed.notify_all()

    def _note(self, failure: str) -> None:
        with self._changed:
            self.report.failures.append(failure)
            self._changed.notify_all()


def _blocks(slot: int) -> list[int]:
    """Scattered, so that a read is more than one descriptor."""
    return [slot + index * (PINNED + AT_ONCE) for index in range(BLOCKS)]


def _content(seed: int) -> npt.NDArray[np.uint8]:
    """The bytes of a request: [layer, component, block, head, token, byte]."""
    planes = kv(MODEL, seed, BLOCKS * MODEL.block_tokens)
    per_plane = [
        [
            planes[layer, component].reshape(MODEL.heads, BLOCKS, MODEL.block_tokens, -1).transpose(1, 0, 2, 3)
            for component in MODEL.components
        ]
        for layer in range(MODEL.layers)
    ]
    return np.array(per_plane)
