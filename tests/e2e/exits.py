"""A process that ends in the state that its argument names; its parent looks how, and whether, it ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from grpc import _channel

from kvferry import Blocks, Client, EngineSpec, Group
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SPEC = EngineSpec(f"engine-{os.getpid()}", (Group("full", block_tokens=16, num_blocks=4),))
KEPT: list[object] = []
"""Alive when the interpreter ends."""


def opened(address: str) -> Client:
    client = Client(address)
    KEPT.append(client)
    client.open_engine(SPEC)
    return client


def watch_open(address: str) -> None:
    opened(address)


def many_clients(address: str) -> None:
    for _ in range(8):
        client = Client(address)
        KEPT.append(client)
        client.open_engine(EngineSpec(f"engine-{os.getpid()}-{len(KEPT)}", SPEC.groups))


def home_killed(address: str) -> None:
    opened(address)
    sys.stdout.write("kill\n")
    sys.stdout.flush()
    sys.stdin.readline()


def call_in_flight(address: str) -> None:
    client = opened(address)
    sys.stdout.write("stop\n")
    sys.stdout.flush()
    sys.stdin.readline()
    # The home's process is stopped: neither is answered.
    control = client._homes.own
    threading.Thread(target=lambda: client.decline("kvf1.AAAA", timeout=60.0), daemon=True).start()
    KEPT.append(control._loop.submit(control.notify(pb.NotifyRequest(), 60.0)))


def exit_in_a_thread(address: str) -> None:
    opened(address)
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()


def forked_child(address: str) -> None:
    opened(address)
    child = os.fork()
    if child == 0:
        # It ends as Python ends, which is not how it should.
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(4)


def forked_child_of_a_busy_thread(address: str) -> None:
    """A thread that the child does not have holds the lock of a call, as each does for a moment with every message."""
    calls = opened(address)._homes.own.calls()
    (stream,) = (call for call in calls if not isinstance(call, threading.Thread))
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with stream._state.condition:  # type: ignore[attr-defined]
            held.set()
            forked.wait()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    try:
        until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    finally:
        forked.set()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def forked_child_with_a_client(address: str) -> None:
    child = os.fork()
    opened(address)
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(5)


def closed(address: str) -> None:
    client = Client(address)
    cache = client.register_cache(SPEC, tensors={"l": np.zeros((2, 4, 1, 16, 4), np.float32)}, axes=AXES, serve=False)
    publication = cache.session.publish("request", {"full": Blocks([1])})
    cache.session.abort(publication)
    client.close()
    gc.collect()
    alive = [found for found in gc.get_objects() if isinstance(found, _channel._Rendezvous)]
    if alive:
        sys.exit(f"{len(alive)} calls are alive: {alive}")


STATES: dict[str, Callable[[str], None]] = {
    state.__name__: state
    for state in (
        watch_open,
        many_clients,
        home_killed,
        call_in_flight,
        exit_in_a_thread,
        forked_child,
        forked_child_of_a_busy_thread,
        forked_child_with_a_client,
        closed,
    )
}

if __name__ == "__main__":
    STATES[sys.argv[1]](sys.argv[2])
