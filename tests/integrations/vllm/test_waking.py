"""The engine that a connector is made for, which waits at its input queue: a question wakes it."""

from __future__ import annotations

import queue
from collections.abc import Callable

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from kvferry.integrations.vllm.waking import waker


class Made(EngineCoreProc):  # type: ignore[misc]
    """As much of vLLM's engine as there is when it makes its scheduler."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.wake = _scheduler(self)


class InProcess(EngineCore):  # type: ignore[misc]
    """The engine of ``vllm.LLM``, which waits for nothing."""

    def __init__(self) -> None:
        self.wake = _scheduler(self)


def _scheduler(_: object) -> Callable[[], None] | None:
    return waker()


def test_engine_that_is_being_made_is_woken_without_an_input() -> None:
    engine = Made()
    assert engine.wake is not None
    engine.wake()
    assert engine.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    # It is handled, as vLLM does, by nothing.
    assert engine._handle_client_request(EngineCoreRequestType.WAKEUP, None) is None
    wake = engine.wake
    del engine
    wake()


def test_engine_without_a_queue_is_not_woken() -> None:
    assert InProcess().wake is None
    assert waker() is None
