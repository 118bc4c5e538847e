"""Requests whose prefix another engine may have: it is asked when they come, what it has is read, and the rest is
computed, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvferry import Blocks, EngineSession, MissReason
from kvferry.engine import ReadEnd
from kvferry.errors import PublicationTimeout
from kvferry.integrations.vllm.requests import PREFIX_SOURCE
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.testing import Fabric
from tests.integrations.vllm.played_reader import bound, counted, hinted, matched, scheduler_of
from tests.integrations.vllm.played_setup import TOKENS, prefill
from tests.support.waiting import until


@pytest.fixture
def source(fabric: Fabric) -> Any:
    with fabric.client() as client:
        yield prefill(client)


def test_engine_is_asked_for_what_is_lacking_when_the_request_comes(
    source: EngineSession, decode: Callable[..., ConnectorScheduler]
) -> None:
    scheduler = decode()
    bound(scheduler, TOKENS)
    request = hinted(source.engine_reference)
    scheduler.on_new_request(request)
    [question] = source.questions(timeout=5)
    assert question.prompt.token_ids.tolist() == [*range(4 * TOKENS + 1)]
    assert (question.first_token, question.asker) == (TOKENS, "decode")
    assert scheduler.matched_tokens(request, TOKENS) == (None, False)
    blocks = {"0": Blocks([3, 4], TOKENS, 3 * TOKENS)}
    source.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    # The rest is computed.
    assert matched(scheduler, request, TOKENS) == (2 * TOKENS, True)
    scheduler.allocated("reader", ([7, 1, 2, 5, 6],), 2 * TOKENS)
    [grant] = scheduler.step({}).starts
    assert grant.tokens == (TOKENS, 3 * TOKENS)
    assert {name: listed.ids.tolist() for name, listed in grant.local_blocks().items()} == {"0": [1, 2]}
    # When it has been read, or vLLM preempts it, nobody is asked again.
    assert scheduler.matched_tokens(request, 0) == (0, False)
    assert counted(scheduler) == {"prefixes_asked": 1}


@pytest.mark.parametrize("computed", [3 * TOKENS, 4 * TOKENS])
def test_prefix_that_has_come_into_the_own_cache_meanwhile_is_not_read(
    source: EngineSession, decode: Callable[..., ConnectorScheduler], computed: int
) -> None:
    scheduler = decode()
    bound(scheduler)
    request = hinted(source.engine_reference)
    scheduler.on_new_request(request)
    [question] = source.questions(timeout=5)
    blocks = {"0": Blocks([3, 4, 5], 0, 3 * TOKENS)}
    source.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    assert matched(scheduler, request, computed) == (0, False)
    scheduler.allocated("reader", ([1],), 0)
    # The source need not wait until nobody comes.
    until(lambda: bool(source.released()))
    assert not scheduler._loads


def test_a_smaller_own_cache_than_said_is_computed(
    source: EngineSession, decode: Callable[..., ConnectorScheduler]
) -> None:
    """What the request found when it came was evicted since: the answer does not have it."""
    scheduler = decode()
    bound(scheduler, 2 * TOKENS)
    request = hinted(source.engine_reference)
    scheduler.on_new_request(request)
    [question] = source.questions(timeout=5)
    blocks = {"0": Blocks([5], 2 * TOKENS, 3 * TOKENS)}
    source.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    assert matched(scheduler, request, TOKENS) == (0, False)


@pytest.mark.parametrize("answers", [True, False], ids=["miss", "silence"])
def test_miss_is_computed(source: EngineSession, decode: Callable[..., ConnectorScheduler], *, answers: bool) -> None:
    scheduler = decode()
    bound(scheduler)
    request = hinted(source.engine_reference)
    scheduler.on_new_request(request)
    if answers:
        [question] = source.questions(timeout=5)
        source.miss(question, MissReason.NOT_CACHED)
    assert matched(scheduler, request) == (0, False)
    scheduler.allocated("reader", ([1],), 0)
    assert not scheduler._loads
    assert counted(scheduler) == {"prefixes_asked": 1, "prefixes_missed": 1}
    assert scheduler.finished(request, ([1],)) is None


@pytest.mark.parametrize("hit", [True, False])
def test_of_equal_prompts_one_is_asked_for(
    source: EngineSession, decode: Callable[..., ConnectorScheduler], *, hit: bool
) -> None:
    """The samples of a prompt: the others find its blocks in vLLM's prefix cache, or all compute them."""
    scheduler = decode()
    bound(scheduler)
    first, second, longer = (
        hinted(source.engine_reference, tokens, request_id)
        for tokens, request_id in ((9, "0_mine"), (9, "1_mine"), (10, "another"))
    )
    for request in (first, second, longer):
        scheduler.on_new_request(request)
    asked = source.questions(timeout=5)
    until(lambda: asked.extend(source.questions()) or len(asked) == 2)  # type: ignore[func-returns-value]
    question, other = sorted(asked, key=lambda each: len(each.prompt))
    assert [len(question.prompt), len(other.prompt)] == [9, 10]
    assert scheduler.matched_tokens(second, 0) == (None, False)
    if not hit:
        source.miss(question, MissReason.NOT_CACHED)
        assert matched(scheduler, first) == (0, False)
    else:
        blocks = {"0": Blocks([3, 4], 0, 2 * TOKENS)}
        source.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
        assert matched(scheduler, first) == (2 * TOKENS, True)
        scheduler.allocated("0_mine", ([1, 2, 5],), 2 * TOKENS)
        [grant] = scheduler.step({}).starts
        assert scheduler.matched_tokens(second, 0) == (None, False)
        scheduler._ends.append(ReadEnd("0_mine", grant.read_id, None, True, 0, 0))
        scheduler.step({})
        # Not before vLLM has taken the blocks for its cache, which it has when it computes the first.
        assert scheduler.matched_tokens(second, 0) == (None, False)
        scheduler.allocated("0_mine", ([1, 2, 5],), 0)
    assert scheduler.matched_tokens(second, 0) == (0, False)
    assert scheduler.matched_tokens(longer, 0) == (None, False)
    assert counted(scheduler)["prefixes_asked"] == 2


