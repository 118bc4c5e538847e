"""Steps in which vLLM computes nothing: who waits in them, and when vLLM hears of a read that has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.engine import Finished, ReadEnd, SchedulerPort
from kvferry.errors import TransferFailed
from kvferry.integrations.vllm.connector import KvferryConnector
from kvferry.integrations.vllm.idle_steps import ASLEEP, PATIENCE, YIELD, IdleSteps
from kvferry.integrations.vllm.loads import Load, Loads
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.integrations.vllm.stats import KvferryStats
from kvferry.integrations.vllm.worker import ConnectorWorker


class Port:
    """A scheduler's port with so many reads on the workers, and what it was asked."""

    def __init__(self, reading: int = 0) -> None:
        self.reading = reading
        self.waits: list[float] = []

    def stats(self) -> Any:
        return SimpleNamespace(reading=self.reading)

    def wait_news(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return False


def idle_steps(port: Port, depth: int | None = 1) -> IdleSteps:
    return IdleSteps(cast(SchedulerPort, port), depth)


def test_the_scheduler_waits_for_a_grant_or_a_verdict() -> None:
    port = Port()
    assert not idle_steps(port).begin(idle=True, reads=True, publishes=False, ready=False)
    assert port.waits == [PATIENCE]


def test_workers_wait_while_they_read() -> None:
    port = Port(reading=1)
    assert idle_steps(port).begin(idle=True, reads=True, publishes=False, ready=False)
    assert port.waits == []


@pytest.mark.parametrize(
    ("idle", "reads", "ready"),
    [(False, True, False), (True, False, False), (True, True, True)],
    ids=["computes", "has-no-reads", "has-something-to-say"],
)
def test_step_with_work_or_without_reads_does_not_wait(*, idle: bool, reads: bool, ready: bool) -> None:
    port = Port()
    assert not idle_steps(port).begin(idle=idle, reads=reads, publishes=False, ready=ready)
    assert port.waits == []


@pytest.mark.parametrize(("depth", "publishes"), [(None, False), (1, True)], ids=["lockstep", "publishes"])
def test_step_that_other_engines_wait_for_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, depth: int | None, *, publishes: bool
) -> None:
    """Data-parallel ranks run their steps together; a device says nothing when it has computed."""
    slept: list[float] = []
    monkeypatch.setattr("kvferry.integrations.vllm.idle_steps.time.sleep", slept.append)
    port = Port(reading=1)
    for _ in range(9):
        assert not idle_steps(port, depth).begin(idle=True, reads=True, publishes=publishes, ready=False)
    assert port.waits == []
    assert slept == [YIELD] * 9


@pytest.mark.parametrize(
    ("changed", "waits"),
    [
        ({}, True),
        ({"depth": None}, False),
        ({"idle": False}, False),
        ({"ready": True}, False),
        ({"holds": False}, False),
    ],
    ids=["alone", "lockstep", "computes", "has-something-to-say", "holds-none"],
)
def test_step_that_only_holds_publications_waits(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], *, waits: bool
) -> None:
    """In an engine that waits for its readers before it ends."""
    slept: list[float] = []
    monkeypatch.setattr("kvferry.integrations.vllm.idle_steps.time.sleep", slept.append)
    step: dict[str, Any] = {
        "depth": 1,
        "idle": True,
        "reads": False,
        "publishes": False,
        "ready": False,
        "holds": True,
        **changed,
    }
    idle_steps(Port(), step.pop("depth")).begin(**step)
    assert slept == [ASLEEP] * waits


def test_results_of_running_steps_are_not_delayed() -> None:
    """With two steps under way, the first idle one may be begun before a computing one has ended."""
    port = Port()
    steps = idle_steps(port, depth=2)
    for _ in range(2):
        steps.begin(idle=False, reads=True, publishes=False, ready=False)
        steps.begin(idle=True, reads=True, publishes=False, ready=False)
        assert port.waits == []
        # Steps without reads count, too.
        steps.begin(idle=True, reads=False, publishes=False, ready=False)
        assert port.waits == []
    port.reading = 1
    steps.begin(idle=False, reads=False, publishes=False, ready=False)
    assert not steps.begin(idle=True, reads=True, publishes=False, ready=False)
    assert steps.begin(idle=True, reads=True, publishes=False, ready=False)


@pytest.mark.parametrize(
    ("told", "running", "waits", "sleeps"), [(True, 1, 1, 0), (True, 0, 0, 1), (False, 1, 0, 0), (False, 0, 0, 0)]
)
def test_worker_in_a_waiting_step_waits_for_its_reads_or_yields(
    monkeypatch: pytest.MonkeyPatch, *, told: bool, running: int, waits: int, sleeps: int
) -> None:
    """A rank that is not announced yet has not begun the reads that the scheduler waits for."""
    slept: list[float] = []
    monkeypatch.setattr("kvferry.integrations.vllm.worker.time.sleep", slept.append)
    worker = ConnectorWorker.__new__(ConnectorWorker)
    port = Port()
    made: Any = worker
    made._port, made._lock, made._waits, made._asked = port, _Lock(), told, False
    made._news, made._fence, made._told = SimpleNamespace(outputs=[], registered=[], errors={}, now=None), None, 2**63
    made._port.running, made._port.finished = lambda: running, lambda: None
    worker.news()
    assert port.waits == [PATIENCE] * waits
    assert slept == [YIELD] * sleeps


class _Lock:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def ended(request_id: str, error: TransferFailed | None = None) -> ReadEnd:
    return ReadEnd(request_id, "read", error, True, 1, 8, {"0": (3,)} if error else {})


def connector(*ends: ReadEnd) -> tuple[KvferryConnector, ConnectorScheduler]:
    """A connector whose reads have ended like that since its last step."""
    scheduler: Any = ConnectorScheduler.__new__(ConnectorScheduler)
    left = [ends]
    scheduler._port = SimpleNamespace(finished=lambda: Finished(left.pop() if left else ()))
    scheduler._loads, scheduler._ends, scheduler._stats = Loads(), [], KvferryStats()
    for end in ends:
        scheduler._loads.add(end.request_id, Load("reference", 1e9, reading=True))
    made: Any = KvferryConnector.__new__(KvferryConnector)
    made._scheduler = scheduler
    return made, scheduler


@pytest.mark.parametrize("told", [None, {"other"}], ids=["first", "another"])
def test_good_read_is_reported_in_the_step_of_its_last_rank(told: set[str] | None) -> None:
    made, scheduler = connector(ended("r"))
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving=told, invalid_block_ids=set())
    made.update_connector_output(output)
    assert output.finished_recving == {"r", *(told or ())}
    assert not scheduler._loads
    assert scheduler.take_stats() is not None
    # Once only: vLLM ends the process at a request that it does not know.
    again = SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None, invalid_block_ids=set())
    made.update_connector_output(again)
    assert again.finished_recving is None


def test_a_failed_read_is_reported_by_the_workers_which_name_its_blocks() -> None:
    made, scheduler = connector(ended("bad", TransferFailed("lost")), ended("good"))
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None, invalid_block_ids=set())
    made.update_connector_output(output)
    assert output.finished_recving == {"good"}
    assert [end.request_id for end in scheduler._ends] == ["bad"]
    assert len(scheduler._loads) == 1
    assert scheduler._loads["bad"].reading
