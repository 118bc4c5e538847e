"""The engine that a connector is made for, which waits at its input queue: a question wakes it."""

from __future__ import annotations

import queue
from types import SimpleNamespace

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from kvferry.integrations.vllm.idle_steps import Engine, engine_in_making


class Made(EngineCoreProc):  # type: ignore[misc]
    """As much of vLLM's engine as there is when it makes its scheduler."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.found = _scheduler(self)


class InProcess(EngineCore):  # type: ignore[misc]
    """The engine of ``vllm.LLM``, which waits for nothing."""

    def __init__(self) -> None:
        self.found = _scheduler(self)


def _scheduler(_: object) -> Engine | None:
    return engine_in_making()


def test_engine_that_is_being_made_is_woken_without_an_input() -> None:
    engine = Made()
    found = engine.found
    assert found is not None
    found.wake()
    assert engine.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    # It is handled, as vLLM does, by nothing.
    assert engine._handle_client_request(EngineCoreRequestType.WAKEUP, None) is None
    for state in PauseState:
        engine.scheduler = SimpleNamespace(pause_state=state)
        assert found.paused() == (state is not PauseState.UNPAUSED)
    del engine
    found.wake()
    assert not found.paused()


def test_engine_without_a_queue_is_not_woken() -> None:
    assert InProcess().found is None
    assert engine_in_making() is None
