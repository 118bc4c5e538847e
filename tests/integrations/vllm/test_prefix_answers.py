"""Questions of other engines, answered from vLLM's own prefix cache: what is found, when it is published, and for how
long its blocks are held."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvferry import EngineSpec, MissReason, Prompt, PromptInput
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.vllm.cached import MOST_HASHED
from kvferry.integrations.vllm.idle_steps import Engine
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.integrations.vllm.values import StepsDone, WorkerNews
from kvferry.testing import Fabric
from tests.integrations.vllm.played_cache import BLOCK, BLOCKS, FULL, STATES, WINDOW, Cache
from tests.integrations.vllm.played_source import TEXT, Source
from tests.support.waiting import until


@pytest.fixture
def source(fabric: Fabric) -> Callable[..., Source]:
    return lambda *specs, **options: Source(fabric, *specs, **options)


def ids(blocks: dict[str, Blocks] | MissReason, group: str = "full") -> list[int]:
    assert not isinstance(blocks, MissReason)
    return [int(block) for block in blocks[group].ids]


def noted(engine: Source, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that are hashed at a time from now on."""
    found: list[int] = []
    hashes = engine.cache.hash

    def note(lookup: Any) -> int:
        found.append(hashes(lookup))
        return found[-1]

    monkeypatch.setattr(engine.cache, "hash", note)
    return found


@pytest.mark.parametrize(
    ("asked", "first", "found"),
    [
        (range(100, 100 + 10 * BLOCK), 0, (0, 10)),
        # A prompt that goes on elsewhere, within a block and at the end of one.
        ([*TEXT[: 4 * BLOCK + 5], 7, 8, *range(5 * BLOCK)], 0, (0, 4)),
        ([*TEXT[: 4 * BLOCK], 7, 8, *range(5 * BLOCK)], 0, (0, 4)),
        ([*TEXT, *range(40)], 0, (0, 10)),
        (TEXT[: 3 * BLOCK + 1], 0, (0, 3)),
        # What the asker has itself; its blocks may be smaller.
        (TEXT, 2 * BLOCK, (2, 10)),
        (TEXT, 2 * BLOCK + 8, (2, 10)),
        (TEXT, 10 * BLOCK - 1, (9, 10)),
    ],
)
def test_answer_is_the_longest_cached_prefix(
    source: Callable[..., Source], asked: Sequence[int], first: int, found: tuple[int, int]
) -> None:
    engine = source()
    engine.compute(range(3 * BLOCK))
    [computed] = engine.compute(TEXT)
    blocks = engine.answer(asked, first)
    begin, end = found
    assert ids(blocks) == computed[begin:end]
    assert isinstance(blocks, dict)
    assert (blocks["full"].first_token, blocks["full"].end_token) == (begin * BLOCK, end * BLOCK)
    [(_, _, last, reference)] = engine.port.calls
    assert last == "last"
    assert reference.startswith("kvf1")
    assert engine.port.ends == [(len(asked),)]
    assert engine.counts == ["prefixes_published"]
    assert engine.used == end - begin


@pytest.mark.parametrize(
    ("asked", "first"), [(range(BLOCK), 0), ([*TEXT, 7], 10 * BLOCK), (TEXT[: BLOCK - 1], 0), ([3, *TEXT], 0)]
)
def test_nothing_behind_the_first_token_is_a_miss(
    source: Callable[..., Source], asked: Sequence[int], first: int
) -> None:
    engine = source()
    engine.compute(TEXT)
    assert engine.answer(asked, first) is MissReason.NOT_CACHED
    assert engine.used == 0
    assert not engine.sending.holding


def test_blocks_are_held_until_the_release_and_not_evicted(source: Callable[..., Source]) -> None:
    engine = source()
    [computed] = engine.compute(TEXT)
    assert ids(engine.answer(TEXT)) == computed
    assert engine.sending.holding
    # Others take all that is left.
    others = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    assert not {block.block_id for block in others} & set(computed)
    engine.pool.free_blocks(others)
    engine.release(1)
    assert not engine.sending.holding
    assert engine.used == 0


