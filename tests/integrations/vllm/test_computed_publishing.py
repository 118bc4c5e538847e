"""A request's blocks are published when the slowest rank has computed them. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvferry import Blocks, Prompt, Publication
from kvferry.engine import SchedulerPort
from kvferry.errors import WrongState
from kvferry.integrations.vllm.block_hold import BlockHold
from kvferry.integrations.vllm.publishing import ComputedPublishing, OutgoingRequest, Summed
from tests.integrations.vllm.played_port import Port

BLOCKS = {"full": Blocks([3], 0, 4)}
PROMPT = Prompt([1, 2, 3, 4])
WHOLE = {"full": (0, 4)}
LAST_STEP = ("more", WHOLE, "last", 1)


@pytest.fixture
def port() -> Port:
    return Port()


def of(request_id: str, publication: Publication | None = None) -> OutgoingRequest:
    """A request that was scheduled in the first step last."""
    request = SimpleNamespace(request_id=request_id, kv_transfer_params={})
    return OutgoingRequest(request, "", PROMPT, BlockHold(None), step=1, publication=publication)


def of_two_ranks(port: Port, sums: list[Summed] | None = None) -> ComputedPublishing:
    return ComputedPublishing(cast(SchedulerPort, port), 2, [] if sums is None else sums)


@pytest.mark.parametrize("fast", [0, 1])
def test_a_request_is_published_when_its_slowest_rank_has_computed_it(port: Port, fast: int) -> None:
    publishing = of_two_ranks(port)
    publishing.computed({fast: 1})
    publishing.publish(of("r"), BLOCKS, prompt=PROMPT)
    assert port.take() == [("publish", {}, "more", "")]
    assert publishing.waiting
    publishing.computed({1 - fast: 1})
    assert port.take() == [LAST_STEP]
    assert not publishing.waiting


@pytest.mark.parametrize("fast", [0, 1])
def test_the_last_blocks_of_a_request_are_published_when_its_slowest_rank_has_computed_them(
    port: Port, fast: int
) -> None:
    """The request's first blocks were published in parts, under a router's reference."""
    publishing = of_two_ranks(port)
    publication = port.publish("r", {}, last=False)
    port.take()
    publishing.computed({fast: 1})
    publishing.publish(of("r", publication), BLOCKS, prompt=PROMPT)
    assert port.take() == []
    assert publishing.waiting
    publishing.computed({1 - fast: 1})
    assert port.take() == [LAST_STEP]
    assert not publishing.waiting


def test_the_last_blocks_of_a_request_that_every_rank_has_computed_are_published_at_once(port: Port) -> None:
    publishing = of_two_ranks(port)
    publication = port.publish("r", {}, last=False)
    port.take()
    publishing.computed({0: 1, 1: 1})
    publishing.publish(of("r", publication), BLOCKS, prompt=PROMPT)
    assert port.take() == [LAST_STEP]


def test_a_publication_whose_blocks_are_refused_is_withdrawn(port: Port) -> None:
    """Otherwise its blocks would be kept until its hold ends, for readers that wait in vain."""
    sums: list[Summed] = []
    publishing = of_two_ranks(port, sums)
    for request in ("r", "s"):
        publishing.publish(of(request), BLOCKS, prompt=PROMPT)
    port.take()
    port.refuses = WrongState("publication 1 was released")
    publishing.computed({0: 1, 1: 0})
    assert port.take() == []
    publishing.computed({1: 1})
    assert port.take() == [("abort", 1), ("abort", 2)]
    assert not publishing.waiting
    assert sums == []
