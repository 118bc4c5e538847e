"""A rank's shares end, each once, and the client's loop sleeps again, however a source behaves while it is met."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, router_reference
from kvferry._clock import now
from kvferry.engine import Grant, RankEnd, SchedulerPort, WorkerPort
from kvferry.errors import Closed, InvalidField, LimitReached, TransferCancelled, WrongState
from kvferry.geometry.blocks import BlockRuns
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
GROUP = Group("full", block_tokens=16, num_blocks=8)
BLOCKS = (BlockRuns.of_blocks("full", Blocks([1, 2])),)


@contextmanager
def silent_home() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def grant(home: str, read_id: str, timeout: float, engine_id: str = "source") -> Grant:
    return Grant(
        request_id=read_id,
        read_id=read_id,
        home=home,
        engine_id=engine_id,
        incarnation=b"i" * 16,
        publication=1,
        reference="kvf1.none",
        source_request_id="request",
        lease_id=b"l" * 16,
        timeout=timeout,
        granted=BLOCKS,
        local=BLOCKS,
    )


@contextmanager
def worker(address: str) -> Iterator[WorkerPort]:
    with Client(address) as client:
        port = WorkerPort(client, EngineSpec(unique_id("reader"), (GROUP,)))
        port.register({"layers.0": np.zeros((2, 8, 1, 16, 8), np.uint8)}, axes=AXES, serve=False)
        yield port


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeServerProcess]:
    with NodeServerProcess(tmp_path_factory.mktemp("shares")) as server:
        yield server


def ends(port: WorkerPort, count: int) -> dict[str, RankEnd]:
    """Wait for as many failed shares."""
    found: dict[str, RankEnd] = {}

    def enough() -> bool:
        found.update({end.read_id: end for end in port.finished().failed})
        return len(found) >= count

    until(enough)
    return found


@pytest.mark.slow
def test_a_share_cancelled_during_its_handshake_stays_ended(node: NodeServerProcess) -> None:
    with silent_home() as home, worker(node.address) as port:
        # The first one's time is up soon; then the others would be begun again, as they may wait for longer.
        port.start(grant(home, "short", 3.0))
        port.start(grant(home, "cancelled", 60.0))
        port.start(grant(home, "waits on", 5.0))
        # Shares are begun in order: when this one has ended, the others wait for their source.
        port.start(grant(home, "marker", 60.0))
        port.cancel("marker")
        assert set(ends(port, 1)) == {"marker"}
        port.cancel("cancelled")
        found = ends(port, 3)
        assert isinstance(found["cancelled"].error(), TransferCancelled)
        assert port.running() == 0
        # The loop sleeps again.
        before = time.process_time()
        threading.Event().wait(2.0)
        assert time.process_time() - before < 1.0
        port.close()


def test_close_during_handshakes_ends_every_share(node: NodeServerProcess) -> None:
    with silent_home() as home, worker(node.address) as port:
        for number in range(5):
            port.start(grant(home, f"read {number}", 60.0, f"source {number % 2}"))
        began = now()
        port.close()
        assert now() - began < 60
        assert {end.read_id for end in port.finished().failed} == {f"read {number}" for number in range(5)}
        with pytest.raises(Closed):
            port.start(grant(home, "late", 60.0))


def test_start_beside_close_leaves_no_share_without_an_end(node: NodeServerProcess) -> None:
    with silent_home() as home, worker(node.address) as port:
        started: list[str] = []

        def start() -> None:
            for number in range(2000):
                try:
                    port.start(grant(home, f"read {number}", 60.0))
                except Closed:
                    return
                started.append(f"read {number}")

        thread = threading.Thread(target=start)
        thread.start()
        until(lambda: len(started) > 10)
        port.close()
        thread.join()
        assert {end.read_id for end in port.finished().failed} == set(started)


def test_a_handshake_is_repeated_after_a_thread_could_not_be_had(
    node: NodeServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("kvferry-handshake"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with worker(node.address) as port:
        monkeypatch.setattr(threading.Thread, "start", refused)
        port.start(grant(node.address, "first", 2.0))
        assert ends(port, 1)["first"].error_name == LimitReached.__name__
        monkeypatch.setattr(threading.Thread, "start", start)
        port.start(grant(node.address, "second", 20.0))
        # It is met, and its home knows no such engine.
        assert ends(port, 1)["second"].error_name not in (LimitReached.__name__, "TransferStuck")


def test_an_exception_of_an_engines_callback_hides_no_other_end(
    node: NodeServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = WorkerPort._share_ended

    def raising(self: WorkerPort, read: Any) -> None:
        if read.order.read_id == "first":
            raise RuntimeError("a bug of the engine")
        told(self, read)

    monkeypatch.setattr(WorkerPort, "_share_ended", raising)
    with silent_home() as home, worker(node.address) as port:
        port.start(grant(home, "first", 0.5))
        port.start(grant(home, "second", 0.5))
        assert set(ends(port, 1)) == {"second"}
        until(lambda: port.running() == 0)


def test_a_grant_that_comes_again_after_its_end_was_acknowledged_is_refused(node: NodeServerProcess) -> None:
    with silent_home() as home, worker(node.address) as port:
        port.start(grant(home, "once", 0.2))
        with pytest.raises(WrongState, match="start each grant once"):
            port.start(grant(home, "once", 0.2))
        assert set(ends(port, 1)) == {"once"}
        with pytest.raises(WrongState, match="start each grant once"):
            port.start(grant(home, "once", 0.2))


def scheduler(client: Client) -> SchedulerPort:
    return SchedulerPort(client, EngineSpec(unique_id("scheduler"), (GROUP,)))


def test_a_closed_port_refuses_and_a_request_that_was_cancelled_may_come_again(node: NodeServerProcess) -> None:
    with Client(node.address) as client:
        port = scheduler(client)
        reference = router_reference(node.address, "source")
        for _ in range(3):
            port.acquire("request", reference)
            assert port.cancel("request")
        assert port.stats().waiting == 0
        port.close()
        for late in calls_after_close(port, reference):
            with pytest.raises(Closed):
                late()
        port.close()


def calls_after_close(port: SchedulerPort, reference: str) -> list[Callable[[], object]]:
    return [
        lambda: port.acquire("late", reference),
        lambda: port.decline(reference),
        lambda: port.publish("late", {"full": Blocks([1])}),
    ]


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan"), 1e12])
def test_a_timeout_out_of_range_is_refused(node: NodeServerProcess, tmp_path: Path, timeout: float) -> None:
    with Client(node.address) as client:
        port = scheduler(client)
        with pytest.raises(InvalidField):
            port.acquire("request", router_reference(node.address, "source"), timeout=timeout)
        port.close()
