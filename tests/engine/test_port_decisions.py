"""The two ports, call by call: what a worker remembers of its shares and for how long, and what a scheduler takes.

What lies below a port does as a test says: no real share ends at a moment that a test names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, MissReason, Prompt, Question
from kvferry._cache import Cache
from kvferry._clock import now
from kvferry._control.acquire_request import ReadTerms
from kvferry._control.connection import Control
from kvferry._control.publications import Publication
from kvferry._control.publish import Publish, PublishMore
from kvferry._loop import Loop
from kvferry._reads.leased_read import ReadStage
from kvferry._reads.rank_read import RankOrder, RankRead
from kvferry._transport.transfer import Transfer
from kvferry.engine import SchedulerPort, SchedulerStats, Tails, WorkerPort, worker
from kvferry.engine.values import Grant, Offer, RankEnd, WorkerOutput
from kvferry.errors import Closed, InvalidField, KvferryError, LimitReached, TransferFailed, WrongState
from kvferry.geometry.blocks import BlockRuns
from tests.engine.late_news import LateNews

SPEC = EngineSpec("decode", (Group("full", block_tokens=16, num_blocks=32),), 2)
PROMPT = Prompt([1, 2])
LOCAL = {"full": Blocks([20, 7], end_token=32)}
HOME = cast(Control, SimpleNamespace(address="home:1"))


def grant(read_id: str = "one", *, timeout: float = 60.0) -> Grant:
    runs = (BlockRuns.of_blocks("full", Blocks([3, 4], end_token=32)),)
    mine = (BlockRuns.of_blocks("full", LOCAL["full"]),)
    return Grant(
        f"request {read_id}", read_id, "home:1", "prefill", b"i" * 16, 7, "reference", "theirs", b"l" * 16, timeout,
        runs, mine, (16, 32), payload=b"payload",
    )  # fmt: skip


class Below:
    """In place of a rank's cache and its shares."""

    def __init__(self) -> None:
        self.registered: list[dict[str, Any]] = []
        self.announced: list[tuple[str, float]] = []
        self.started: list[RankOrder] = []
        self.cancelled: list[RankRead] = []
        self.closed = 0
        self.prepared = 0
        self.refusal: KvferryError | None = None
        self.transport = self
        self.homes = SimpleNamespace(get={"home:1": HOME}.__getitem__)
        self.shares = self
        # No coroutine of a share runs.
        self.loop = Loop()
        self.ended: Callable[[RankRead], None]
        self.quiesced: Callable[[RankRead], None]

    def register_memory(self, spec: EngineSpec, rank: int, described: tuple[object, ...], **options: Any) -> Below:
        if self.refusal is not None:
            raise self.refusal
        self.registered.append({"spec": spec, "rank": rank, "described": described, **options})
        return self

    def announce(self, token: str, timeout: float) -> Cache:
        self.announced.append((token, timeout))
        return cast(Cache, self)

    def start(self, read: RankRead, ended: Callable[[RankRead], None], quiesced: Callable[[RankRead], None]) -> None:
        self.ended, self.quiesced = ended, quiesced
        if self.refusal is not None:
            raise self.refusal
        self.started.append(read.order)

    def cancel(self, read: RankRead) -> None:
        self.cancelled.append(read)

    def prepare(self, timeout: float) -> None:
        self.prepared += 1

    def warm(self, engine_reference: str, *, timeout: float) -> tuple[str, float]:
        return engine_reference, timeout

    def close(self) -> None:
        self.closed += 1


class Clients(Client):
    """A client of which only what a port asks is there."""

    def __init__(self, below: Any) -> None:
        self.below = below
        self.open_engine = getattr(below, "open_engine", None)  # type: ignore[method-assign, assignment]