def test_blocks_are_published_when_the_step_that_computes_them_has_ended(source: Callable[..., Source]) -> None:
    """vLLM takes them for its prefix cache when it schedules that step."""
    engine = source()
    engine.schedule(TEXT)
    engine.ask(TEXT)
    assert engine.begin()
    assert engine.sending.waiting
    engine.ended(engine.step - 1)
    assert engine.port.calls == []
    engine.ended(engine.step)
    assert len(engine.port.calls) == 1
    # Later questions for them wait for nothing.
    engine.ask(TEXT)
    assert engine.answers.work()
    assert not engine.answers.waiting
    assert not engine.sending.waiting
    assert len(engine.port.calls) == 2


def test_adapter_is_looked_up_by_its_name(source: Callable[..., Source]) -> None:
    engine = source()
    assert engine.answer(TEXT, adapter="poet") is MissReason.UNSUPPORTED
    [poet] = engine.compute(TEXT, "poet")
    assert engine.answer(TEXT) is MissReason.NOT_CACHED
    [plain] = engine.compute(TEXT)
    assert ids(engine.answer(TEXT, adapter="poet")) == poet
    assert ids(engine.answer(TEXT)) == plain


def test_images_are_looked_up_by_their_identifiers(source: Callable[..., Source]) -> None:
    def image(name: str, offset: int) -> Any:
        return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 20))

    engine = source()
    features = [image("cat", 5), image("dog", 3 * BLOCK)]
    [computed] = engine.compute(TEXT, mm_features=features)
    cat, dog = PromptInput(5, 20, "cat"), PromptInput(3 * BLOCK, 20, "dog")
    assert ids(engine.answer(TEXT, inputs=[cat, dog])) == computed
    assert ids(engine.answer(TEXT, inputs=[cat, PromptInput(3 * BLOCK, 20, "cow")])) == computed[:3]
    assert engine.answer(TEXT) is MissReason.NOT_CACHED
    numbered = source(names_inputs=False)
    assert numbered.answer(TEXT, inputs=[cat, dog]) is MissReason.UNSUPPORTED


def test_windows_are_published_from_where_the_next_token_sees(source: Callable[..., Source]) -> None:
    """All groups of the model end at the same token, and the asker computes the last token itself."""
    engine = source(FULL, WINDOW)
    whole, window = engine.compute(TEXT)
    blocks = engine.answer([*TEXT, 1])
    assert isinstance(blocks, dict)
    assert ids(blocks) == whole
    found = blocks["window-32"]
    assert (found.first_token, found.end_token) == (8 * BLOCK, 10 * BLOCK)
    assert ids(blocks, "window-32") == window[8:10]
    # The window's blocks before that are gone, or were never kept.
    assert engine.used == 10 + 2


def test_state_is_published_at_the_end_of_a_block_that_all_groups_have(source: Callable[..., Source]) -> None:
    """A state has seen exactly the tokens that are published: those before the token that the asker computes."""
    engine = source(FULL, STATES)
    engine.compute(TEXT[: 3 * BLOCK])
    whole, states = engine.compute(TEXT)
    # Of a prompt that ends there, the asker needs the state before: vLLM has kept none between.
    for asked, blocks, index in (([*TEXT, 1], 10, 9), (TEXT, 3, 2)):
        found = engine.answer(asked)
        assert isinstance(found, dict)
        assert ids(found) == whole[:blocks]
        assert (ids(found, "state-mamba2"), found["state-mamba2"].state_token) == ([states[index]], blocks * BLOCK)


def test_no_more_blocks_are_held_than_the_share(source: Callable[..., Source]) -> None:
    engine = source(share=12 / BLOCKS)
    engine.compute(TEXT)
    [other] = engine.compute(range(1000, 1000 + 2 * BLOCK))
    [more] = engine.compute(range(2000, 2000 + 3 * BLOCK))
    assert isinstance(engine.answer(TEXT), dict)
    # The same blocks again, for another asker.
    assert isinstance(engine.answer(TEXT), dict)
    assert engine.answer(range(2000, 2000 + 3 * BLOCK)) is MissReason.BUSY
    assert ids(engine.answer(range(1000, 1000 + 2 * BLOCK))) == other
    for number in (1, 2):
        engine.release(number)
    assert ids(engine.answer(range(2000, 2000 + 3 * BLOCK))) == more


