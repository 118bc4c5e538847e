"""Questions that no engine would ask, and answers that must not count."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from kvferry import EngineSpec, MissReason, Prompt
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import PrefixMiss
from kvferry.integrations.vllm.cached import MOST_HASHED
from kvferry.integrations.vllm.idle_steps import Engine
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.integrations.vllm.values import StepsDone, WorkerNews
from kvferry.testing import Fabric
from tests.integrations.vllm.played_cache import BLOCK, BLOCKS, FULL, STATES, WINDOW, Cache
from tests.integrations.vllm.played_source import TEXT, Source
from tests.support.waiting import until


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (FULL, STATES)], ids=["full", "window", "states"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("recomputed", [1, 3])
def test_prompt_shorter_than_what_an_asker_computes_itself_is_a_miss(
    fabric: Fabric, specs: tuple[object, ...], tokens: int, recomputed: int
) -> None:
    """A drafter of several modules computes the last tokens again, here more than the prompt has."""
    engine = Source(fabric, *specs, recomputed=recomputed)
    engine.compute(TEXT)
    assert engine.answer(TEXT[:tokens]) is MissReason.NOT_CACHED


def test_answer_that_was_computed_from_lost_blocks_is_not_published(fabric: Fabric) -> None:
    """Another connector could not load a block before the tokens that are asked for."""
    engine = Source(fabric)
    engine.schedule(TEXT)
    lost = engine.manager.get_block_ids(f"r{engine._number}")[0][1]
    question = engine.ask(TEXT, 5 * BLOCK)
    engine.begin()
    engine.sending.lost([lost])
    engine.ended(1)
    assert engine.port.calls == []
    assert engine.port.misses == {question.number: MissReason.NOT_CACHED}


class Unlisted(dict[int, Any]):
    """Answers that may be found by their numbers only."""

    def values(self) -> Any:
        raise AssertionError


def test_cost_of_an_answer_does_not_grow_with_those_that_are_held(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may hold its blocks for 10 s, and thousands of one beginning fit into the share."""
    engine = Source(fabric)
    engine.compute(TEXT)
    held: list[int] = []

    def noted(blocks: Sequence[Any]) -> None:
        held.append(len(blocks))
        BlockPool.touch(engine.pool, blocks)

    monkeypatch.setattr(engine.pool, "touch", noted)
    # None looks at the others.
    engine.sending._published = Unlisted()
    for _ in range(20):
        assert not isinstance(engine.answer(TEXT), MissReason)
    assert held == [10, *[0] * 19]
    assert engine.used == 10
    # The share counts each block once: 100 of 400 blocks.
    others = [range(begin, begin + 30 * BLOCK) for begin in (1000, 3000, 5000)]
    for other in others:
        engine.compute(other)
    assert not isinstance(engine.answer(others[0]), MissReason)
    assert not isinstance(engine.answer(others[1]), MissReason)
    assert not isinstance(engine.answer(others[2]), MissReason)
    assert engine.used == 100
    engine.compute(range(7000, 7000 + BLOCK))
    assert engine.answer(range(7000, 7000 + BLOCK)) is MissReason.BUSY
    for number in range(1, 21):
        engine.release(number)
        assert engine.used == (90 if number == 20 else 100)
    assert not isinstance(engine.answer(range(7000, 7000 + BLOCK)), MissReason)


def test_ended_questions_do_not_wait_behind_a_long_one(fabric: Fabric) -> None:
    """While steps run that hash a long prompt, an asker may withdraw and ask again, each time with 1 MiB."""
    engine = Source(fabric)
    engine.cache._whole = []
    engine.ask(range(4 * MOST_HASHED + 1))
    for _ in range(3):
        asked = [engine.ask(TEXT) for _ in range(4)]
        engine.begin()
        assert len(engine.answers._open) == 5
        for question in asked:
            question.open = False
    assert engine.port.calls == []


def test_prompts_are_copied_in_their_turn(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 may come at once, with 200,000 tokens each."""
    engine = Source(fabric)
    copied: list[Any] = []
    lookup = engine.cache.lookup
    monkeypatch.setattr(engine.cache, "lookup", lambda prompt: copied.append(prompt) or lookup(prompt))  # type: ignore[func-returns-value]
    for _ in range(64):
        engine.ask(range(MOST_HASHED))
    engine.run()
    assert len(copied) == 4


def test_engine_that_is_to_pause_holds_nothing_more(fabric: Fabric) -> None:
    """vLLM completes a pause when there is no work, and it is an error then if blocks are held."""
    cache = Cache(fabric)
    cache.compute(TEXT)
    paused: list[bool] = []
    engine = SimpleNamespace(wake=lambda: None, paused=lambda: bool(paused))
    scheduler = ConnectorScheduler(cache.setup, cache.cache, cast(Engine, engine))
    scheduler._registered = {0}
    scheduler.collect(WorkerNews(steps={0: StepsDone(1, 1)}))
    with fabric.client() as client:
        worker = WorkerPort(client, cache.setup.spec, 0)
        worker.register_memory({"0": torch.zeros((BLOCKS, BLOCK, 16), dtype=torch.uint8)})
        worker.announce(str(scheduler._port.token))
        reader = SchedulerPort(client, EngineSpec("reader", cache.setup.spec.groups))
        source = scheduler._port.engine_reference

        def asked(request_id: str) -> None:
            reader.ask(request_id, source, Prompt(list(TEXT)), wait=2.0)

        def answered() -> bool:
            return scheduler.has_work() and cache.used == 10

        asked("before")
        until(answered)
        paused.append(True)
        # However long vLLM asks, there is work while blocks are held.
        scheduler._rest._until = 0.0
        assert [scheduler.has_work() for _ in range(3)] == [True] * 3
        # Nor do others that ask meanwhile prolong that.
        asked("after")

        def refused() -> bool:
            scheduler.step({})
            try:
                return reader.granted("after") is not None
            except PrefixMiss as error:
                return "BUSY" in str(error)

        until(refused)
        reader.cancel("before")
        until(lambda: not scheduler.has_work())
        assert cache.used == 0
    scheduler.close()
