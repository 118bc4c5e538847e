"""Prompts that are published in parts: when each part is, which blocks are held, and what becomes of them.

vLLM's block pool is real; its scheduler and kvferry's port are played.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.request import RequestStatus

from kvferry import Group, GroupKind
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import RouterKeyUsed, WrongState
from kvferry.integrations.vllm.outgoing import BlockHolds
from kvferry.integrations.vllm.requests import REFERENCE
from kvferry.integrations.vllm.sending import STUCK
from kvferry.integrations.vllm.setup import BlockTable
from kvferry.integrations.vllm.worker import EVERY_STEP
from tests.integrations.vllm.played_prefill import BLOCKS, FULL, TOKENS, WINDOW, Prefill, made


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    engine = Prefill()
    yield engine
    engine.check_freed()


def test_step_publishes_the_blocks_that_it_has_filled(prefill: Prefill) -> None:
    request = prefill.request("r", 14)
    reference = request.kv_transfer_params[REFERENCE]
    prefill.run(request, 6)
    assert prefill.port.take() == [("publish", {"full": (0, 4)}, "more", reference)]
    prefill.run(request, 1)
    assert prefill.port.take() == []
    prefill.run(request, 7)
    assert prefill.port.take() == [("more", {"full": (4, 12)}, "more", 1)]
    params = prefill.finish(request)
    # The last block, which is not full, comes with the end.
    assert prefill.port.take() == [("more", {"full": (12, 14)}, "last", 1)]
    assert params[REFERENCE] == "canonical-1"
    assert [(sum.publication, sum.last) for sum in prefill.sums] == [(1, False), (1, False), (1, True)]
    assert prefill.counts == ["published"]
    # vLLM has freed the request, and its blocks are there until they are released.
    assert prefill.used == 4
    assert prefill.sending.holding
    prefill.release(1)
    assert not prefill.sending.holding


def test_a_short_prompt_is_published_whole(prefill: Prefill) -> None:
    request = prefill.request("r", 4)
    reference = request.kv_transfer_params[REFERENCE]
    prefill.run(request, 4)
    prefill.finish(request)
    assert prefill.port.take() == [("publish", {"full": (0, 4)}, "last", reference)]
    prefill.release(1)


def test_part_is_published_when_its_step_has_ended_on_every_rank() -> None:
    prefill = Prefill(ranks=2)
    request = prefill.request("r", 14)
    first, second = prefill.step((request, 5)), prefill.step((request, 5))
    assert prefill.sending.waiting
    # A CPU's rank says that every step is computed, also those that it has not run.
    prefill.ended(0, computed=EVERY_STEP)
    prefill.ended(second, rank=1)
    assert prefill.port.take() == []
    prefill.ended(first, computed=EVERY_STEP)
    assert [call[:2] for call in prefill.port.take()] == [("publish", {"full": (0, 4)})]
    prefill.ended(second, computed=EVERY_STEP)
    assert [call[:2] for call in prefill.port.take()] == [("more", {"full": (4, 8)})]
    assert not prefill.sending.waiting


def test_blocks_that_no_step_has_ended_for_are_published_with_the_rest(prefill: Prefill) -> None:
    """vLLM finishes a request before the connector hears that its step has ended."""
    request = prefill.request("r", 14)
    prefill.run(request, 6)
    last = prefill.step((request, 8))
    prefill.port.take()
    prefill.finish(request)
    assert prefill.port.take() == []
    assert prefill.sending.waiting
    prefill.ended(last)
    assert prefill.port.take() == [("more", {"full": (4, 14)}, "last", 1)]
    prefill.release(1)


def test_a_preempted_request_goes_on_in_other_blocks(prefill: Prefill) -> None:
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    old = prefill.ids("r")[0][:2]
    prefill.preempt(request)
    # The two that are published are not given out again.
    assert prefill.used == 2
    assert not set(old) & {block.block_id for block in prefill.pool.get_new_blocks(prefill.free - 2)}
    prefill.pool.free_blocks(block for block in prefill.pool.blocks[1:] if block.block_id not in old)
    prefill.run(request, 6)
    assert [call[0] for call in prefill.port.take()] == ["publish"]
    prefill.run(request, 8)
    prefill.finish(request)
    assert prefill.port.take() == [
        ("more", {"full": (8, 12)}, "more", 1),
        ("more", {"full": (12, 14)}, "last", 1),
    ]
    new = [block for block in prefill.pool.blocks if block.ref_cnt]
    assert len(new) == 4
    assert set(old) < {block.block_id for block in new}
    prefill.release(1)


def test_a_part_of_a_step_that_still_runs_is_held_over_a_preemption(prefill: Prefill) -> None:
    """Asynchronous scheduling: the step is on the device, and writes right bytes."""
    request = prefill.request("r", 14)
    step = prefill.step((request, 9))
    prefill.preempt(request)
    assert prefill.used == 2
    prefill.ended(step)
    assert [call[:2] for call in prefill.port.take()] == [("publish", {"full": (0, 8)})]
    prefill.finish(request, RequestStatus.FINISHED_ABORTED)
    assert prefill.port.take() == [("abort", 1)]
    assert prefill.used == 2
    prefill.release(1, outcome=ReleaseOutcome.ABORTED)


def test_aborted_request_keeps_the_blocks_of_its_readers(prefill: Prefill) -> None:
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    later = prefill.step((request, 4))
    prefill.port.take()
    assert prefill.finish(request, RequestStatus.FINISHED_ABORTED) is None
    assert prefill.port.take() == [("abort", 1)]
    # Unpublished blocks are free.
    assert prefill.used == 2
    prefill.ended(later)
    assert prefill.port.take() == []
    prefill.release(1, outcome=ReleaseOutcome.ABORTED)
    assert prefill.counts == ["published", "unread"]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_request_that_ends_before_it_is_published_is_declined(prefill: Prefill, status: RequestStatus) -> None:
    """Decode does not wait until its timeout."""
    request = prefill.request("r", 14)
    prefill.step((request, 9))
    prefill.finish(request, status)
    assert prefill.port.take() == [("decline", request.kv_transfer_params[REFERENCE])]
    assert prefill.used == 0


def test_engine_without_readers_publishes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """With kv_consumer its caches are not served. What it published would be pinned for the whole hold, and whoever was
    told of it would fail to read it."""
    decode = Prefill(serves=False)
    for request_id, reference in (("r", made()), ("s", "none")):
        request = decode.request(request_id, 14, reference)
        assert decode.port.take() == ([("decline", reference)] if request_id == "r" else [])
        decode.run(request, 14)
        assert decode.finish(request) is None
    assert decode.port.take() == []
    assert (decode.used, decode.counts) == (0, [])
    assert [record.getMessage().count("kv_role") for record in caplog.records] == [1]


def test_samples_share_the_publication_of_the_first(prefill: Prefill) -> None:
    reference = made()
    samples = [prefill.request(f"{index}_r", 6, reference) for index in range(3)]
    prefill.ended(prefill.step(*((sample, 6) for sample in samples)))
    assert len(prefill.port.take()) == 1
    answers = [prefill.finish(sample) for sample in samples]
    assert [call[0] for call in prefill.port.take()] == ["more"]
    assert {answer[REFERENCE] for answer in answers} == {"canonical-1"}
    prefill.release(1, "0_r")


def test_a_sample_that_comes_late_publishes_nothing(prefill: Prefill) -> None:
    """vLLM's front end sends one after the other. The first has been published, and may have been read."""
    reference = made()
    for index, released in enumerate((False, True)):
        sample = prefill.request(f"{index}_r", 6, reference)
        prefill.run(sample, 6)
        params = prefill.finish(sample)
        assert params[REFERENCE] == "canonical-1"
        if released:
            prefill.release(1, "0_r")
    late = prefill.request("2_r", 6, reference)
    prefill.run(late, 6)
    assert prefill.finish(late) is None
    assert [call[0] for call in prefill.port.take()] == ["publish", "more"]
    assert prefill.counts == ["published"]


