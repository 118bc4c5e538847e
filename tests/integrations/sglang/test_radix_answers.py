"""Questions of other engines, answered from SGLang's own radix caches: what is found, when it is published, for how
long SGLang keeps it, and that all ranks do the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry import EngineSpec, Prompt, PromptInput, Question
from kvferry.engine import SchedulerPort
from kvferry.errors import PrefixMiss
from kvferry.integrations.sglang import answers
from kvferry.integrations.sglang.answers import keeps_pages
from kvferry.testing import Fabric
from tests.integrations.sglang.played_radix import PAGE, PAGES, WINDOW, Asker, Source, compute_in_parts, rows
from tests.support.waiting import until

TEXT = [*range(100, 100 + 10 * PAGE)]
CACHES = pytest.mark.parametrize("cache", ["radix", "python", "rust"])


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made


def missed(source: Source, asker: Asker, *asked: Any, **more: Any) -> str:
    with pytest.raises(PrefixMiss) as miss:
        source.serve(asker.ask(*asked, **more))
    assert not source.leader.answers.holding
    return str(miss.value.values["why"])


@CACHES
@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [
        (TEXT, 0, 10),
        ([*TEXT, 1, 2, 3], 0, 10),
        # Prompts that go on elsewhere: within a page, and at the end of one.
        ([*TEXT[: 4 * PAGE + 3], 7, 8], 0, 4),
        ([*TEXT[: 4 * PAGE], 7, 8, 9, 10], 0, 4),
        (TEXT[: 3 * PAGE + 1], 0, 3),
        # What the asker has itself.
        (TEXT, 2 * PAGE, 10),
        (TEXT, 10 * PAGE - 1, 10),
    ],
)
def test_answer_is_the_longest_cached_prefix(
    fabric: Fabric, cache: str, asked: Sequence[int], first: int, end: int
) -> None:
    source = Source(fabric, cache)
    source.compute(range(3 * PAGE))
    source.compute(TEXT[: 6 * PAGE])
    source.compute(TEXT)
    source.write()
    asker = Asker(fabric, source)
    result = source.serve(asker.ask(asked, first))
    assert (result.end_token, result.prompt) == (end * PAGE, "matched")
    theirs = source.memory.cached(TEXT)[first : end * PAGE]
    mine = torch.arange(PAGE + first, PAGE + end * PAGE)
    for read, wanted in zip(rows(asker.pools, mine), rows(source.memory.pools, theirs), strict=True):
        assert torch.equal(read, wanted)
    source.idle()


@CACHES
@pytest.mark.parametrize(
    ("asked", "first"), [(range(PAGE), 0), ([*TEXT, 7], 10 * PAGE), (TEXT[: PAGE - 1], 0), ([3, *TEXT], 0)]
)
def test_nothing_behind_the_first_token_is_a_miss(fabric: Fabric, cache: str, asked: Sequence[int], first: int) -> None:
    source = Source(fabric, cache)
    source.compute(TEXT)
    assert missed(source, Asker(fabric, source), asked, first) == "NOT_CACHED"


@CACHES
@pytest.mark.parametrize("namespace", [("tenant",), (None, "salt"), ("tenant", "salt")])
def test_prompt_with_a_namespace_of_its_own_is_not_found(fabric: Fabric, cache: str, namespace: Any) -> None:
    source = Source(fabric, cache)
    source.compute(TEXT, *namespace)
    assert missed(source, Asker(fabric, source), TEXT) == "NOT_CACHED"


def requested(adapter: str, **params: Any) -> Any:
    sampling = SimpleNamespace(custom_params=params or None)
    return SimpleNamespace(lora_id=f"id of {adapter}", sampling_params=sampling, customized_info=None)


def test_adapter_is_looked_up_by_its_name_once_a_request_had_it(fabric: Fabric) -> None:
    source = Source(fabric)
    asker = Asker(fabric, source)
    source.compute(TEXT, "id of poet")
    assert missed(source, asker, TEXT, adapter="poet") == "UNSUPPORTED"
    source.leader.manager.see(requested("poet"), "poet")
    assert source.serve(asker.ask(TEXT, adapter="poet")).end_token == 10 * PAGE
    source.idle()
    assert missed(source, asker, TEXT) == "NOT_CACHED"


def test_answer_to_a_request_that_asks_for_it_has_the_engine_reference(fabric: Fabric) -> None:
    manager = Source(fabric, ranks=2).leader.manager
    for params, told in (({}, None), ({"kvferry_prefix_source": None}, [manager.port.engine_reference])):
        request = requested("", **params)
        manager.see(request, "")
        assert (request.customized_info or {}).get("kvferry_prefix_source") == told
    assert manager.adapters == {}


@pytest.mark.parametrize(("offset", "end"), [(6 * PAGE + 1, 6), (10 * PAGE, 10)])
def test_prompt_is_looked_up_as_far_as_its_first_image(fabric: Fabric, offset: int, end: int) -> None:
    """In its place, SGLang has a hash of its own."""
    source = Source(fabric)
    source.compute(TEXT)
    asker = Asker(fabric, source)
    image = PromptInput(offset, 3, "cat")
    assert source.serve(asker.ask([*TEXT, 0, 0, 0, 0], inputs=[image])).end_token == end * PAGE
    source.idle()
    assert missed(source, asker, [*TEXT, 0, 0, 0], inputs=[PromptInput(0, 3, "cat")]) == "NOT_CACHED"


@CACHES
def test_pages_are_kept_until_the_release_on_every_rank(fabric: Fabric, cache: str) -> None:
    """However much SGLang evicts; then they are evicted like others, on all ranks alike."""
    source = Source(fabric, cache, ranks=2)
    source.compute(TEXT)
    source.compute(range(PAGE))
    with fabric.hold_reads() as reads:
        read = Asker(fabric, source).ask(TEXT[: 5 * PAGE + 1])
        source.loop_until(lambda: reads.count)
        for rank in source.ranks:
            assert rank.answers.holding
            rank.memory.evict(PAGES * PAGE)
            assert len(rank.memory.cached(TEXT)) == 5 * PAGE
            assert rank.memory.free == (PAGES - 5) * PAGE
    assert source.serve(read).end_token == 5 * PAGE
    source.idle()
    for rank in source.ranks:
        assert rank.memory.tree.protected_size() == 0
        rank.memory.evict(PAGES * PAGE)
        assert rank.memory.free == PAGES * PAGE


@CACHES
def test_answer_that_nobody_reads_is_released(fabric: Fabric, cache: str) -> None:
    source = Source(fabric, cache)
    source.compute(TEXT)
    with fabric.hold_reads() as reads:
        read = Asker(fabric, source).ask(TEXT)
        source.loop_until(lambda: reads.count)
        fabric.advance(1)
        source.loop()
        assert source.leader.answers.holding
        read.cancel()
    fabric.advance(10)
    source.idle()
    assert source.memory.tree.protected_size() == 0


@pytest.mark.parametrize(("share", "busy"), [(0.5, False), (0.4, True)])
def test_no_more_than_a_share_of_the_pages_is_held(fabric: Fabric, share: float, busy: bool) -> None:
    """What several answers have in common is held once."""
    source = Source(fabric, share=share, ranks=2)
    source.compute(TEXT)
    source.compute(range(5 * PAGE))
    asker, other = Asker(fabric, source), Asker(fabric, source, "other")
    with fabric.hold_reads() as reads:
        first = asker.ask(TEXT)
        source.loop_until(lambda: reads.count == 1)
        second = other.ask(TEXT[: 8 * PAGE])
        source.loop_until(lambda: reads.count == 2)
        third = asker.ask(range(5 * PAGE), allow_overlap=True)
        source.loop_until(lambda: reads.count == 3 or third.done())
        assert busy == third.done()
        if busy:
            assert "BUSY" in str(third.exception(0))
    for read, end in ((first, 10), (second, 8), *([] if busy else [(third, 5)])):
        assert source.serve(read).end_token == end * PAGE
    source.idle()
    assert [rank.answers._holders.any() for rank in source.ranks] == [False, False]


@pytest.mark.parametrize("cache", ["radix", "python"])
@pytest.mark.parametrize(("chunked", "busy"), [(PAGES - 11, False), (PAGES - 10, True)])
def test_room_that_a_prompt_in_parts_needs_is_not_held(fabric: Fabric, cache: str, chunked: int, busy: bool) -> None:
    """SGLang would end without it: "Prefill out of memory"."""
    source = Source(fabric, cache, ranks=2)
    source.compute(TEXT)
    compute_in_parts(source.ranks, chunked)
    asker = Asker(fabric, source)
    if busy:
        assert missed(source, asker, TEXT) == "BUSY"
    else:
        asker.ask(TEXT)
        source.loop_until(lambda: source.leader.answers.holding)
    for rank in source.ranks:
        rank.memory.compute_part(chunked)
    source.idle()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_cache_that_cannot_be_held_answers_nothing(fabric: Fabric, share: float) -> None:
    """Such as one that moves pages to host memory and back while it has them in its tree."""
    source = Source(fabric, share=share)
    source.compute(TEXT)
    memory = source.memory
    assert keeps_pages(memory.tree)
    for changed in ({"cache_controller": object()}, {"linker": object()}, {"disable": True}):
        kept = {name: getattr(memory.tree, name) for name in changed}
        vars(memory.tree).update(changed)
        assert not keeps_pages(memory.tree)
        vars(memory.tree).update(kept)
    assert not keeps_pages(SimpleNamespace())
    if share == 0:
        assert missed(source, Asker(fabric, source), TEXT) == "UNSUPPORTED"


def test_paused_engine_holds_nothing_more_and_frees_what_it_holds(fabric: Fabric) -> None:
    source = Source(fabric, ranks=2)
    source.compute(TEXT)
    asker = Asker(fabric, source)
    with fabric.hold_reads() as reads:
        read = asker.ask(TEXT)
        source.loop_until(lambda: reads.count)
        for rank in source.ranks:
            rank.scheduler._engine_paused = True
    assert source.serve(read).end_token == 10 * PAGE
    source.idle()
    assert missed(source, asker, TEXT) == "BUSY"


def test_answer_is_published_when_the_batches_are_computed_that_were_under_way(fabric: Fabric) -> None:
    """SGLang takes what a batch computes into its cache before the device has computed it."""
    source = Source(fabric)
    source.compute(TEXT)
    computing = source.leader.scheduler.result_queue
    computing += [(None, "first"), (None, "second")]
    read = Asker(fabric, source).ask(TEXT)
    source.loop_until(lambda: source.leader.answers.holding)
    for _ in range(2):
        source.loop()
        assert source.published == 0
        computing.popleft()
    computing.append((None, "later"))
    source.loop()
    assert source.published == 1
    assert source.serve(read).end_token == 10 * PAGE
    source.idle()


def test_answer_is_given_up_if_its_question_ends_before_it_is_published(fabric: Fabric) -> None:
    source = Source(fabric, ranks=2)
    source.compute(TEXT)
    computing = source.leader.scheduler.result_queue
    computing.append((None, "first"))
    read = Asker(fabric, source).ask(TEXT)
    source.loop_until(lambda: source.leader.answers.holding)
    fabric.advance(3)
    with pytest.raises(PrefixMiss, match="was not answered in time"):
        source.serve(read)
    source.loop_until(lambda: not source.leader.answers._found[0].question.open)
    computing.clear()
    source.idle()
    assert source.published == 0


def test_answer_that_cannot_be_published_is_freed(fabric: Fabric) -> None:
    source = Source(fabric, ranks=2)
    source.compute(TEXT)
    source.leader.scheduler.result_queue.append((None, "first"))
    Asker(fabric, source).ask(TEXT)
    source.loop_until(lambda: source.leader.answers.holding)
    source.port.close()
    source.leader.scheduler.result_queue.clear()
    source.idle()


def test_step_looks_up_a_bounded_number_of_tokens(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_TOKENS", 2 * PAGE)
    source = Source(fabric)
    source.compute(TEXT)
    asker = Asker(fabric, source)
    reads = [asker.ask([seed, *TEXT[:PAGE]], allow_overlap=True) for seed in range(5)]
    asked: list[Question] = []

    def all_asked() -> bool:
        asked.extend(source.port.questions())
        return len(asked) == len(reads)

    until(all_asked)
    monkeypatch.setattr(source.port, "questions", lambda: [asked.pop() for _ in range(len(asked))])
    found = []
    while (step := source.loop()) is not None:
        found.append(len(step.lookups))
    assert found == [2, 2, 1]
    until(lambda: all(read.done() for read in reads))


@pytest.mark.parametrize(("first", "begin"), [(0, 0), (2 * PAGE + 1, 2), (10 * PAGE - 1, 9)])
def test_window_is_answered_with_pages_of_its_own(fabric: Fabric, first: int, begin: int) -> None:
    """The last ones, of as many tokens as the model looks back to."""
    source = Source(fabric, windows=True)
    source.compute(range(5 * PAGE))
    source.compute(TEXT)
    # Other pages than in full attention's pool.
    source.memory.allocator.swa_attn_allocator.alloc(PAGE)
    source.compute(range(500, 500 + 10 * PAGE))
    text = [*range(500, 500 + 10 * PAGE)]
    with fabric.client() as client, SchedulerPort(client, EngineSpec("reader", source.memory.pools.groups)) as port:
        port.ask("r", source.port.engine_reference, Prompt(text), first_token=first, wait=2.0)
        source.loop_until(port.news)
        offer = port.granted("r")
        assert offer is not None
        found = offer.blocks()
    theirs = source.memory.cached(text)
    windowed = source.memory.allocator.translate_swa_indices_for_transfer(theirs)
    seen = (10 * PAGE - WINDOW) // PAGE
    for name, slots, page in (("full", theirs, begin), (source.memory.pools.window, windowed, seen)):
        assert (found[name].first_token, found[name].end_token) == (page * PAGE, 10 * PAGE)
        assert found[name].ids.tolist() == (slots[::PAGE] // PAGE)[page:].tolist()
    assert not torch.equal(theirs, windowed)
    source.idle()
    assert source.memory.tree.full_protected_size() == source.memory.tree.swa_protected_size() == 0
