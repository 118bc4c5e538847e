"""The hooks in SGLang's loop: what rank 0 decides goes to all ranks with SGLang's requests, and held pages keep SGLang
from emptying its cache."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.utils import TypeBasedDispatcher

from kvferry.errors import PrefixMiss
from kvferry.integrations.sglang import hooks
from kvferry.integrations.sglang.answers import AnswerStep
from kvferry.integrations.sglang.hooks import (
    IS_IDLE,
    MAKES_HANDLERS,
    SENDS_TO_RANKS,
    UNLOADS,
    Waker,
    forget_adapter,
    is_idle,
    send_along,
)
from kvferry.integrations.sglang.registration import exchange_prefixes
from kvferry.testing import Fabric
from tests.integrations.sglang.played_radix import PAGE, Asker, Rank, Source
from tests.support.waiting import until

TEXT = [*range(100, 100 + 10 * PAGE)]


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made
    hooks.parts.clear()
    hooks.wakers.clear()


@pytest.fixture
def source(fabric: Fabric) -> Source:
    made = Source(fabric)
    made.compute(TEXT)
    return made


def hooked(monkeypatch: pytest.MonkeyPatch, *left_out: str) -> None:
    """Install the hooks on SGLang's methods, as SGLang installs a plug-in's."""
    ours: dict[str, list[Any]] = {
        MAKES_HANDLERS: [(HookType.AFTER, exchange_prefixes, None)],
        SENDS_TO_RANKS: [(HookType.BEFORE, send_along, None)],
        IS_IDLE: [(HookType.AFTER, is_idle, None)],
        UNLOADS: [(HookType.AFTER, forget_adapter, None)],
    }
    monkeypatch.setattr(Scheduler, "init_request_dispatcher", lambda _: None)
    for name in ours:
        owner, _, method = name.rpartition(".")
        found = pkgutil.resolve_name(owner)
        monkeypatch.setattr(found, method, getattr(found, method))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "_hooks", {name: each for name, each in ours.items() if name not in left_out})
    HookRegistry.apply_hooks()


def scheduler_of(rank: Rank, backend: str = "kvferry") -> Any:
    """As much of SGLang's scheduler of prefill as there is when its handlers are made."""
    scheduler: Any = rank.scheduler
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(
        kv_manager=rank.manager, transfer_backend=SimpleNamespace(value=backend)
    )
    scheduler._request_dispatcher = TypeBasedDispatcher([])
    scheduler.idle_sleeper = IdleSleeper([])
    return scheduler


def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """What all ranks get of what a rank has received, by SGLang's own method."""
    parallel = SimpleNamespace(attn_dp_enabled=False, tp_size=1)
    monkeypatch.setattr(f"{SchedulerRequestReceiver.__module__}.get_parallel", lambda: parallel)
    receiver: Any = object.__new__(SchedulerRequestReceiver)
    return lambda received: receiver._broadcast_reqs_across_ranks(received, ["abort"] if received else None)