def test_next_sample_publishes_if_the_first_is_aborted(prefill: Prefill) -> None:
    reference = made()
    first, second, third = (prefill.request(f"{index}_r", 6, reference) for index in range(3))
    prefill.finish(first, RequestStatus.FINISHED_ABORTED)
    assert prefill.port.take() == []
    prefill.run(second, 6)
    prefill.finish(second)
    prefill.finish(third, RequestStatus.FINISHED_ABORTED)
    assert [call[0] for call in prefill.port.take()] == ["publish", "more"]
    prefill.release(1, "1_r")


def test_sample_that_ends_before_the_first_declines_and_publishes_nothing(prefill: Prefill) -> None:
    reference = made()
    first, second = (prefill.request(f"{index}_r", 6, reference) for index in range(2))
    prefill.ended(prefill.step((first, 3), (second, 6)))
    assert prefill.finish(second) is None
    assert prefill.port.take() == []
    prefill.run(first, 3)
    assert prefill.finish(first)
    assert [call[0] for call in prefill.port.take()] == ["publish", "more"]
    prefill.release(1, "0_r")


def test_publication_that_a_reader_gives_up_is_freed_and_ends(prefill: Prefill) -> None:
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    prefill.step((request, 4))
    prefill.port.take()
    prefill.release(1, outcome=ReleaseOutcome.DECLINED)
    prefill.ended(2)
    assert prefill.finish(request) is None
    assert prefill.port.take() == []
    assert prefill.used == 0