class World:
    """A worker's port, and how its shares end."""

    def __init__(self) -> None:
        self.below = Below()
        self.port = WorkerPort(Clients(self.below), SPEC, 1, token="token")
        self.port.register({"layers.0": np.zeros(1)}, timeout=3.0, axes=("kv",))

    def read(self, read_id: str) -> RankRead:
        return self.port._reads[read_id]

    def end(self, read_id: str, error: KvferryError | None = None, *, quiet: bool = True) -> RankRead:
        """A share of 10 bytes, of which all or some have arrived."""
        read = self.read(read_id)
        transfer = Transfer(read_id, 10, None, now, lambda: None)
        if not quiet:
            transfer.begin()
        if error is None:
            transfer.begin()
            transfer.landed(10)
        else:
            transfer.fail(error)
        read.begin(lambda: transfer)
        read.ended, read.error = True, error
        assert read.quiet is quiet
        self.below.ended(read)
        return read

    def quiesce(self, read: RankRead) -> None:
        assert read.transfer is not None
        read.transfer.fenced()
        self.below.quiesced(read)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    stand_ins: dict[str, Any] = {
        "describe": lambda _, rank, *described: (rank, described),
        "register_memory": lambda client, *given, **options: client.below.register_memory(*given, **options),
        "announce": lambda _, local, token, timeout: local.announce(token, timeout),
        "runtime_of": lambda cache: cache,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(worker, name, stand_in)
    return World()


def test_a_waiting_worker_is_woken_by_the_end_of_a_share_and_by_quiet(world: World) -> None:
    assert not world.port.wait_news(0.0)
    world.port.start(grant())
    assert not world.port.wait_news(0.0)
    read = world.end("one", TransferFailed("lost", quiet=False), quiet=False)
    assert world.port.wait_news(30.0)
    assert world.port.finished().failed
    assert not world.port.wait_news(0.0)
    world.quiesce(read)
    assert world.port.wait_news(30.0)
    assert world.port.finished().quiesced == ("one",)
    with pytest.raises(InvalidField):
        world.port.wait_news(-1.0)


def test_the_end_of_a_share_during_the_end_of_a_workers_wait_is_returned(world: World) -> None:
    world.port.start(grant())
    world.port._news._told = LateNews(lambda: world.end("one"))
    assert world.port.wait_news(0.0)


def test_a_rank_index_must_be_one_of_the_engine(world: World) -> None:
    client = Clients(world.below)
    assert [WorkerPort(client, SPEC, rank).rank for rank in (0, 1)] == [0, 1]
    for wrong in (-1, 2, "0"):
        with pytest.raises(InvalidField, match="rank"):
            WorkerPort(client, SPEC, cast(int, wrong))
    with pytest.raises(InvalidField, match=r"spec is .*expected an EngineSpec"):
        WorkerPort(client, cast(EngineSpec, "decode"))
    with pytest.raises(InvalidField, match=r"client is .*expected a Client"):
        WorkerPort(cast(Client, "client"), SPEC)


def test_memory_is_registered_once_as_it_is_described(world: World) -> None:
    ((registered),) = world.below.registered
    tensors, declared = registered.pop("described")
    assert (list(tensors), declared) == (["layers.0"], worker.Register(tensors, axes=("kv",), timeout=3.0))
    assert registered == {"spec": SPEC, "rank": 1, "serve": True}
    assert world.below.announced == [("token", 3.0)]
    assert world.port.spec is SPEC
    assert world.port.cache is cast(Cache, world.below)
    with pytest.raises(WrongState, match="already registered"):
        world.port.register({})
    assert len(world.below.registered) == 1
    world.port.close()
    assert world.below.closed == 1


def test_a_port_whose_registration_failed_is_unchanged(world: World) -> None:
    below = Below()
    below.refusal = LimitReached("no thread")
    port = WorkerPort(Clients(below), SPEC)
    for call in (lambda: port.cache, lambda: port.start(grant()), port.prepare, lambda: port.warm("reference")):
        with pytest.raises(WrongState, match=r"call WorkerPort\.register first"):
            call()
    port.cancel("nobody's")
    port.close()
    with pytest.raises(LimitReached):
        port.register({})
    below.refusal = None
    port.register({})
    port.prepare()
    assert below.prepared == 1
    assert cast(Any, port.warm("reference", timeout=4.0)) == ("reference", 4.0)


def test_a_share_reads_granted_blocks_into_attached_blocks(world: World) -> None:
    asked = grant()
    before = now()
    world.port.start(asked, tails=Tails.ZERO)
    after = now()
    world.port.start(grant("two"))
    first, second = world.below.started
    assert (first.read_id, first.request_id, first.home) == ("one", "request one", HOME)
    assert (first.engine_id, first.incarnation, first.publication) == ("prefill", b"i" * 16, 7)
    assert (first.reference, first.lease.lease_id, first.wanted.tails) == ("reference", b"l" * 16, Tails.ZERO)
    assert before + 60.0 <= first.deadline <= after + 60.0
    assert [blocks["full"].ids.tolist() for blocks in (first.granted.blocks, first.wanted.blocks)] == [[3, 4], [20, 7]]
    assert (first.wanted.tokens, second.wanted.tails) == ((16, 32), Tails.KEEP)
    # Its time may be over: then it ends so.
    world.port.start(grant("three", timeout=0.0))
    assert world.port.running() == 3


def test_a_read_that_cannot_be_started_is_refused_and_may_be_started_again(world: World) -> None:
    given = {field.name: getattr(grant(), field.name) for field in fields(Offer)}
    with pytest.raises(WrongState, match="attach"):
        world.port.start(cast(Grant, Offer(**given)))
    # As an offer becomes that a worker decodes as a grant.
    with pytest.raises(WrongState, match="attach"):
        world.port.start(replace(grant(), local=(), tokens=None))
    with pytest.raises(InvalidField, match=r"grant is .*expected the Grant"):
        world.port.start(cast(Grant, "grant"))
    with pytest.raises(InvalidField, match=r"tails is .*expected a Tails"):
        world.port.start(grant(), tails=cast(Tails, "zero"))
    with pytest.raises(InvalidField, match="timeout"):
        world.port.start(grant(timeout=-1.0))
    world.below.refusal = Closed("the cache is closed")
    with pytest.raises(Closed):
        world.port.start(grant())
    world.below.refusal = None
    assert world.port.running() == 0
    world.port.start(grant())
    assert world.port.running() == 1


def test_a_read_is_started_once(world: World) -> None:
    world.port.start(grant())

    def refused() -> None:
        with pytest.raises(WrongState, match="start each grant once"):
            world.port.start(grant())

    refused()
    world.end("one")
    assert world.port.running() == 0
    refused()
    (end,) = world.port.finished().ended
    assert end.read_id == "one"
    # However often a grant comes.
    refused()
    refused()
    assert len(world.below.started) == 1


def test_ended_reads_are_remembered_up_to_a_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine.worker.MAX_DONE", 2)
    for read_id in ("one", "two", "three"):
        world.port.start(grant(read_id))
        world.end(read_id)
        world.port.finished()
    for read_id in ("two", "three"):
        with pytest.raises(WrongState, match="start each grant once"):
            world.port.start(grant(read_id))
    # The one that is forgotten is the oldest.
    world.port.start(grant("one"))


def test_events_are_returned_again_until_they_are_acknowledged(world: World) -> None:
    for read_id in ("one", "two", "three"):
        world.port.start(grant(read_id))
    world.end("one")
    failed = world.end("two", TransferFailed("the peer died", peer="prefill"), quiet=False)
    output = world.port.poll()
    assert world.port.poll() == output
    (good,), (bad,) = output.ended, output.failed
    assert (output.rank, output.quiesced) == (1, ())
    assert good == RankEnd("one", "request one", ok=True, quiet=True, bytes=10)
    assert (bad.ok, bad.quiet, bad.lost) == (False, False, {"full": (20, 7)})
    assert isinstance(bad.error(), TransferFailed)
    assert (bad.error_name, bad.message) == ("TransferFailed", "the peer died")
    assert dict(bad.values) == {"peer": "prefill"}
    world.end("three")
    world.quiesce(failed)
    # Only what was seen is forgotten.
    world.port.acknowledge(output)
    world.port.acknowledge(output)
    later = world.port.poll()
    assert ([end.read_id for end in later.ended], later.failed, later.quiesced) == (["three"], (), ("two",))
    assert world.port.finished() == later
    assert world.port.finished() == WorkerOutput(1)
    assert world.port._reads == {}
    with pytest.raises(WrongState, match="start each grant once"):
        world.port.start(grant("two"))
    with pytest.raises(InvalidField, match=r"output is .*expected a WorkerOutput"):
        world.port.acknowledge(cast(WorkerOutput, "output"))
    # An unknown report does no harm.
    world.port.acknowledge(WorkerOutput(1, (replace(good, read_id="unknown"),), (), ("nobody's",)))
    world.port.start(grant("unknown"))


def test_a_share_is_known_until_it_is_quiet(world: World) -> None:
    world.port.start(grant())
    failed = world.end("one", TransferFailed("the peer died"), quiet=False)
    assert [end.quiet for end in world.port.finished().failed] == [False]
    assert list(world.port._reads) == ["one"]
    world.quiesce(failed)
    assert world.port.finished().quiesced == ("one",)
    assert world.port._reads == {}


def test_a_cancel_reaches_the_share_of_its_read(world: World) -> None:
    for read_id in ("one", "two"):
        world.port.start(grant(read_id))
    world.port.cancel("two")
    world.port.cancel("nobody's")
    assert [read.order.read_id for read in world.below.cancelled] == ["two"]
    with pytest.raises(InvalidField, match="read_id is 3, expected a string"):
        world.port.cancel(cast(str, 3))


class Recorder:
    """Takes every call, and answers with what a test put there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            return self.answers.get(name)

        return call

    def last(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return self.calls.pop()


class Scheduler:
    """A scheduler's port above recorders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.publishing, self.holder = Recorder(), Recorder(), Recorder()
        self.made: list[tuple[Any, ...]] = []
        heard: list[object] = []
        self.token = SimpleNamespace(engine_reference="engine")
        vars(self.publishing).update(spec=SPEC, token=self.token, on_question=heard.append)
        vars(self.publishing).update(block_use=SimpleNamespace(writes=lambda: "writes"))
        vars(self.reads).update(news=SimpleNamespace(tell="told"))
        self.heard = heard
        session = SimpleNamespace(_session=self.publishing)

        def made(*arguments: Any, **options: Any) -> Recorder:
            self.made.append((*arguments, options))
            return self.reads

        monkeypatch.setattr("kvferry.engine.scheduler.Reads", made)
        runtime = SimpleNamespace(loop="loop", lease_holder=lambda _: self.holder, reads="meter")
        monkeypatch.setattr("kvferry.engine.scheduler.client_runtime_of", lambda _: runtime)
        self.below = SimpleNamespace(register_cache=None, open_engine=lambda *_, **__: session)

    def port(self, **options: Any) -> SchedulerPort:
        return SchedulerPort(Clients(self.below), SPEC, **options)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return Scheduler(monkeypatch)


def test_a_scheduler_refuses_invalid_arguments(scheduler: Scheduler) -> None:
    port = scheduler.port(max_waiting=1, hold_until_quiet=True)
    options = {"hold_until_quiet": True, "meter": "meter"}
    assert scheduler.made == [("loop", SPEC, scheduler.holder, "writes", 1, options)]
    assert (port.spec, cast(Any, port.token), port.engine_reference) == (SPEC, scheduler.token, "engine")
    for wrong in ({"max_waiting": 0}, {"max_waiting": "1"}, {"hold_until_quiet": "no"}):
        with pytest.raises(InvalidField, match=next(iter(wrong))):
            scheduler.port(**wrong)
    most = 2**31 - 1
    scheduler.holder.answers["request"] = "a request"
    for count in (0, 1, most):
        port.acquire("mine", "reference", expected_reads=count, timeout=5.0)
        assert scheduler.reads.last() == ("acquire", ("mine", "a request"), {})
        terms = ReadTerms(5.0, expected_reads=count)
        asked = {"request_id": "mine", "parties": SPEC.num_ranks}
        assert scheduler.holder.last() == ("request", ("reference", terms), asked)
    for wrong_call in (
        lambda: port.acquire("mine", "reference", expected_reads=-1),
        lambda: port.acquire("mine", "reference", expected_reads=most + 1),
        lambda: port.acquire("mine", "reference", timeout=0.0),
        lambda: port.acquire(cast(str, 1), "reference"),
        lambda: port.granted(cast(str, 1)),
        lambda: port.cancel(cast(str, 1)),
        lambda: port.attach(cast(str, 1), LOCAL),
        lambda: port.attach("mine", cast(Any, [1])),
        lambda: port.attach("mine", LOCAL, allow_overlap=cast(bool, "no")),
        lambda: port.attach("mine", LOCAL, cast(Any, 3)),
        lambda: port.acquire("mine", "reference", prompt=cast(Prompt, [1, 2])),
        lambda: port.attach("mine", LOCAL, prompt=cast(Prompt, [1, 2])),
        lambda: port.collect(cast(WorkerOutput, "output")),
        lambda: port.abort(cast(Publication, 3)),
        lambda: port.close(-1.0),
    ):
        with pytest.raises(InvalidField):
            wrong_call()
    recorders = (scheduler.reads, scheduler.publishing, scheduler.holder)
    assert [recorder.calls for recorder in recorders] == [[], [], []]


def test_a_scheduler_passes_its_arguments_on(scheduler: Scheduler) -> None:
    port, reads, publishing = scheduler.port(), scheduler.reads, scheduler.publishing
    reads.answers = {"granted": "a grant", "attach": "a grant", "cancel": True, "cancels": ["one"]}
    assert (cast(Any, port.granted("mine")), reads.last()) == ("a grant", ("granted", ("mine",), {}))
    assert cast(Any, port.attach("mine", LOCAL, (1, 2), allow_overlap=True, prompt=PROMPT)) == "a grant"
    assert reads.last() == ("attach", ("mine", LOCAL, (1, 2)), {"allow_overlap": True, "prompt": PROMPT})
    assert (port.cancel("mine"), reads.last()) == (True, ("cancel", ("mine",), {}))
    port.decline("reference", prompt=PROMPT)
    assert reads.last() == ("decline", ("reference", PROMPT), {})
    port.collect(WorkerOutput(1))
    assert reads.last() == ("collect", (WorkerOutput(1),), {})
    assert port.cancels() == ["one"]
    publication = Publication(1, "mine", "reference")
    publishing.answers = {"publish": publication, "released": ["released"]}
    assert (
        port.publish(
            "mine",
            LOCAL,
            last=False,
            expected_reads=3,
            checksums=True,
            traceparent="of the request",
            prompt=PROMPT,
        )
        is publication
    )
    options: dict[str, Any] = {"last": False, "expected_reads": 3, "checksums": True, "traceparent": "of the request"}
    assert publishing.last() == ("publish", (Publish("mine", LOCAL, prompt=PROMPT, **options),), {})
    port.publish_more(publication, LOCAL, last=False, layers=["b", "a"], prompt=PROMPT)
    more = PublishMore(publication, LOCAL, last=False, layers=("a", "b"), prompt=PROMPT)
    assert publishing.last() == ("publish_more", (more,), {})
    port.abort(publication)
    assert publishing.last() == ("abort", (publication,), {})
    scheduler.holder.answers["request"] = "a request"
    port.ask("mine", "kvf1e.x", PROMPT, first_token=1, wait=0.5, timeout=5.0, progressive=True)
    assert reads.last() == ("acquire", ("mine", "a request"), {})
    _, (asked, terms), given = scheduler.holder.last()
    assert (asked.engine, asked.prompt, asked.first_token, asked.wait) == ("kvf1e.x", PROMPT, 1, 0.5)
    assert terms == ReadTerms(5.0, prompt=PROMPT, progressive=True)
    assert given == {"request_id": "mine", "parties": 2}
    question = Question(1, "kvf1.x", PROMPT, 0, "asker", 7.0)
    publishing.answers["questions"] = [question]
    assert port.questions() == [question]
    port.miss(question, MissReason.BUSY)
    assert publishing.last() == ("miss", (question, MissReason.BUSY), {})
    assert scheduler.heard == ["told"]
    assert cast(Any, port.released()) == ["released"]


def test_a_scheduler_counts_its_reads(scheduler: Scheduler) -> None:
    port = scheduler.port()
    scheduler.publishing.answers["pinned"] = 7
    # Refused reads are over.
    scheduler.reads.answers["stages"] = Counter({stage: count for count, stage in enumerate(ReadStage, 1)})
    assert port.stats() == SchedulerStats(pinned=7, waiting=1, granted=2, reading=4, judging=5, uncertain=6)


@pytest.mark.parametrize("number", ["pinned", "waiting", "granted", "reading", "judging", "uncertain"])
def test_an_engine_is_quiet_without_pins_and_reads(number: str) -> None:
    quiet = SchedulerStats(0, 0, 0, 0, 0, 0)
    assert quiet.quiet
    assert not replace(quiet, **{number: 1}).quiet


def test_a_schedulers_close_ends_all_parts_in_order(scheduler: Scheduler) -> None:
    port = scheduler.port()
    port.close(0.0)
    assert scheduler.reads.last() == ("close", (0.0,), {})
    assert scheduler.publishing.last() == ("close", (0.0,), {})
