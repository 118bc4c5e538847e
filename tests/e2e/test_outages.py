"""A node server that is away for longer than a call takes: what was published meanwhile is read when it is back."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, router_reference
from kvferry._control.backoff import CALL_TIMEOUT
from kvferry.engine import ReadEnd, SchedulerPort, WorkerPort
from kvferry.errors import Unreachable
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess

pytestmark = pytest.mark.slow

AXES = ("kv", "block", "head", "token", "content")
TOKENS = 16
REQUESTS = 4
SOON = 120.0


class Engine:
    """An engine of one rank, in this process."""

    def __init__(self, address: str, name: str) -> None:
        self.client = Client(address)
        self.spec = EngineSpec(unique_id(name), (Group("full", block_tokens=TOKENS, num_blocks=32),))
        self.memory = np.zeros((2, 32, 1, TOKENS, 4), np.float32)
        self.scheduler, self.worker = SchedulerPort(self.client, self.spec), WorkerPort(self.client, self.spec)
        self.worker.register({"layer": self.memory}, axes=AXES)

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
        self.client.close()


def test_publications_of_an_outage_are_read_when_the_home_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = NodeServerProcess(tmp_path / "home", tcp=True, ttl=4, max_ttl=4).start()
    prefill, decode = Engine(server.address, "prefill"), Engine(server.address, "decode")
    try:
        for block in range(1, 1 + REQUESTS):
            prefill.memory[:, block] = block
        with caplog.at_level(logging.INFO):
            server.stop(signal.SIGKILL)
            published = [
                prefill.scheduler.publish(f"request {block}", {"full": Blocks([block])})
                for block in range(1, 1 + REQUESTS)
            ]
            for publication in published:
                decode.scheduler.acquire(publication.request_id, publication.reference, timeout=SOON)
            deadline = time.monotonic() + SOON
            while prefill.client.stats().calls.unreachable_seconds < CALL_TIMEOUT + 1.0:
                assert time.monotonic() < deadline
                assert prefill.scheduler.released() == []
                decode.scheduler.wait_news(0.05)
            server.start()
            waiting = {publication.request_id: publication for publication in published}
            ended: list[ReadEnd] = []
            while len(ended) < REQUESTS:
                assert time.monotonic() < deadline
                for request_id, publication in list(waiting.items()):
                    if decode.scheduler.granted(request_id) is not None:
                        grant = decode.scheduler.attach(request_id, {"full": Blocks([publication.number])})
                        decode.worker.start(grant)
                        del waiting[request_id]
                decode.scheduler.collect(decode.worker.finished())
                ended += decode.scheduler.finished().reads
                decode.scheduler.wait_news(0.01)
        assert [end.error for end in ended] == [None] * REQUESTS
        for publication in published:
            block = int(publication.request_id.split()[1])
            assert np.all(decode.memory[:, publication.number] == block)
        # The outage is said once by each side, however many requests wait.
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert sum("trying again" in text for text in said) == 2
        assert sum("still waiting for publication" in text for text in said) <= 2
        assert not any("TLS" in text or "could not send" in text for text in said)
    finally:
        decode.close()
        prefill.close()
        server.stop()


@contextmanager
def closing_at_once(address: str) -> Iterator[None]:
    """Listen in the place of a node server as a proxy does whose server is away: accept, and close."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)))

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize("answered", [False, True], ids=["never answered", "answered before"])
def test_a_proxy_without_its_server_is_no_question_of_tls_if_it_has_answered(tmp_path: Path, answered: bool) -> None:
    server = NodeServerProcess(tmp_path / "home", tcp=True).start()
    with Client(server.address) as client:
        if answered:
            client.open_engine(EngineSpec(unique_id("engine"), (Group("full", block_tokens=TOKENS, num_blocks=2),)))
        server.stop(signal.SIGKILL)
        with closing_at_once(server.address):
            reference = router_reference(server.address, "engine")
            with pytest.raises(
                Unreachable, match="restarting behind a proxy" if answered else "TLS settings are likely"
            ):
                client.decline(reference, timeout=4.0)