def test_part_may_be_refused_before_its_release_is_received(prefill: Prefill) -> None:
    """The port refuses a part before the scheduler sees the release."""
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    prefill.port.refuses = WrongState("publication 1 was released")
    prefill.run(request, 4)
    assert prefill.finish(request) is None
    assert [call[0] for call in prefill.port.take()] == ["publish", "abort"]
    assert prefill.used == 2
    prefill.release(1, outcome=ReleaseOutcome.DECLINED)


def test_a_reference_that_is_in_use_is_not_taken_from_its_user(prefill: Prefill) -> None:
    """The reference is not declined: its other request is being read."""
    prefill.port.refuses = RouterKeyUsed("publication 1 has the key")
    request = prefill.request("r", 14)
    prefill.run(request, 14)
    assert prefill.finish(request) is None
    assert prefill.port.take() == []


def test_windows_are_published_at_the_end() -> None:
    prefill = Prefill(FULL, WINDOW)
    request = prefill.request("r", 22)
    prefill.run(request, 20)
    assert [call[:2] for call in prefill.port.take()] == [("publish", {"full": (0, 20)})]
    # vLLM forgets what the next token does not see.
    window = prefill.blocks["r"][1]
    prefill.pool.free_blocks(window[:3])
    window[:3] = [prefill.pool.null_block] * 3
    prefill.run(request, 2)
    prefill.finish(request)
    assert prefill.port.take() == [("more", {"full": (20, 22), "window": (12, 22)}, "last", 1)]
    assert prefill.used == 6 + 3
    prefill.release(1)
    assert prefill.used == 0


def test_blocks_that_another_connector_could_not_load_are_not_published(prefill: Prefill) -> None:
    """vLLM computes them again, in place; of that it says nothing to us."""
    request = prefill.request("r", 14)
    prefill.run(request, 5)
    prefill.port.take()
    step = prefill.step((request, 5))
    prefill.sending.lost({prefill.ids("r")[0][1]})
    prefill.ended(step)
    request.num_computed_tokens = 4
    prefill.run(request, 10)
    assert prefill.port.take() == []
    prefill.finish(request)
    assert prefill.port.take() == [("more", {"full": (4, 14)}, "last", 1)]
    prefill.release(1)


def test_publication_with_lost_blocks_is_withdrawn(prefill: Prefill) -> None:
    """The news of the step before said that the step had ended, and its part was published."""
    request = prefill.request("r", 14)
    prefill.run(request, 10)
    prefill.port.take()
    prefill.sending.lost({prefill.ids("r")[0][1]})
    assert prefill.port.take() == [("abort", 1)]
    request.num_computed_tokens = 4
    prefill.run(request, 10)
    assert prefill.finish(request) is None
    assert prefill.port.take() == []
    assert prefill.used == 2
    prefill.release(1, outcome=ReleaseOutcome.ABORTED)


def test_a_reference_of_another_publication_is_not_declined(prefill: Prefill) -> None:
    request = prefill.request("r", 14)
    prefill.port.refuses = RouterKeyUsed("it is in use", engine_id="prefill", publication=7)
    prefill.run(request, 10)
    assert prefill.finish(request, RequestStatus.FINISHED_ABORTED) is None
    assert [call[0] for call in prefill.port.take()] == []


