"""No block is published before every rank's device has computed it: streams that are played, all else is real.

There is no GPU here. What is played is what a rank's device does with what vLLM queues on it: nothing until later.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from kvferry import Blocks, EngineSpec, Group, GroupKind, Interval, router_reference
from kvferry.engine import RankEnd, WorkerOutput
from kvferry.errors import KvferryError, NotAllowed
from kvferry.geometry.formats import vllm_attention
from kvferry.geometry.tensors import Holding
from kvferry.integrations.vllm import worker as worker_module
from kvferry.integrations.vllm.requests import REFERENCE, TRACEPARENT
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews
from kvferry.integrations.vllm.worker import EVERY_STEP, ConnectorWorker, DeviceSteps, Event, arrival_fence, steps_of
from kvferry.testing import Fabric
from tests.integrations.vllm.played_reader import bound, scheduler_of
from tests.integrations.vllm.played_setup import BLOCKS, GROUP, RANKS, TOKENS, of_text, setup_of, to_read
from tests.support.waiting import until


class Stream:
    """A stream of a device: what is queued runs in order, when `run` is called."""

    def __init__(self) -> None:
        self._queued: deque[Callable[[], None]] = deque()

    def queue(self, kernel: Callable[[], None]) -> None:
        self._queued.append(kernel)

    def record(self) -> Event:
        """Record an event, as `torch.cuda.Event.record` does."""
        event = Recorded()
        self.queue(event.complete)
        return event

    def run(self) -> None:
        while self._queued:
            self._queued.popleft()()


class Recorded:
    done = False

    def complete(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done


class Prefill:
    """A prefill engine of the connector's own parts, and its steps as vLLM makes them."""

    def __init__(self, fabric: Fabric, streams: list[Stream] | None, *, caches_prefixes: bool = False) -> None:
        spec = EngineSpec("prefill", (GROUP,), RANKS)
        setup = setup_of(fabric, spec, serves=True, caches_prefixes=caches_prefixes)
        self.scheduler = scheduler_of(setup)
        self.cache = bound(self.scheduler)
        self.streams = streams
        self.memory = [torch.zeros((BLOCKS, 1, TOKENS, 16), dtype=torch.uint8) for _ in range(RANKS)]
        self.workers = [ConnectorWorker(setup, rank) for rank in range(RANKS)]
        for rank, (worker, memory) in enumerate(zip(self.workers, self.memory, strict=True)):
            held = Holding(units=Interval(rank, rank + 1), axis_size=RANKS)
            worker.register({"l": memory}, vllm_attention({"l": memory}, GROUP, held))
        self.announced: list[str] = []
        until(self.registered)

    def registered(self) -> bool:
        self.leave(self.step())
        return self.scheduler._all_registered()

    def step(
        self, request_id: str = "", block: int = 0, value: int = 0, *, drafter: bool = False, ended: bool = True
    ) -> list[WorkerNews]:
        """Begin a step, which writes a value to a block, and end it if `ended`; the news that go with its output."""
        metadata = self.scheduler.step({request_id: TOKENS} if request_id else {})
        found = []
        for rank, worker in enumerate(self.workers):
            worker.step(metadata)
            if request_id:
                self.compute(rank, block, value)
            if not drafter and ended:
                worker.queued(metadata.step)
            news = worker.news()
            if drafter and ended:
                # vLLM's older model runner ends the step after it has asked for the news.
                worker.queued(metadata.step)
            found += [] if news is None else [news]
        return found

    def compute(self, rank: int, block: int, value: int) -> None:
        def write() -> None:
            self.memory[rank][block] = value

        if self.streams is None:
            write()
        else:
            self.streams[rank].queue(write)

    def leave(self, news: list[WorkerNews]) -> None:
        """Let the output of a step arrive at the scheduler: each worker's is pickled, then they are combined."""
        arrived = [pickle.loads(pickle.dumps(each)) for each in news]
        if arrived:
            combined = arrived[0]
            for other in arrived[1:]:
                combined = combined.aggregate(other)
            self.scheduler.collect(combined)

    def request(self, request_id: str, reference: str = "", prompt: int = TOKENS) -> Any:
        found = SimpleNamespace(
            request_id=request_id,
            kv_transfer_params={"do_remote_decode": True, REFERENCE: reference},
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
            num_computed_tokens=prompt,
            num_prompt_tokens=prompt,
            num_tokens=prompt + 1,
            num_output_tokens=1,
            all_token_ids=range(prompt + 1),
            max_tokens=2,
            abort_immediately=False,
            **of_text(range(prompt)),
        )
        self.scheduler.on_new_request(found)
        return found

    def finish(self, request: Any, *blocks: int) -> str:
        params = self.scheduler.finished(request, (list(blocks),))
        assert params
        return str(params[REFERENCE])

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Streams of the ranks' devices, in the order in which the ranks get their caches."""
    made = [Stream() for _ in range(RANKS)]
    left = iter(made)
    monkeypatch.setattr(worker_module, "steps_of", lambda _: DeviceSteps(next(left).record))
    return made


