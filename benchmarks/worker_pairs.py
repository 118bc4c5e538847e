"""A source and a destination with the worker of vLLM's NixlConnector, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.caches import CacheMemory, Ids, Layout
from benchmarks.destinations import STEP_PAUSE
from tests.support.node_servers import free_port

START_TIMEOUT = 300.0
"""Seconds in which a process imports vLLM: it takes a minute where the files are not in memory yet."""


class WorkerPair:
    """Both processes, as the measuring process sees them. Whoever measures something else stops them meanwhile: an idle
    worker keeps a core busy."""

    def __init__(self, source: tuple[Any, Connection], destination: tuple[Any, Connection]) -> None:
        self._source, self._destination = source, destination
        self._requests = 0

    def go(self) -> None:
        """Let both run."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop both."""
        self._signal(signal.SIGSTOP)

    def prepare(self, mine: Ids) -> None:
        """Poison the destination's blocks, and offer the next request at the source."""
        self._requests += 1
        _ask(self._destination, "poison", mine)
        _ask(self._source, "offer", f"request-{self._requests}")

    def read(self, theirs: Ids, mine: Ids) -> float:
        """Read the request that was offered; the seconds that it took at the destination."""
        took: float = _ask(self._destination, "read", f"request-{self._requests}", theirs, mine)
        return took

    def check(self, theirs: Ids, mine: Ids) -> None:
        """Raise `WrongBytes` if the destination's blocks are not the source's."""
        _ask(self._destination, "check", mine, theirs)

    def _signal(self, number: signal.Signals) -> None:
        for process, _ in (self._source, self._destination):
            os.kill(process.pid, number)


@contextmanager
def worker_pair(layout: Layout) -> Iterator[WorkerPair]:
    """Both processes, until the end of the block."""
    context: Any = multiprocessing.get_context("spawn")
    port, started = free_port(), []
    for engine in ("benchmark-source", "benchmark-destination"):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(engine, layout, port, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        for side in started:
            if not side[1].poll(START_TIMEOUT):
                raise TimeoutError("vLLM's worker did not start")
            _answer(side)
        yield WorkerPair(*started)
    finally:
        for process, pipe in started:
            # A stopped process ends too.
            process.kill()
            process.join()
            pipe.close()


def _run(engine: str, layout: Layout, port: int, pipe: Connection) -> None:
    """A process."""
    os.environ |= {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from benchmarks.pull_worker import SOURCE, PullWorker

    memory = CacheMemory(layout)
    if engine == SOURCE:
        memory.fill()
    worker = PullWorker(memory, engine, port)
    calls: dict[str, Callable[..., object]] = {
        "offer": worker.offer,
        "read": worker.read,
        "poison": memory.poison,
        "check": memory.check,
    }
    pipe.send(None)
    while True:
        if worker.offered and not pipe.poll(STEP_PAUSE):
            worker.step()
            continue
        name, *arguments = pipe.recv()
        try:
            pipe.send(calls[name](*arguments))
        except Exception as error:
            pipe.send(error)


def _ask(side: tuple[Any, Connection], *command: object) -> Any:
    side[1].send(command)
    return _answer(side)


def _answer(side: tuple[Any, Connection]) -> Any:
    answer = side[1].recv()
    if isinstance(answer, Exception):
        raise answer
    return answer