def test_a_publication_that_keeps_its_request_from_running_is_withdrawn(prefill: Prefill) -> None:
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    prefill.preempt(request)
    prefill.port.take()
    prefill.step()
    prefill.now = STUCK / 2
    # Others still run: it waits for them.
    prefill.run(prefill.request("other", 2), 2)
    prefill.now = STUCK * 1.2
    prefill.step()
    prefill.now = STUCK * 2
    prefill.step()
    assert prefill.port.take() == []
    prefill.now = STUCK * 3
    prefill.step()
    assert prefill.port.take() == [("abort", 1)]
    prefill.release(1, outcome=ReleaseOutcome.ABORTED)
    prefill.run(request, 14)
    assert prefill.finish(request) is None
    prefill.free_blocks(SimpleNamespace(request_id="other"))
    assert prefill.port.take() == []


def test_stuck_requests_are_withdrawn_one_after_the_other(prefill: Prefill) -> None:
    """The youngest first. A publication that was withdrawn keeps its blocks until its readers are done, and does not
    keep vLLM from withdrawing the next one meanwhile."""
    for request in (prefill.request("old", 14), prefill.request("young", 14)):
        prefill.run(request, 9)
        prefill.preempt(request)
    prefill.port.take()
    prefill.step()
    prefill.now = STUCK * 1.1
    prefill.step()
    assert prefill.port.take() == [("abort", 2)]
    prefill.step()
    prefill.now = STUCK * 2.2
    prefill.step()
    assert prefill.port.take() == [("abort", 1)]
    prefill.step()
    prefill.now = STUCK * 3.3
    prefill.step()
    assert prefill.port.take() == []
    for number in (1, 2):
        prefill.release(number, outcome=ReleaseOutcome.ABORTED)


def test_blocks_that_a_drafter_may_write_again_are_not_published() -> None:
    """A drafter of several modules: its cache of the last tokens is not final, and vLLM does not cache it either."""
    prefill = Prefill(rewritten=2)
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    assert [call[:2] for call in prefill.port.take()] == [("publish", {"full": (0, 4)})]
    prefill.run(request, 5)
    prefill.finish(request)
    assert [call[1:3] for call in prefill.port.take()] == [({"full": (4, 12)}, "more"), ({"full": (12, 14)}, "last")]
    prefill.release(1)
    assert prefill.used == 0


def test_a_request_id_is_used_again_while_its_blocks_are_held(prefill: Prefill) -> None:
    """vLLM has freed the first request. The release of what it has published says nothing about the second."""
    first = prefill.request("r", 14)
    prefill.run(first, 14)
    prefill.finish(first)
    second = prefill.request("r", 6, kvferry_reference=None)
    prefill.run(second, 6)
    prefill.finish(second)
    assert prefill.used == 6
    prefill.release(1)
    assert prefill.used == 2
    prefill.release(2)


def test_blocks_stay_in_the_prefix_cache_while_they_are_held() -> None:
    """A preempted request finds its own blocks again, and needs no others."""
    prefill = Prefill(caching=True)
    request = prefill.request("r", 14)
    prefill.run(request, 9)
    held = prefill.blocks["r"][0][:2]
    for index, block in enumerate(held):
        prefill.pool._insert_block_hash(cast(Any, b"hash%d" % index), block, TOKENS)
    prefill.preempt(request)
    # All that is free is given out, and evicts what it was in the cache.
    prefill.pool.free_blocks(prefill.pool.get_new_blocks(prefill.pool.get_num_free_blocks()))
    assert [block.block_hash for block in held] == [b"hash0", b"hash1"]
    prefill.finish(request, RequestStatus.FINISHED_ABORTED)
    prefill.release(1, outcome=ReleaseOutcome.ABORTED)
    assert prefill.used == 0


def test_blocks_of_several_publications_are_held_until_the_last_drops_them(prefill: Prefill) -> None:
    holds = BlockHolds(prefill.pool)
    blocks = prefill.pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    holds.add(ids[:2])
    assert holds.with_more(ids) == 3
    holds.add(ids)
    holds.drop(ids[:2])
    assert [block.ref_cnt for block in blocks] == [2, 2, 2]
    holds.drop(ids)
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    prefill.pool.free_blocks(blocks)


def test_states_are_published_at_the_end() -> None:
    state = BlockTable(0, Group("state", GroupKind.STATE, num_blocks=BLOCKS, null_block=0, pool="device"), 64)
    assert not len(state.early([3], 0, 64).ids)