@pytest.fixture
def prefill(fabric: Fabric, streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefill]:
    """An engine whose every publication of a block checks that all of the block was written before."""
    made = Prefill(fabric, streams)
    watched(made, monkeypatch)
    yield made
    made.close()


def watched(made: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note what is published, and check that it was written."""
    port = made.scheduler._port

    def check(blocks: Mapping[str, Blocks]) -> bool:
        for listed in blocks.values():
            for block in listed.ids.tolist():
                assert all(memory[block].all() for memory in made.memory), f"block {block} is published too early"
        return bool(blocks)

    def watch(name: str) -> None:
        real = getattr(port, name)

        def publish(first: Any, blocks: Mapping[str, Blocks], **options: Any) -> Any:
            check(blocks)
            made.announced.append(f"{name} {sorted(blocks)}")
            return real(first, blocks, **options)

        monkeypatch.setattr(port, name, publish)

    watch("publish")
    watch("publish_more")


def read(fabric: Fabric, reference: str, blocks: int = 1) -> torch.Tensor:
    """Read a publication of so many blocks with an engine of one rank; the first one."""
    group = Group("0", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0)
    memory = torch.zeros((BLOCKS, RANKS, TOKENS, 16), dtype=torch.uint8)
    client = fabric.client()
    planes = vllm_attention({"l": memory}, group, Holding(units=Interval(0, RANKS), axis_size=RANKS))
    cache = client.register_cache(EngineSpec("decode", (group,)), tensors={"l": memory}, planes=planes)
    assert cache.read(reference, {"0": Blocks(range(3, 3 + blocks))}).result(30).bytes
    client.close()
    return memory[3]


def test_a_request_is_published_when_the_slowest_rank_has_computed_it(
    fabric: Fabric, streams: list[Stream], prefill: Prefill
) -> None:
    request = prefill.request("r")
    first = prefill.step("r", 5, 77)
    streams[0].run()
    prefill.leave(first)
    reference = prefill.finish(request, 5)
    assert prefill.scheduler._publishes
    prefill.leave(prefill.step())
    assert prefill.announced == ["publish []"]
    streams[1].run()
    prefill.leave(prefill.step())
    assert prefill.announced == ["publish []", "publish_more ['0']"]
    assert not prefill.scheduler._publishes
    assert bool((read(fabric, reference) == 77).all())


def test_output_of_a_step_has_the_progress_at_its_sending(streams: list[Stream], prefill: Prefill) -> None:
    """vLLM asks for the news when the step is queued, and sends them when its output is there: no step is lost."""
    request = prefill.request("r")
    news = prefill.step("r", 5, 77)
    for stream in streams:
        stream.run()
    prefill.finish(request, 5)
    assert prefill.announced == ["publish []"]
    prefill.leave(news)
    assert prefill.announced == ["publish []", "publish_more ['0']"]


def test_a_request_whose_step_is_known_to_be_computed_is_published_at_once(
    streams: list[Stream], prefill: Prefill
) -> None:
    request = prefill.request("r")
    news = prefill.step("r", 5, 77)
    for stream in streams:
        stream.run()
    prefill.leave(news)
    # A later step of other requests is queued, and does not matter.
    prefill.step("other", 6, 1)
    prefill.finish(request, 5)
    assert prefill.announced == ["publish ['0']"]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "never-ended"])
def test_publication_waits_for_drafters(streams: list[Stream], prefill: Prefill, *, ended: bool) -> None:
    """The drafter's part of the step is queued after the news were asked for. Stages of a pipeline that have no drafter
    never hear that the step has ended."""
    request = prefill.request("r")
    news = prefill.step("r", 5, 77, drafter=True, ended=ended)
    prefill.leave(news)
    prefill.finish(request, 5)
    prefill.leave(prefill.step())
    assert prefill.announced == ["publish []"]
    for stream in streams:
        stream.run()
    prefill.leave(prefill.step())
    assert prefill.announced[-1] == "publish_more ['0']"


def test_requests_are_published_in_turn(streams: list[Stream], prefill: Prefill) -> None:
    requests = [prefill.request(f"r{index}") for index in range(3)]
    for index, request in enumerate(requests):
        prefill.leave(prefill.step(request.request_id, 4 + index, 7))
        prefill.finish(request, 4 + index)
        assert prefill.announced.count("publish_more ['0']") == 0
    for stream in streams:
        stream.run()
    prefill.leave(prefill.step())
    assert prefill.announced.count("publish_more ['0']") == 3


def test_publication_on_a_cpu_does_not_wait(fabric: Fabric) -> None:
    prefill = Prefill(fabric, None)
    request = prefill.request("r")
    prefill.step("r", 5, 77)
    reference = prefill.finish(request, 5)
    assert not prefill.scheduler._publishes
    assert prefill.step() == []
    assert bool((read(fabric, reference) == 77).all())
    prefill.close()


@pytest.mark.parametrize("device", [True, False], ids=["device", "cpu"])
def test_a_part_of_a_prompt_is_published_when_every_rank_has_computed_it(
    fabric: Fabric, streams: list[Stream], monkeypatch: pytest.MonkeyPatch, *, device: bool
) -> None:
    """On a CPU it is there when the step has run. vLLM may have begun the next one before it says so."""
    if not device:
        monkeypatch.setattr(worker_module, "steps_of", lambda _: DeviceSteps(None))
    prefill = Prefill(fabric, streams if device else None)
    watched(prefill, monkeypatch)
    pool = prefill.cache.pool
    prefill.cache.blocks = blocks = [block.block_id for block in pool.get_new_blocks(3)]
    reference = router_reference(fabric.address, "prefill")
    request = prefill.request("r", reference, 3 * TOKENS)
    for number, block in enumerate(blocks[:2]):
        request.num_computed_tokens = number * TOKENS
        news = prefill.step("r", block, 70 + number)
        said = ["publish ['0']", "publish_more ['0']"]
        assert prefill.announced == said[:number]
        for rank, stream in enumerate(streams if device else ()):
            # The news of both ranks leave when one has computed the step.
            assert prefill.announced == said[:number]
            prefill.leave(news[: rank + 1])
            stream.run()
            news = prefill.step()
        prefill.leave(news)
        assert prefill.announced == said[: number + 1]
    request.num_computed_tokens = 2 * TOKENS
    prefill.step("r", blocks[2], 72)
    request.num_computed_tokens = 3 * TOKENS
    for stream in streams if device else ():
        stream.run()
    prefill.leave(prefill.step())
    prefill.finish(request, *blocks)
    assert prefill.announced == ["publish ['0']", "publish_more ['0']", "publish_more ['0']"]
    assert bool((read(fabric, reference, 3) == 70).all())
    # vLLM frees the request, and the blocks are free when the source hears of the read.
    pool.free_blocks(pool.blocks[block] for block in blocks)

    def all_released() -> bool:
        prefill.leave(prefill.step())
        return bool(pool.get_num_free_blocks() == BLOCKS - 1)

    until(all_released)
    prefill.close()


def test_a_step_of_a_cpu_has_ended_when_it_has_run() -> None:
    """vLLM may begin the next one first."""
    steps = DeviceSteps(None)
    steps.begun(1)
    assert steps.done() == (EVERY_STEP, 0)
    steps.queued(1)
    steps.begun(2)
    assert steps.done().ended == 1


def test_a_step_that_vllm_never_ends_has_ended_when_the_next_begins() -> None:
    """As those of pipeline stages with a drafter in vLLM's older model runner."""
    stream = Stream()
    steps = DeviceSteps(stream.record)
    steps.begun(1)
    steps.begun(2)
    assert steps.done().computed == 0
    stream.run()
    assert steps.done() == (1, 1)


def test_steps_are_computed_at_once_on_the_host_and_by_stream_events_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert steps_of([torch.zeros(1)]).done().computed == EVERY_STEP
    stream = Stream()
    used: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.recorded = stream.record()

        def query(self) -> bool:
            return self.recorded.query()

    def current_stream(device: Any) -> Any:
        used.append(device)
        return SimpleNamespace(record_event=lambda event: setattr(event, "recorded", stream.record()))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    device = torch.device("cuda", 3)
    tensor: Any = SimpleNamespace(device=device)
    steps = steps_of([tensor])
    steps.queued(1)
    assert steps.done().computed == 0
    stream.run()
    assert (steps.done().computed, used) == (1, [device])


@pytest.mark.parametrize(
    ("hip", "kind", "device", "waits"),
    [
        ("7.2.1", GroupKind.STATE, "cuda", 1),
        ("7.2.1", GroupKind.TOKENS, "cuda", 0),
        ("7.2.1", GroupKind.STATE, "cpu", 0),
        (None, GroupKind.STATE, "cuda", 0),
    ],
    ids=["rocm-mamba", "rocm-attention", "host", "cuda-mamba"],
)
def test_states_on_rocm_arrive_before_vllm_uses_them(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, hip: str | None, kind: GroupKind, device: str, waits: int
) -> None:
    synchronized: list[None] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(None))
    tokens = TOKENS if kind is GroupKind.TOKENS else 0
    group = Group("0", kind, tokens, BLOCKS) if tokens else Group("0", kind, num_blocks=BLOCKS)
    tensor: Any = SimpleNamespace(device=SimpleNamespace(type=device))
    fence = arrival_fence((group,), [tensor])
    setup = setup_of(fabric, EngineSpec("decode", (GROUP,)), serves=False)
    worker = ConnectorWorker(setup, 0)
    worker._fence = fence
    reports = [WorkerOutput(0), WorkerOutput(0, ended=(RankEnd("read", "r", True, True, 1),))]
    monkeypatch.setattr(worker._port, "finished", lambda: reports.pop(0))
    worker.step(StepMetadata(step=1))
    worker.news()
    assert synchronized == []
    news = worker.news()
    assert news is not None
    assert [output.ended[0].request_id for output in news.outputs] == ["r"]
    assert len(synchronized) == waits
    worker.close()