def test_request_does_not_wait_for_ever_for_another_of_its_prompt(
    source: EngineSession, decode: Callable[..., ConnectorScheduler]
) -> None:
    """vLLM may never come to the other one: it has less priority, or its grammar is not there."""
    scheduler = decode()
    bound(scheduler)
    first, urgent = (hinted(source.engine_reference, 9, request_id) for request_id in ("first", "urgent"))
    scheduler.on_new_request(first)
    scheduler.on_new_request(urgent)
    assert scheduler.matched_tokens(urgent, 0) == (None, False)
    scheduler._loads["urgent"].until = 0.0
    assert scheduler.matched_tokens(urgent, 0) == (0, False)
    scheduler.allocated("urgent", ([1],), 0)
    assert scheduler._loads.is_led(scheduler._loads["first"].reference)


@pytest.mark.parametrize("hint", ["nonsense", "kvf1e.nonsense", "kvf1.abc"])
def test_damaged_hint_is_computed(decode: Callable[..., ConnectorScheduler], hint: str) -> None:
    scheduler = decode()
    bound(scheduler)
    request = hinted(hint)
    scheduler.on_new_request(request)
    assert scheduler.matched_tokens(request, 0) == (0, False)
    assert counted(scheduler) == {"prefixes_asked": 1, "prefixes_missed": 1}


