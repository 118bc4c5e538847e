"""Requests that wait in decode for their publications: when vLLM is told of them, and when their homes are asked.

vLLM asks for each in each of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvferry import Blocks, EngineSpec, router_reference
from kvferry.integrations.vllm.scheduler import LEAST_TIME, ConnectorScheduler
from kvferry.integrations.vllm.values import WorkerNews
from kvferry.testing import Fabric
from tests.integrations.vllm.played_reader import scheduler_of
from tests.integrations.vllm.played_setup import GROUP, TOKENS, prefill, setup_of, to_read
from tests.support.waiting import until


def asked(scheduler: ConnectorScheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of which the port is asked from now on."""
    found: list[str] = []
    granted = scheduler._port.granted

    def note(request_id: str) -> Any:
        found.append(request_id)
        return granted(request_id)

    monkeypatch.setattr(scheduler._port, "granted", note)
    return found


def test_waiting_request_costs_nothing_until_there_is_news(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = decode()
    looked = asked(scheduler, monkeypatch)
    with fabric.client() as client:
        source = prefill(client)
        references = [router_reference(fabric.address, "prefill") for _ in range(2)]
        readers = [to_read(reference, 2 * TOKENS, f"r{index}") for index, reference in enumerate(references)]
        for reader in readers:
            scheduler.on_new_request(reader)
        for _ in range(5):
            assert [scheduler.matched_tokens(reader, 0) for reader in readers] == [(None, False)] * 2
            scheduler.step({})
        assert looked == ["r0", "r1"]
        source.publish("theirs", {"0": Blocks([1, 2], 0, 2 * TOKENS)}, reference=references[1])
        until(lambda: scheduler.matched_tokens(readers[1], 0) == (2 * TOKENS - 1, True))
        assert scheduler.matched_tokens(readers[0], 0) == (None, False)
        assert looked == ["r0", "r1", "r1"]
        # It has no blocks yet: vLLM may ask again, with more that it has itself.
        assert scheduler.matched_tokens(readers[1], TOKENS) == (TOKENS - 1, True)


def test_a_request_that_waits_is_computed_as_soon_as_vllm_has_its_blocks(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler]
) -> None:
    """Another request has brought them into the prefix cache meanwhile."""
    scheduler = decode()
    reader = to_read(router_reference(fabric.address, "prefill"), 2 * TOKENS + 1)
    scheduler.on_new_request(reader)
    assert scheduler.matched_tokens(reader, 0) == (None, False)
    assert scheduler.matched_tokens(reader, 0) == (None, False)
    assert scheduler.matched_tokens(reader, 2 * TOKENS) == (0, False)
    assert scheduler._port.stats().waiting == 0


def abort(scheduler: ConnectorScheduler, request: Any) -> None:
    request.status = RequestStatus.FINISHED_ABORTED
    scheduler.finished(request, ([],))


def test_samples_that_wait_in_vain_wait_together(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that followed another one has what is left of the time since its arrival, not all of it again."""
    at = [100.0]
    setup = setup_of(fabric, EngineSpec("decode", (GROUP,)), serves=False, caches_prefixes=True)
    scheduler = scheduler_of(setup, now=lambda: at[0])
    asked: list[float] = []
    monkeypatch.setattr(scheduler._port, "acquire", lambda *_, timeout, **__: asked.append(timeout))
    reference = router_reference(fabric.address, "prefill")
    samples = [to_read(reference, 9, f"{index}_r") for index in range(3)]
    for sample in samples:
        scheduler.on_new_request(sample)
    assert [scheduler.matched_tokens(sample, 0) for sample in samples[1:]] == [(None, False)] * 2
    for leader, follower, passed in ((samples[0], samples[1], 15.0), (samples[1], samples[2], 30.0)):
        at[0] += passed
        leader.status = RequestStatus.FINISHED_ABORTED
        scheduler.finished(leader, ([],))
        scheduler.matched_tokens(follower, 0)
    assert asked == [setup.settings.read_timeout, setup.settings.read_timeout - 15.0, LEAST_TIME]
    scheduler.close()


def test_workers_have_no_orders_before_all_of_them_are_registered(fabric: Fabric) -> None:
    """Until then they cannot read."""
    scheduler = scheduler_of(setup_of(fabric, EngineSpec("decode", (GROUP,), 2), serves=False))
    with fabric.client() as client:
        reference = prefill(client).publish("r", {"0": Blocks([1])}).reference
        reader = to_read(reference, TOKENS + 1)
        scheduler.on_new_request(reader)
        until(lambda: scheduler.matched_tokens(reader, 0) == (TOKENS, True))
        scheduler.allocated("reader", ([3],), TOKENS)
        for rank in range(2):
            step = scheduler.step({})
            assert (step.token, step.starts) == (str(scheduler._port.token), [])
            scheduler.collect(WorkerNews(registered={rank}))
        step = scheduler.step({})
        assert (step.token, len(step.starts)) == ("", 1)
    scheduler.close()


def test_request_with_all_blocks_neither_waits_for_prefill_nor_fails_with_it(fabric: Fabric) -> None:
    """vLLM's prefix cache has all but the last token, which decode computes in any case."""
    setup = setup_of(fabric, EngineSpec("decode", (GROUP,)), serves=False, caches_prefixes=True)
    scheduler = scheduler_of(setup)
    for reference in (router_reference(fabric.address, "prefill"), "kvf1.damaged"):
        reader = to_read(reference, 2 * TOKENS + 1)
        scheduler.on_new_request(reader)
        assert scheduler.matched_tokens(reader, 2 * TOKENS) == (0, False)
        scheduler.allocated("reader", ([1, 2, 3],), 0)
    assert scheduler.step({}).received == set()
    assert scheduler._port.stats().waiting == 0
    scheduler.close()


@pytest.mark.parametrize("ends", ["aborted", "computed"])
def test_requests_of_one_reference_end_without_a_prefix_cache(fabric: Fabric, ends: str) -> None:
    """Each is read. An exception in a step would end the engine, and any client may send a request twice."""
    scheduler = scheduler_of(setup_of(fabric, EngineSpec("decode", (GROUP,)), serves=False))
    reference = router_reference(fabric.address, "prefill")
    readers = [to_read(reference, TOKENS + 1, f"r{index}") for index in range(2)]
    for reader in readers:
        scheduler.on_new_request(reader)
        assert scheduler.matched_tokens(reader, 0) == (None, False)
    for reader in readers:
        if ends == "aborted":
            abort(scheduler, reader)
        else:
            # vLLM has found its tokens elsewhere.
            assert scheduler.matched_tokens(reader, TOKENS) == (0, False)
            scheduler.allocated(reader.request_id, ([],), 0)
    assert scheduler._port.stats().waiting == 0
    scheduler.close()
