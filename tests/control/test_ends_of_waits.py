"""Nothing of a publication or a call outlives its end, and nobody waits for what has ended."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSession, EngineSpec, Group, IntegrityOptions
from kvferry._control.connection import Control
from kvferry._control.publication_sender import Unanswered
from kvferry._loop import Loop
from kvferry.errors import Closed
from kvferry.testing import Fabric
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SOON = 20.0
LONG = 3600.0


def opened(fabric: Fabric) -> tuple[Client, EngineSession]:
    client, spec = fabric.client(), EngineSpec("p", (Group("full", block_tokens=16, num_blocks=64),))
    cache = client.register_cache(spec, tensors={"layer": np.zeros((2, 64, 1, 16, 4), np.float32)}, axes=AXES)
    return client, cache.session


def kept() -> int:
    """How many messages of publications are kept somewhere."""
    gc.collect()
    # Not by isinstance, which asks objects of others, such as torch's, for their class.
    return sum(type(found) is Unanswered for found in gc.get_objects())


def test_nothing_is_kept_of_what_was_published_until_its_timeout() -> None:
    """An engine with a long timeout would keep the blocks of each request for that long."""
    with Fabric() as fabric:
        _, session = opened(fabric)
        before = kept()
        for block in range(1, 41):
            publication = session.publish("r", {"full": Blocks([block])}, timeout=LONG)
            session.abort(publication, timeout=LONG)
            until(lambda: bool(session.released()))
        until(lambda: kept() <= before + 2)


def test_who_waits_for_a_home_hears_that_the_client_has_ended() -> None:
    """Also where its loop ends while the session is being closed, so that nothing of the session runs any more."""
    with Fabric() as fabric, ThreadPoolExecutor(1) as pool:
        client, session = opened(fabric)
        fabric.stop_home()
        waits = pool.submit(session.publish, "r", {"full": Blocks([1])}, timeout=LONG)
        until(lambda: bool(session.unreleased()))
        client._loop.close()
        session.close()
        assert isinstance(waits.exception(SOON), Closed)


def test_calls_can_be_counted_while_others_begin() -> None:
    """At the end of the interpreter its main thread waits for calls, while loops still begin some."""
    loop = Loop("kvferry-test-calls")
    control, stop, held = Control("unix:/nowhere", None, loop), threading.Event(), list[object]()

    def begin() -> None:
        while not stop.is_set():
            held.append(control._begin(lambda _: Future[None]()))
            del held[:-500]

    with ThreadPoolExecutor(2) as pool:
        beginners = [pool.submit(begin) for _ in range(2)]
        try:
            for _ in range(3000):
                control.calls()
        finally:
            stop.set()
        for beginner in beginners:
            beginner.result(SOON)
    loop.close()


def test_debugging_of_asyncio_logs_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be references or tokens, which are secret."""
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    assert not Loop()._events.get_debug()


def test_sums_that_were_queued_when_the_loop_ended_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coroutine that is cancelled before its first step never runs, nor does what it would do at its end."""
    with Fabric() as fabric:
        client, spec = (
            fabric.client(integrity=IntegrityOptions("full")),
            EngineSpec("p", (Group("full", block_tokens=16, num_blocks=64),)),
        )
        cache = client.register_cache(spec, tensors={"layer": np.zeros((2, 64, 1, 16, 4), np.float32)}, axes=AXES)
        blocks = {"full": Blocks([1])}
        number = cache.session.publish("r", blocks, checksums=True).number
        spawn = client._loop.spawn

        def cancelled(coroutine: object, what: str) -> object:
            task = spawn(coroutine, what)  # type: ignore[arg-type]
            if what.startswith("the sums"):
                task.cancel()
            return task

        monkeypatch.setattr(client._loop, "spawn", cancelled)
        until(cache.checksum(number, blocks).done)


def test_a_client_that_was_not_used_ends_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system has none."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with Client("unix:/nowhere") as client:
            client._homes.own.end_calls()
    with pytest.raises(Closed):
        client.open_engine(EngineSpec("p", (Group("full", block_tokens=16, num_blocks=64),)))