def test_rank_that_may_not_be_announced_ends_its_engine(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would have work, and run idle steps, for ever."""
    setup = setup_of(fabric, EngineSpec("prefill", (GROUP,)), serves=True)
    scheduler, worker = scheduler_of(setup), ConnectorWorker(setup, 0)

    def refuse(_: str) -> None:
        raise NotAllowed("this node announces no ranks")

    def collected() -> bool:
        scheduler.collect(worker.news())
        return False

    monkeypatch.setattr(worker._port, "announce", refuse)
    # The progress of a device without streams is news only once.
    scheduler.collect(worker.news())
    worker.step(scheduler.step({}))
    with pytest.raises(KvferryError, match="rank 0 cannot register its cache: this node announces no ranks"):
        until(collected)
    worker.close()
    scheduler.close()


def test_engine_that_only_publishes_reads_nothing_and_logs_a_warning(
    fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    """It computes the prompt, and what was published for it is released: vLLM gives out blocks of a producer to which
    steps that are under way still write."""
    prefill = Prefill(fabric, None)
    request = prefill.request("r")
    prefill.leave(prefill.step("r", 5, 77))
    reference = prefill.finish(request, 5)
    producer = scheduler_of(setup_of(fabric, EngineSpec("producer", (GROUP,)), serves=True, reads=False))
    for request_id in ("reader", "another"):
        asked = to_read(reference, 2 * TOKENS)
        asked.request_id = request_id
        producer.on_new_request(asked)
        assert producer.matched_tokens(asked, 0) == (0, False)
        producer.allocated(request_id, ([1, 2],), 0)

    def freed() -> bool:
        prefill.scheduler.step({})
        return bool(prefill.cache.pool.blocks[5].ref_cnt == 0)

    until(freed)
    stats = producer.take_stats()
    assert stats is not None
    assert stats.data == {"not_granted": 2}
    said = [record.getMessage() for record in caplog.records if "asked to read" in record.getMessage()]
    assert len(said) == 1
    assert "role both" in said[0]
    producer.close()
    prefill.close()


@pytest.mark.parametrize("routed", [False, True], ids=["asked-later", "asked-at-once"])
def test_engine_takes_its_own_publication_from_its_prefix_cache(fabric: Fabric, *, routed: bool) -> None:
    """One engine is prefill and decode of a request (kv_both behind a router that takes turns)."""
    prefill = Prefill(fabric, None, caches_prefixes=True)
    scheduler, pool = prefill.scheduler, prefill.cache.pool
    prefill.cache.blocks = blocks = [block.block_id for block in pool.get_new_blocks(2)]
    reference = router_reference(fabric.address, "prefill") if routed else ""
    request = prefill.request("r", reference, 2 * TOKENS)
    request.num_computed_tokens = 0
    prefill.leave(prefill.step("r", blocks[0], 77))
    if not routed:
        prefill.step("r", blocks[1], 77)
        request.num_computed_tokens = 2 * TOKENS
        params = scheduler.finished(request, (blocks,))
        assert params is not None
        reference = str(params[REFERENCE])
    reader = to_read(reference, 2 * TOKENS + 3)
    scheduler.on_new_request(reader)
    until(lambda: scheduler._port.stats().granted == 1)
    if routed:
        # More of it will be in the prefix cache when it is complete.
        assert scheduler.matched_tokens(reader, TOKENS) == (None, False)
        prefill.leave(prefill.step("r", blocks[1], 77))
        request.num_computed_tokens = 2 * TOKENS
        scheduler.finished(request, (blocks,))
    until(lambda: scheduler.matched_tokens(reader, TOKENS)[0] is not None)
    assert scheduler.matched_tokens(reader, TOKENS) == (0, False)
    scheduler.allocated("reader", (blocks,), 0)

    def freed() -> bool:
        """The publication is declined: no blocks stay pinned for a reader that will not come."""
        scheduler.step({})
        return all(pool.blocks[block].ref_cnt == 1 for block in blocks)

    until(freed)
    assert scheduler.take_received() == set()
    prefill.close()


@pytest.mark.parametrize("request_comes", [True, False], ids=["request", "pause"])
def test_prefill_engine_rests_without_readers_and_frees_released_blocks_when_vllm_needs_them(
    fabric: Fabric, *, request_comes: bool
) -> None:
    """It runs no steps for its unread publications. vLLM has their blocks before it looks for some, and before it
    resets its prefix cache for a pause: it asks for work first."""
    prefill = Prefill(fabric, None)
    scheduler, pool = prefill.scheduler, prefill.cache.pool
    prefill.cache.blocks = blocks = [block.block_id for block in pool.get_new_blocks(1)]
    request = prefill.request("r")
    prefill.leave(prefill.step("r", blocks[0], 77))
    params = scheduler.finished(request, (blocks,))
    assert params is not None
    pool.free_blocks(pool.blocks[block] for block in blocks)
    assert pool.get_num_free_blocks() == BLOCKS - 2
    assert scheduler.has_work()
    until(lambda: not scheduler.has_work())
    assert bool((read(fabric, params[REFERENCE]) == 77).all())

    def freed() -> bool:
        if request_comes:
            prefill.request("next")
        else:
            scheduler.has_work()
        return bool(pool.get_num_free_blocks() == BLOCKS - 1)

    until(freed)
    prefill.close()


@pytest.mark.parametrize("header", [False, True])
def test_trace_goes_through_prefill_beside_the_reference(fabric: Fabric, header: bool) -> None:
    """The router names it in the parameters; else vLLM's own HTTP header does."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    prefill = Prefill(fabric, None)
    try:
        traced, untraced = prefill.request("traced"), prefill.request("untraced")
        traced.trace_headers = {"traceparent": traceparent} if header else None
        if not header:
            traced.kv_transfer_params[TRACEPARENT] = traceparent
        params = prefill.scheduler.finished(traced, ([3],))
        assert params is not None
        assert params[TRACEPARENT] == traceparent
        untraced.kv_transfer_params[TRACEPARENT] = 17
        params = prefill.scheduler.finished(untraced, ([4],))
        assert params is not None
        assert TRACEPARENT not in params
    finally:
        prefill.close()
