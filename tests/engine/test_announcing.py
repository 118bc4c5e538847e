"""Workers that have their memory before they know the engine's token: registered with NIXL first, announced later."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvferry
from kvferry import Blocks, Client, EngineSpec, EngineToken, Group
from kvferry._reads.runtime import RankRuntime
from kvferry._transport import nixl_binding
from kvferry._wire.authority import new_session_secret
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import Closed, EngineUnknown, HomeRecovering, KvferryError, NixlError, WrongState
from tests.support.identifiers import unique_id
from tests.support.waiting import until

GROUP = Group("full", block_tokens=4, num_blocks=8)
AXES = ("kv", "block", "head", "token", "content")


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    with kvferry.serve() as server:
        yield server.address


def memory(value: int = 0) -> np.ndarray:
    return np.full((2, 8, 1, 4, 64), value, np.uint8)


def test_memory_is_registered_before_there_is_an_engine_and_serves_once_it_is_announced(node: str) -> None:
    spec = EngineSpec(unique_id("source"), (GROUP,), 2)
    threads: list[int] = []
    real = nixl_binding.register

    def register(*arguments: object) -> None:
        threads.append(threading.get_ident())
        real(*arguments)  # type: ignore[arg-type]

    with Client(node) as workers, Client(node) as process, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl_binding, "register", register)
        ports = [WorkerPort(workers, spec, rank) for rank in range(2)]
        for rank, port in enumerate(ports):
            port.register_memory({"l": memory(rank + 1)}, axes=AXES, heads=range(rank, rank + 1), total_heads=2)
        # On this thread, while it waited, and with nobody to ask.
        assert threads == [threading.get_ident()] * 2
        scheduler = SchedulerPort(process, spec)
        for port in ports:
            port.announce(str(scheduler.token))
        publication = scheduler.publish("r", {"full": Blocks([5])})
        here = np.zeros((2, 8, 2, 4, 64), np.uint8)
        reader = workers.register_cache(EngineSpec(unique_id("d"), (GROUP,)), tensors={"l": here}, axes=AXES)
        assert reader.read(publication.reference, {"full": Blocks([3])}).result(30).bytes == 2 * 2 * 4 * 64
        assert all((here[:, 3, head] == head + 1).all() for head in range(2))
        scheduler.close()


def test_an_announcement_that_failed_may_be_repeated(node: str) -> None:
    spec = EngineSpec(unique_id("source"), (GROUP,), 2)
    with Client(node) as client, Client(node) as process:
        port = WorkerPort(client, spec, 0)
        port.register_memory({"l": memory()}, axes=AXES, replicated=True)
        unknown = EngineToken(spec.engine_id, new_session_secret(), "")
        # A home that has just started does not say yet that it does not know an engine.
        with pytest.raises((EngineUnknown, HomeRecovering)):
            port.announce(unknown, timeout=1.0)
        with pytest.raises(WrongState, match="no memory yet"):
            _ = port.cache
        scheduler = SchedulerPort(process, spec)
        assert port.announce(scheduler.token) is port.cache
        with pytest.raises(WrongState, match="announced already"):
            port.announce(scheduler.token)
        scheduler.close()


def test_steps_out_of_turn_are_refused(node: str) -> None:
    with Client(node) as client:
        port = WorkerPort(client, EngineSpec(unique_id("e"), (GROUP,)))
        with pytest.raises(WrongState, match="register_memory first"):
            port.announce()
        port.register_memory({"l": memory()}, axes=AXES)
        with pytest.raises(WrongState, match="already registered"):
            port.register_memory({"l": memory()}, axes=AXES)
        with pytest.raises(WrongState, match="already registered"):
            port.register({"l": memory()}, axes=AXES)
        assert port.announce() is port.cache


def test_memory_whose_port_or_client_was_closed_is_not_announced(node: str) -> None:
    spec = EngineSpec(unique_id("e"), (GROUP,))
    with Client(node) as client:
        port = WorkerPort(client, spec)
        port.register_memory({"l": memory()}, axes=AXES)
        port.close()
        with pytest.raises(Closed):
            port.announce()
        # The agent was not announced, so that other memory may be registered instead.
        again = WorkerPort(client, spec)
        assert again.register({"l": memory()}, axes=AXES) is again.cache


def test_a_rank_whose_watch_another_process_took_over_opens_one_again(node: str) -> None:
    spec = EngineSpec(unique_id("e"), (GROUP,), 2)
    with Client(node) as process, Client(node) as client, Client(node) as other:
        scheduler = SchedulerPort(process, spec)
        port = WorkerPort(client, spec, 0, token=scheduler.token)
        port.register_memory({"l": memory()}, axes=AXES, replicated=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankRuntime, "register", refuse_to_register)
            with pytest.raises(NotImplementedError):
                port.announce()
        # What the process of a rank does that is started twice, and ends.
        other._watch(scheduler.token, 0, 10.0)
        (first,) = client._watchers.values()
        until(lambda: first.failure is not None)
        other.close()
        port.announce()
        (watcher,) = client._watchers.values()
        assert watcher.failure is None
        assert watcher.opened is not None
        scheduler.close()


def refuse_to_register(*_: object) -> float:
    raise NotImplementedError


def test_a_rank_whose_registration_failed_may_be_registered_again(node: str) -> None:
    spec = EngineSpec(unique_id("e"), (GROUP,), 2)
    with Client(node) as client, Client(node) as process:
        port = WorkerPort(client, spec, 0)
        with pytest.raises(KvferryError):
            port.register({"l": memory()}, axes=AXES, replicated=True, timeout=0.1)
        scheduler = SchedulerPort(process, spec)
        port = WorkerPort(client, spec, 0, token=scheduler.token)
        assert port.register({"l": memory()}, axes=AXES, replicated=True) is port.cache
        scheduler.close()


def test_reading_agents_are_made_before_the_announcement_and_their_failure_is_raised(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(node) as client:
        port = WorkerPort(client, EngineSpec(unique_id("e"), (GROUP,)))
        with pytest.raises(WrongState, match="no memory yet"):
            port.prepare()
        port.register_memory({"l": memory()}, axes=AXES)
        port.prepare(30.0)
        cache = port.announce()
        assert cache.gauges().agents == 1

        def refuse(*_: object) -> None:
            raise NixlError("registerMem: no room", call="registerMem", peer="", problem="no room")

        other = WorkerPort(client, EngineSpec(unique_id("e"), (GROUP,)))
        other.register_memory({"l": memory()}, axes=AXES, serve=False)
        monkeypatch.setattr(nixl_binding, "register", refuse)
        with pytest.raises(NixlError, match="no room"):
            other.prepare(30.0)