def test_step_goes_to_the_ranks_with_requests_and_is_handled_as_one(
    fabric: Fabric, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked(monkeypatch)
    scheduler = scheduler_of(source.leader)
    Scheduler.init_request_dispatcher(scheduler)
    take = taken(monkeypatch)
    assert take(["request"]) == ["request", "abort"]
    # Ranks other than the first have received nothing.
    assert take(None) is None
    read = Asker(fabric, source).ask(TEXT)
    steps: list[AnswerStep] = []

    def answered() -> bool:
        for each in take([]):
            assert isinstance(each, AnswerStep)
            assert scheduler._request_dispatcher(each) is None
            steps.append(each)
        return read.done() and not hooks.parts[0].holding

    until(answered)
    assert read.result(0).end_token == 10 * PAGE
    assert [(len(step.lookups), len(step.freed)) for step in steps] == [(1, 0), (0, 1)]


def test_cache_is_not_emptied_while_pages_are_held(
    fabric: Fabric, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that waits comes after the release. A health check is about batches."""
    idle: Any = Scheduler.is_fully_idle
    monkeypatch.setattr(Scheduler, "is_fully_idle", lambda *_, **__: True)
    hooked(monkeypatch)
    assert idle is not Scheduler.is_fully_idle
    scheduler = scheduler_of(source.leader)
    exchange_prefixes(None, scheduler)
    hooks.parts[:] = [source.leader.answers]
    flushed: list[Any] = []
    emptied: list[bool] = []

    def empty() -> bool:
        emptied.append(True)
        return True

    wrapper = SchedulerFlushWrapper(
        flush_cache=empty,
        is_fully_idle=lambda: Scheduler.is_fully_idle(scheduler),
        send_output=lambda output, _: flushed.append(output.success),
    )
    with fabric.hold_reads() as reads:
        read = Asker(fabric, source).ask(TEXT)
        source.loop_until(lambda: reads.count)
        assert not Scheduler.is_fully_idle(scheduler, ignore_waiting=True)
        assert Scheduler.is_fully_idle(scheduler, for_health_check=True)
        assert wrapper.handle(FlushCacheReqInput(timeout_s=60.0)) is None
        wrapper.check_pending()
        assert not emptied
    source.serve(read)
    source.idle()
    wrapper.check_pending()
    assert (emptied, flushed) == ([True], [True])


def test_adapter_that_was_unloaded_is_not_looked_up(
    fabric: Fabric, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have its name since, and SGLang's cache still has what the first has computed."""
    monkeypatch.setattr(Scheduler, "unload_lora_adapter", lambda *_: "unloaded")
    hooked(monkeypatch)
    scheduler = scheduler_of(source.leader)
    source.compute(TEXT, "first id")
    request = SimpleNamespace(lora_id="first id", sampling_params=SimpleNamespace(custom_params=None))
    source.leader.manager.see(request, "sql")
    asker = Asker(fabric, source)
    assert source.serve(asker.ask(TEXT, adapter="sql")).end_token == 10 * PAGE
    source.idle()
    assert Scheduler.unload_lora_adapter(scheduler, SimpleNamespace(lora_name="sql")) == "unloaded"
    with pytest.raises(PrefixMiss, match="UNSUPPORTED"):
        source.serve(asker.ask(TEXT, adapter="sql"))
    Scheduler.unload_lora_adapter(SimpleNamespace(), SimpleNamespace(lora_name="sql"))


@pytest.mark.parametrize("left_out", [SENDS_TO_RANKS, IS_IDLE, UNLOADS, ""])
@pytest.mark.parametrize("backend", ["kvferry", "nixl"])
def test_questions_are_answered_only_with_all_hooks(
    source: Source, monkeypatch: pytest.MonkeyPatch, left_out: str, backend: str
) -> None:
    """SGLang only logs if a method that a plug-in hooks is not there."""
    hooked(monkeypatch, left_out)
    exchange_prefixes(None, scheduler_of(source.leader, backend))
    assert bool(hooks.parts) == (not left_out and backend == "kvferry")
    exchange_prefixes(None, SimpleNamespace())


def test_question_wakes_a_scheduler_that_sleeps(
    fabric: Fabric, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked(monkeypatch)
    scheduler = scheduler_of(source.leader)
    exchange_prefixes(None, scheduler)
    poller = scheduler.idle_sleeper.poller
    assert poller.poll(0) == []
    read = Asker(fabric, source).ask(TEXT)
    assert poller.poll(10_000)
    take = taken(monkeypatch)
    [step] = take([])
    assert len(step.lookups) == 1
    assert poller.poll(0) == []
    read.cancel()


def test_waker_wakes_also_what_is_about_to_sleep() -> None:
    sleeper = IdleSleeper([])
    waker = Waker(sleeper.poller)
    waker.clear()
    for _ in range(2):
        waker.wake()
        waker.wake()
        assert sleeper.poller.poll(0)
        waker.clear()
        assert sleeper.poller.poll(0) == []
