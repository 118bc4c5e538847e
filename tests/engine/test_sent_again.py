"""What a home has released is not offered again, however late its publication is sent again."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group
from kvferry._control.connection import Control, NotificationAnswer
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import PublicationAborted, PublicationStale, Unreachable
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SPEC = EngineSpec("prefill", (Group("full", block_tokens=16, num_blocks=32),))
SOON = 30.0


def memory() -> Any:
    return np.zeros((2, 32, 1, 16, 4), np.float32)


def test_a_released_publication_is_not_published_again_to_a_restarted_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home accepts a publication and dies before its answer arrives, but after the release."""
    notify, released, attempts, begun = Control.notify, threading.Event(), list[int](), threading.Event()

    async def call(control: Control, request: pb.NotifyRequest, timeout: float = 5.0) -> list[NotificationAnswer]:
        told = request.notifications[0]
        if told.HasField("publish"):
            attempts.append(told.publish.publication)
        answers = await notify(control, request, timeout)
        if told.HasField("publish") and not released.is_set():
            assert await asyncio.to_thread(released.wait, SOON)
            raise Unreachable("no answer", retry_after=0.5, address="home")
        if released.is_set() and told.resync.phase == pb.RESYNC_PHASE_BEGIN:
            # The refill of the new home has begun, and ends when nothing waits to be sent again.
            begun.set()
            await asyncio.to_thread(until, lambda: not port._session._sender._messages)
        return answers

    with Fabric() as fabric:
        prefill, decode = fabric.client(), fabric.client(optimistic=False)
        port, worker = SchedulerPort(prefill, SPEC), WorkerPort(prefill, SPEC)
        worker.register({"layer": memory()}, axes=AXES)
        monkeypatch.setattr(Control, "notify", call)
        publication = port.publish("request", {"full": Blocks([1])})
        reader = SchedulerPort(decode, EngineSpec("decode", SPEC.groups))
        until(lambda: attempts == [publication.number])
        reader.decline(publication.reference)
        until(lambda: [release.publication for release in port.released()] == [publication.number])
        # From now on the engine may write to its block.
        fabric.stop_home()
        released.set()
        fabric.start_home()
        assert begun.wait(SOON)
        reader.acquire("request", publication.reference, timeout=SOON)
        with pytest.raises((PublicationAborted, PublicationStale)):
            until(lambda: reader.granted("request") is not None)
        reader.close()
        worker.close()
        port.close()
