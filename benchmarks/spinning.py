"""Calls from an engine whose loop spins in Python: by a thread of its process, as kvferry makes them, and by a helper
process that does nothing else. The loop asks in each turn whether the answer is here, or waits for it natively."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import grpc

from benchmarks.echo_server import Echo, echo_server
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved

REPEATS = 100
WAITING = "by a thread, the engine waits natively"
SPINS = "by a thread, the engine spins"
HELPER = "by a helper process, the engine waits natively"


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with echo_server() as (echo, server), ThreadPoolExecutor(1) as threads:
        helper = context.Process(target=_help, args=(server.address, theirs), daemon=True)
        helper.start()
        theirs.close()
        call = echo.unary()
        actions = {
            WAITING: Action(lambda: threads.submit(call).result()),
            SPINS: Action(lambda: _spin(threads.submit(call))),
            "by a helper process, the engine spins": Action(lambda: _ask(ours, spin=True)),
            HELPER: Action(lambda: _ask(ours, spin=False)),
        }
        ours.recv()
        times = interleaved(actions, effort.repeats(REPEATS), warm=effort.size(10, 1))
        ours.close()
        helper.join()
    measures = [Measure(name, "s", found, WAITING if name != WAITING else "") for name, found in times.items()]
    return Topic("spinning", "A unary call from an engine that spins in Python", tuple(measures))


def _spin(answer: Future[object]) -> None:
    while not answer.done():
        pass


def _ask(pipe: Connection, *, spin: bool) -> None:
    pipe.send(None)
    while spin and not pipe.poll(0):
        pass
    pipe.recv()


def _help(address: str, pipe: Connection) -> None:
    """The helper process: a call for each message, until the pipe ends."""
    with grpc.insecure_channel(address) as channel:
        call = Echo(channel).unary()
        pipe.send(None)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            call()
            pipe.send(None)