@pytest.mark.parametrize(
    ("own", "more"),
    [
        (4 * TOKENS, {}),
        (0, {"cache_salt": "tenant"}),
        (0, {"skip_reading_prefix_cache": True}),
        (0, {"abort_immediately": True}),
        (0, {"prompt_embeds": object()}),
        (0, {"kv_transfer_params": {PREFIX_SOURCE: 7}}),
        (0, {"kv_transfer_params": {PREFIX_SOURCE: None}}),
    ],
    ids=["has-it", "salt", "prompt-logprobs", "notice", "embeddings", "no-text", "none"],
)
def test_nobody_is_asked_in_vain(
    source: EngineSession, decode: Callable[..., ConnectorScheduler], own: int, more: dict[str, Any]
) -> None:
    scheduler = decode()
    bound(scheduler, own)
    request = hinted(source.engine_reference)
    vars(request).update(more)
    scheduler.on_new_request(request)
    assert scheduler.matched_tokens(request, own) == (0, False)
    assert counted(scheduler) == {}


def test_engine_does_not_ask_itself(decode: Callable[..., ConnectorScheduler]) -> None:
    scheduler = decode()
    bound(scheduler)
    scheduler.on_new_request(hinted(scheduler._port.engine_reference))
    assert counted(scheduler) == {}


@pytest.mark.parametrize("aborted", [False, True])
def test_read_that_fails_is_computed_whatever_the_policy(
    source: EngineSession, decode: Callable[..., ConnectorScheduler], *, aborted: bool
) -> None:
    """vLLM hears that the read has ended, and nothing of a failure."""
    scheduler = decode()
    cache = bound(scheduler)
    request = hinted(source.engine_reference)
    scheduler.on_new_request(request)
    [question] = source.questions(timeout=5)
    blocks = {"0": Blocks([3, 4, 5], 0, 3 * TOKENS)}
    source.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    assert matched(scheduler, request) == (3 * TOKENS, True)
    scheduler.allocated("reader", ([7, 1, 2, 5, 6],), 3 * TOKENS)
    [grant] = scheduler.step({}).starts
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    request.num_computed_tokens = 3 * TOKENS
    failed = PublicationTimeout("the source is gone", publication=1, timeout=1.0)
    scheduler._ends.append(ReadEnd("reader", grant.read_id, failed, True, 0, 0, {"0": (7, 1, 2)}))
    step = scheduler.step({})
    assert step.received == {"reader"}
    assert not step.lost
    assert not step.failed
    assert request.num_computed_tokens == 3 * TOKENS
    if aborted:
        request.status = RequestStatus.FINISHED_ABORTED
    scheduler.told({"reader", "another"})
    # Then vLLM looks for its blocks as for those of a new request; those of an aborted one it frees itself.
    assert request.num_computed_tokens == (3 * TOKENS if aborted else 0)
    assert cache.freed == ([] if aborted else ["reader"])
    assert scheduler.matched_tokens(request, 0) == (0, False)
    assert counted(scheduler)["failed"] == 1


def test_aborted_request_withdraws_its_question(
    source: EngineSession, decode: Callable[..., ConnectorScheduler]
) -> None:
    scheduler = decode()
    bound(scheduler)
    request = hinted(source.engine_reference)
    scheduler.on_new_request(request)
    [question] = source.questions(timeout=5)
    request.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(request, ([],)) is None
    assert not scheduler._loads
    until(lambda: not question.open)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("serves", [True, False])
def test_answer_names_the_engine_that_has_the_prompt_now(fabric: Fabric, *, asked: bool, serves: bool) -> None:
    from kvferry import EngineSpec
    from tests.integrations.vllm.played_setup import GROUP, setup_of

    setup = setup_of(fabric, EngineSpec("decode", (GROUP,)), serves=serves, caches_prefixes=True)
    scheduler = scheduler_of(setup)
    request = hinted("")
    if not asked:
        request.kv_transfer_params = {}
    request.status = RequestStatus.FINISHED_STOPPED
    assert scheduler.finished(request, ([1],)) == (
        {PREFIX_SOURCE: scheduler._port.engine_reference} if asked and serves else None
    )
    scheduler.close()