@pytest.mark.parametrize("options", [{"serves": False}, {"caches_prefixes": False}, {"share": 0.0}])
def test_engine_that_cannot_answer_says_so(source: Callable[..., Source], options: dict[str, Any]) -> None:
    engine = source(**options)
    engine.compute(TEXT)
    assert not engine.answers.possible
    assert isinstance(engine.answer(TEXT), MissReason)


def test_a_step_hashes_a_bounded_number_of_tokens(
    source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = source(share=1.0)
    text = range(BLOCKS // 2 * BLOCK)
    [computed] = engine.compute(text)
    hashed = noted(engine, monkeypatch)
    longer = [*text, *range(20 * MOST_HASHED)]
    for _ in range(8):
        engine.ask(longer)
    steps = 0
    while not steps or engine.answers.waiting:
        hashed.clear()
        engine.run()
        steps += 1
        assert sum(hashed) <= MOST_HASHED + 2048
    assert steps >= 8 * len(text) // MOST_HASHED // 2
    assert [ids(blocks) for blocks in engine.port.answers.values()] == [computed] * 8


def test_prompt_that_is_not_cached_is_hashed_no_further(
    source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = source()
    engine.compute(TEXT)
    hashed = noted(engine, monkeypatch)
    assert engine.answer(range(10**6, 10**6 + 200_000)) is MissReason.NOT_CACHED
    assert hashed == [2048]


def test_question_that_has_ended_is_not_answered(
    source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = source()
    hashed = noted(engine, monkeypatch)
    engine.schedule(TEXT)
    before, found = engine.ask(TEXT), engine.ask(TEXT)
    before.open = False
    engine.begin()
    assert hashed == [len(TEXT)]
    held = engine.used
    found.open = False
    engine.ended(1)
    assert engine.port.calls == []
    assert not engine.sending.waiting
    assert held == engine.used == 10
    assert max(block.ref_cnt for block in engine.pool.blocks[1:]) == 1


def test_answers_with_blocks_that_another_connector_lost_are_withdrawn(source: Callable[..., Source]) -> None:
    engine = source()
    [first] = engine.compute(TEXT)
    [second] = engine.compute(range(5 * BLOCK))
    engine.answer(TEXT)
    engine.ask(range(5 * BLOCK))
    engine.begin()
    engine.sending.lost([first[3]])
    assert engine.port.calls[-1] == ("abort", 1)
    assert engine.sending.waiting
    engine.sending.lost([second[3]])
    assert not engine.sending.waiting
    assert engine.port.misses == {2: MissReason.NOT_CACHED}
    engine.release(1)
    assert engine.used == 0


def test_answer_that_the_port_refuses_frees_its_blocks(source: Callable[..., Source]) -> None:
    from kvferry.errors import Closed

    engine = source()
    engine.compute(TEXT)
    engine.port.refuses = Closed("the session has ended")
    engine.ask(TEXT)
    engine.run()
    assert engine.used == 0
    assert not engine.sending.waiting
    assert not engine.sending.holding


@pytest.mark.parametrize(
    "specs", [(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, STATES)], ids=["full", "windows", "window", "states"]
)
def test_answers_hold_the_asked_prompt_and_no_other(source: Callable[..., Source], specs: tuple[Any, ...]) -> None:
    """Prompts that branch, with inputs, while others are computed and evicted; what a block holds is noted here."""
    engine = source(*specs, share=1.0)
    generator = random.Random(len(specs))
    held: dict[int, list[Any]] = {}
    answered = 0

    def text() -> tuple[list[int], list[PromptInput]]:
        """A prompt of blocks that are each of three kinds, some with an image in their midst."""
        kinds = [generator.randrange(3) for _ in range(generator.randrange(1, 40))]
        tokens = [kind for kind in kinds for _ in range(BLOCK)][: -generator.randrange(1, BLOCK)]
        places = generator.sample(range(len(kinds)), generator.randrange(min(3, len(kinds))))
        return tokens, [PromptInput(BLOCK * place + 3, 4, generator.choice("ab")) for place in sorted(places)]

    def contents(tokens: Sequence[int], inputs: Sequence[PromptInput], end: int) -> list[Any]:
        return [*tokens[:end], *((each.offset, each.identifier) for each in inputs if each.offset < end)]

    for _ in range(150):
        tokens, inputs = text()
        features = [
            MultiModalFeatureSpec(None, "image", each.identifier, PlaceholderRange(each.offset, each.length))
            for each in inputs
        ]
        for listed in engine.compute(tokens, mm_features=features):
            for index, block in enumerate(listed):
                if block and (index + 1) * BLOCK <= len(tokens):
                    held[block] = contents(tokens, inputs, (index + 1) * BLOCK)
        asked, inputs = (tokens, inputs) if generator.random() < 0.5 else text()
        asked = [*asked, *(generator.randrange(3) for _ in range(generator.randrange(50)))]
        found = engine.answer(asked, generator.randrange(len(asked)), inputs=inputs)
        if isinstance(found, MissReason):
            continue
        answered += 1
        for blocks in found.values():
            if blocks.state_token:
                assert held[int(blocks.ids[0])] == contents(asked, inputs, blocks.state_token)
                continue
            for index, block in enumerate(blocks.ids.tolist()):
                assert held[block] == contents(asked, inputs, blocks.first_token + (index + 1) * BLOCK)
        engine.release(engine.port.number)
        assert engine.used == 0
    assert answered > 20


def test_question_costs_a_lookup_of_vllms_own_hashes(source: Callable[..., Source]) -> None:
    """The hashes of a question are those of a request with the same prompt."""
    engine = source()
    request = engine.request(TEXT, "poet")
    lookup = engine.cache.lookup(Prompt(list(TEXT), adapter="poet"))
    assert lookup is not None
    while not lookup.known:
        engine.cache.hash(lookup)
    assert lookup.block_hashes == request.block_hashes[: len(lookup.block_hashes)] != []


def test_engine_without_requests_is_woken_by_a_question(fabric: Fabric) -> None:
    """vLLM looks for work then, and runs steps until the devices have ended what is published."""
    cache = Cache(fabric)
    cache.compute(TEXT)
    woken = threading.Event()
    engine = SimpleNamespace(wake=woken.set, paused=lambda: False)
    scheduler = ConnectorScheduler(cache.setup, cache.cache, cast(Engine, engine))
    scheduler._registered = {0}
    scheduler.step({"r1": len(TEXT)})
    assert not scheduler.has_work()
    with fabric.client() as client:
        worker = WorkerPort(client, cache.setup.spec, 0)
        worker.register_memory({"0": torch.zeros((BLOCKS, BLOCK, 16), dtype=torch.uint8)})
        worker.announce(str(scheduler._port.token))
        reader = SchedulerPort(client, EngineSpec("reader", cache.setup.spec.groups))
        reader.ask("mine", scheduler._port.engine_reference, Prompt(list(TEXT)), wait=2.0)
        assert woken.wait(5)
        assert scheduler.has_work()
        assert scheduler.step({}).asks
        assert reader.granted("mine") is None
        scheduler.collect(WorkerNews(steps={0: StepsDone(1, 1)}))
        assert not scheduler.step({}).asks
        until(lambda: reader.granted("mine") is not None)
        assert cache.used == 10
        reader.cancel("mine")

        def freed() -> bool:
            scheduler.has_work()
            return cache.used == 0

        until(freed)
        assert not scheduler.has_work()
    stats = scheduler.take_stats()
    assert stats is not None
    assert stats.data == {"prefixes_published": 1}
    scheduler.close()
