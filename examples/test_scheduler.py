"""How an engine tests its own use of kvferry: without NIXL, without a node server, and with what goes wrong on purpose.

pytest examples/test_scheduler.py
"""

from collections.abc import Iterator

import numpy as np
import pytest

import kvferry
from kvferry import Blocks, EngineSpec, Group, Prompt
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import PromptMismatch, TransferFailed
from kvferry.testing import Fabric

GROUP = Group("full", block_tokens=16, num_blocks=8)
AXES = ("kv", "block", "head", "token", "content")
TOKENS = list(range(32))


class Decode:
    """The code under test: a scheduler that gives blocks to requests, and takes them back."""

    def __init__(self, address: str) -> None:
        self.client = kvferry.Client(address)
        spec = EngineSpec("decode", (GROUP,))
        self.port, self.worker = SchedulerPort(self.client, spec), WorkerPort(self.client, spec)
        self.cache = np.zeros((2, 8, 1, 16, 4), np.float32)
        self.worker.register({"layer0": self.cache}, axes=AXES)
        self.free = list(range(8))
        self.waiting: list[str] = []
        self.taken: dict[str, list[int]] = {}
        self.errors: dict[str, kvferry.KvferryError | None] = {}

    def add(self, request: str, reference: str, tokens: list[int]) -> None:
        self.taken[request] = [self.free.pop() for _ in range(0, len(tokens), GROUP.block_tokens)]
        self.port.acquire(request, reference, prompt=Prompt(tokens))
        self.waiting.append(request)

    def step(self) -> None:
        for request in list(self.waiting):
            try:
                if self.port.granted(request) is None:
                    continue
                self.worker.start(self.port.attach(request, {"full": Blocks(self.taken[request])}))
            except kvferry.KvferryError as error:
                self.errors[request] = error
                self.free += self.taken.pop(request)
            self.waiting.remove(request)
        for read_id in self.port.cancels():
            self.worker.cancel(read_id)
        self.port.collect(self.worker.finished())
        finished = self.port.finished()
        for end in finished.reads:
            self.errors[end.request_id] = end.error
        # Blocks of a read that failed may still be written to: they are free when it is quiet, and not before.
        failed = [end.request_id for end in finished.reads if end.error and end.quiet]
        for request in [*failed, *finished.quiesced]:
            self.free += self.taken.pop(request)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made


@pytest.fixture
def decode(fabric: Fabric) -> Iterator[Decode]:
    made = Decode(fabric.address)
    yield made
    made.port.close()
    made.client.close()


@pytest.fixture
def source(fabric: Fabric) -> kvferry.Client:
    """The process of a prefill engine that offers one request; a test may kill it."""
    return fabric.client()


@pytest.fixture
def reference(source: kvferry.Client) -> str:
    kv = np.arange(2 * 8 * 16 * 4, dtype=np.float32).reshape(2, 8, 1, 16, 4)
    prefill = source.register_cache(EngineSpec("prefill", (GROUP,)), tensors={"layer0": kv}, axes=AXES)
    return prefill.session.publish("request", {"full": Blocks([1, 2])}, prompt=Prompt(TOKENS)).reference


def test_a_request_is_read(decode: Decode, reference: str) -> None:
    decode.add("request", reference, TOKENS)
    while not decode.errors:
        decode.step()
    assert decode.errors == {"request": None}
    assert decode.cache[0, decode.taken["request"][0], 0, 0, 0] == 64


def test_a_reference_of_another_prompt_is_refused(decode: Decode, reference: str) -> None:
    decode.add("request", reference, TOKENS[::-1])
    while not decode.errors:
        decode.step()
    assert isinstance(decode.errors["request"], PromptMismatch)
    assert len(decode.free) == 8
    assert not decode.cache.any()


def test_blocks_come_back_once_nothing_writes_to_them(decode: Decode, reference: str, fabric: Fabric) -> None:
    with fabric.hold_reads() as held:
        decode.add("request", reference, TOKENS)
        while not held.count:
            decode.step()
        decode.port.cancel("request")
        while not decode.errors:
            decode.step()
        assert len(decode.free) == 6  # the bytes are still under way
        held.release()
        while len(decode.free) < 8:
            decode.step()


def test_a_source_that_dies_fails_the_request(
    decode: Decode, reference: str, fabric: Fabric, source: kvferry.Client
) -> None:
    with fabric.hold_reads() as held:
        decode.add("request", reference, TOKENS)
        while not held.count:
            decode.step()
        fabric.kill(source)
        while len(decode.free) < 8:
            decode.step()
    assert isinstance(decode.errors["request"], TransferFailed)
