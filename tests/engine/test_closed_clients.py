"""A client that is closed before the ports and futures that use it leaves no caller waiting."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group, router_reference
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import Closed, KvferryError
from kvferry.testing import Fabric
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SPEC = EngineSpec("decode", (Group("full", block_tokens=16, num_blocks=32),))
SOON = 30.0


def memory() -> Any:
    return np.zeros((2, 32, 1, 16, 4), np.float32)


def test_requests_of_a_port_whose_client_is_closed_end() -> None:
    with Fabric() as fabric:
        client = fabric.client()
        port, worker = SchedulerPort(client, SPEC), WorkerPort(client, SPEC)
        worker.register({"layer": memory()}, axes=AXES)
        reference = router_reference(fabric.address, "prefill")
        port.acquire("waits", reference, timeout=600.0)
        until(lambda: port.stats().waiting == 1)
        client.close()
        with pytest.raises(KvferryError):
            until(lambda: port.granted("waits") is not None)
        assert port.stats().waiting == 0
        with pytest.raises(Closed):
            port.acquire("late", reference)
        with pytest.raises(Closed):
            port.decline(reference)
        for _ in range(2):
            worker.close()
            port.close()
            client.close()


def test_a_read_of_a_cache_whose_client_is_closed_ends() -> None:
    with Fabric() as fabric:
        client = fabric.client()
        cache = client.register_cache(SPEC, tensors={"layer": memory()}, axes=AXES)
        read = cache.read(router_reference(fabric.address, "prefill"), {"full": Blocks([1])}, timeout=600.0)
        client.close()
        assert read.exception(SOON) is not None
        assert read.quiet


def test_futures_of_a_cache_whose_client_is_closed_end() -> None:
    with Fabric() as fabric:
        prefill, client = fabric.client(), fabric.client()
        source = SchedulerPort(prefill, EngineSpec("prefill", SPEC.groups))
        cache = client.register_cache(SPEC, tensors={"layer": memory()}, axes=AXES)
        # Its source has no rank yet, so that the handshake waits.
        warm = cache.warm(source.engine_reference, timeout=600.0)
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        with pytest.raises((Closed, CancelledError)):
            warm.result(SOON)
        closing.join(SOON)
        assert not closing.is_alive()
        source.close()
