"""The end of a request in prefill: when it is published, its published tokens, and the end of its blocks if none can be
published.

vLLM's block pool is real; its scheduler and kvferry's port are played.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import Closed, KvferryError, RouterKeyUsed, WrongState
from kvferry.integrations.vllm.requests import REFERENCE
from tests.integrations.vllm.played_prefill import Prefill


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    engine = Prefill()
    yield engine
    engine.check_freed()


@pytest.mark.parametrize("fast", [0, 1])
@pytest.mark.parametrize("routed", [True, False])
def test_last_blocks_are_published_when_the_slowest_rank_has_computed_them(fast: int, *, routed: bool) -> None:
    prefill = Prefill(ranks=2)
    unrouted: dict[str, Any] = {} if routed else {"kvferry_reference": None}
    request = prefill.request("r", 7, **unrouted)
    first = prefill.step((request, 5))
    for rank in range(2):
        prefill.ended(first, rank)
    assert [call[:3] for call in prefill.port.take()] == ([("publish", {"full": (0, 4)}, "more")] if routed else [])
    last = prefill.step((request, 2))
    prefill.ended(last, fast)
    assert prefill.finish(request)
    # vLLM needs the reference now.
    assert prefill.port.take() == ([] if routed else [("publish", {}, "more", "")])
    assert prefill.sending.waiting
    prefill.ended(last, 1 - fast)
    assert prefill.port.take() == [("more", {"full": (4 if routed else 0, 7)}, "last", 1)]
    assert not prefill.sending.waiting
    prefill.release(1)
    prefill.check_freed()


def test_last_blocks_do_not_wait_until_vllm_has_ended_their_step(prefill: Prefill) -> None:
    """vLLM has finished the request, so the step has run."""
    request = prefill.request("r", 7)
    prefill.run(request, 5)
    prefill.port.take()
    last = prefill.step((request, 2))
    prefill.ended(last - 1, computed=last)
    assert prefill.finish(request)
    assert prefill.port.take() == [("more", {"full": (4, 7)}, "last", 1)]
    assert not prefill.sending.waiting
    prefill.release(1)


@pytest.mark.parametrize("error", [WrongState("publication 1 was released"), Closed("the session has ended")])
def test_publications_whose_blocks_are_refused_are_withdrawn(error: KvferryError) -> None:
    """Otherwise their blocks would be kept until their holds end, for readers that wait in vain."""
    prefill = Prefill(ranks=2)
    requests = [prefill.request(request_id, 6, kvferry_reference=None) for request_id in ("r", "s")]
    last = prefill.step(*((request, 6) for request in requests))
    for request in requests:
        assert prefill.finish(request)
    prefill.port.take()
    prefill.port.refuses = error
    prefill.ended(last, 0)
    assert prefill.port.take() == []
    prefill.ended(last, 1)
    assert prefill.port.take() == [("abort", 1), ("abort", 2)]
    assert not prefill.sending.waiting
    assert prefill.sums == []
    for number in (1, 2):
        prefill.release(number, outcome=ReleaseOutcome.ABORTED)
    prefill.check_freed()


def test_a_request_id_that_is_used_again_does_not_end_the_wait_of_the_first_request(prefill: Prefill) -> None:
    first = prefill.request("r", 6, kvferry_reference=None)
    step = prefill.step((first, 6))
    assert prefill.finish(first)
    second = prefill.request("r", 14)
    later = prefill.step((second, 9))
    prefill.port.take()
    prefill.ended(step)
    assert prefill.port.take() == [("more", {"full": (0, 6)}, "last", 1)]
    prefill.ended(later)
    assert [call[:2] for call in prefill.port.take()] == [("publish", {"full": (0, 8)})]
    prefill.finish(second, RequestStatus.FINISHED_ABORTED)
    for number in (1, 2):
        prefill.release(number)


@pytest.mark.parametrize("computed", [True, False], ids=["computed", "still-computed"])
def test_refused_rest_withdraws_the_published_parts(prefill: Prefill, *, computed: bool) -> None:
    """Readers get an error, and the blocks are free when the readers are done: not only when the hold ends."""
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    last = prefill.step((request, 5))
    if computed:
        prefill.ended(last)
    prefill.port.take()
    prefill.port.refuses = WrongState("publication 1 was released")
    params = prefill.finish(request)
    assert (params is None) == computed
    prefill.ended(last)
    assert prefill.port.take() == [("abort", 1)]
    prefill.release(1, outcome=ReleaseOutcome.ABORTED)


@pytest.mark.parametrize("known", [False, True], ids=["any-error", "key-is-used"])
def test_blocks_of_a_request_that_is_refused_at_its_end_are_free(prefill: Prefill, *, known: bool) -> None:
    """A prompt of one step is held and published when it has finished."""
    request = prefill.request("r", 6)
    prefill.run(request, 6)
    prefill.port.take()
    second = prefill.request("s", 3)
    prefill.port.refuses = RouterKeyUsed("publication 7 has the key") if known else WrongState("the session has ended")
    prefill.run(second, 3)
    assert prefill.finish(second) is None
    assert prefill.used == 2
    declined = [] if known else [("decline", second.kv_transfer_params[REFERENCE])]
    assert prefill.port.take() == declined
    prefill.finish(request, RequestStatus.FINISHED_ABORTED)
    prefill.release(1, outcome=ReleaseOutcome.ABORTED)


@pytest.mark.parametrize("routed", [True, False])
def test_a_token_that_was_computed_after_the_last_one_is_not_published(prefill: Prefill, *, routed: bool) -> None:
    """Asynchronous scheduling has run a step too many: the last token was sampled, and what its slot holds is not its
    KV cache."""
    unrouted: dict[str, Any] = {} if routed else {"kvferry_reference": None}
    request = prefill.request("r", 7, **unrouted)
    prefill.run(request, 7)
    prefill.run(request, 1)
    prefill.port.take()
    assert prefill.finish(request)
    [call] = prefill.port.take()
    assert call[1] == {"full": (4 if routed else 0, 7)}
    prefill.release(1)


@pytest.mark.parametrize("more", [-1, 1], ids=["token-too-few", "token-too-many"])
def test_a_state_of_another_token_than_the_last_but_one_is_not_published(more: int) -> None:
    prefill = Prefill(states=True)
    for count, published in ((7, True), (7 + more, False)):
        request = prefill.request("r", 7)
        prefill.run(request, count)
        assert (prefill.finish(request) is not None) == published
        number = prefill.port.number
        prefill.port.take()
        prefill.release(number)
    assert prefill.used == 0


@pytest.mark.parametrize(("drafts", "answer"), [(True, 1), (False, 2), (True, 2)])
def test_a_state_is_not_published_once_drafts_may_have_moved_it(answer: int, *, drafts: bool) -> None:
    """Drafts leave states in blocks of their own from the second token of an answer on, although all numbers fit."""
    prefill = Prefill(states=True, drafts=drafts)
    request = prefill.request("r", 7)
    for count in (7, 1)[:answer]:
        prefill.run(request, count)
    request.num_tokens, request.num_output_tokens = 7 + answer - 1, answer
    assert (prefill.finish(request) is not None) == (not drafts or answer == 1)
    prefill.release(prefill.port.number, outcome=ReleaseOutcome.ABORTED)
    prefill.check_freed()


@pytest.mark.parametrize("routed", [True, False])
def test_prompt_is_marked_with_the_first_blocks_and_generated_tokens_with_the_last(
    prefill: Prefill, *, routed: bool
) -> None:
    """Decode knows with the first part of a prompt whether it is its own."""
    unrouted: dict[str, Any] = {} if routed else {"kvferry_reference": None}
    request = prefill.request("r", 10, **unrouted)
    request.all_token_ids = list(range(13))
    for count in (5, 5, 1, 1):
        prefill.run(request, count)
    request.num_tokens, request.num_output_tokens = 12, 2
    assert prefill.finish(request)
    # The publication has 12 tokens: what was computed of the 13.
    assert prefill.port.ends == ([(10,), (), (10, 12)] if routed else [(10, 12)])
    prefill.release(1)


def test_a_publication_whose_blocks_come_later_is_marked_at_once(prefill: Prefill) -> None:
    request = prefill.request("r", 6, kvferry_reference=None)
    step = prefill.step((request, 6))
    assert prefill.finish(request)
    assert prefill.port.ends == [(6,)]
    prefill.ended(step)
    assert prefill.port.take()[-1] == ("more", {"full": (0, 6)}, "last", 1)
    prefill.release(1)


@pytest.mark.parametrize("computed", [True, False], ids=["computed", "still-computed"])
@pytest.mark.parametrize("routed", [True, False])
def test_a_publication_keeps_nothing_of_its_request_but_the_blocks(
    prefill: Prefill, *, routed: bool, computed: bool
) -> None:
    """Requests of one prompt have the same blocks, so nothing else bounds how many are held until readers come. A
    request may have images, or embeddings of its whole prompt."""

    class Embeddings: ...

    unrouted: dict[str, Any] = {} if routed else {"kvferry_reference": None}
    request = prefill.request("r", 7, **unrouted)
    request.embeddings = Embeddings()
    kept = weakref.ref(request.embeddings)
    prefill.run(request, 5)
    last = prefill.step((request, 2))
    if computed:
        prefill.ended(last)
    assert prefill.finish(request)
    # vLLM forgets it now.
    del request
    assert kept() is None
    # Nothing is computed for long: stuck requests are looked for.
    for now in (0.0, 10.0):
        prefill.now = now
        prefill.step()
    prefill.ended(last)
    assert prefill.port.take()[-1][2] == "last"
    prefill.release(1)
