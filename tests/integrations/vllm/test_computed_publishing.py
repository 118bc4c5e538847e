"""A request's blocks are published when the slowest rank has computed them. Needs no vLLM."""

from __future__ import annotations

from typing import cast

import pytest

from kvferry import Blocks, Prompt
from kvferry.engine import SchedulerPort
from kvferry.errors import WrongState
from kvferry.integrations.vllm.publishing import ComputedPublishing, Summed
from tests.integrations.vllm.played_port import Port

BLOCKS = {"full": Blocks([3], 0, 4)}
PROMPT = Prompt([1, 2, 3, 4])
WHOLE = {"full": (0, 4)}
LAST_STEP = ("more", WHOLE, "last", 1)


@pytest.fixture
def port() -> Port:
    return Port()


def scheduled(port: Port, *requests: str, sums: list[Summed] | None = None) -> ComputedPublishing:
    """An engine of two ranks that has scheduled requests in its first step."""
    publishing = ComputedPublishing(cast(SchedulerPort, port), 2, [] if sums is None else sums)
    for request in requests:
        publishing.expect(request)
    assert publishing.begin(requests) == 1
    return publishing


@pytest.mark.parametrize("fast", [0, 1])
def test_a_request_is_published_when_its_slowest_rank_has_computed_it(port: Port, fast: int) -> None:
    publishing = scheduled(port, "r")
    publishing.computed({fast: 1})
    publishing.publish("r", BLOCKS, prompt=PROMPT)
    assert port.take() == [("publish", {}, "more", "")]
    assert publishing.waiting
    publishing.computed({1 - fast: 1})
    assert port.take() == [LAST_STEP]
    assert not publishing.waiting


@pytest.mark.parametrize("fast", [0, 1])
def test_the_last_blocks_of_a_request_are_published_when_its_slowest_rank_has_computed_them(
    port: Port, fast: int
) -> None:
    """Its first blocks were published in parts, under a router's reference."""
    publishing = scheduled(port, "r")
    publication = port.publish("r", {}, last=False)
    port.take()
    publishing.computed({fast: 1})
    publishing.publish("r", BLOCKS, prompt=PROMPT, publication=publication)
    assert port.take() == []
    assert publishing.waiting
    publishing.computed({1 - fast: 1})
    assert port.take() == [LAST_STEP]
    assert not publishing.waiting


def test_the_last_blocks_of_a_request_that_every_rank_has_computed_are_published_at_once(port: Port) -> None:
    publishing = scheduled(port, "r")
    publication = port.publish("r", {}, last=False)
    port.take()
    publishing.computed({0: 1, 1: 1})
    publishing.publish("r", BLOCKS, prompt=PROMPT, publication=publication)
    assert port.take() == [LAST_STEP]


def test_a_publication_whose_blocks_are_refused_is_withdrawn(port: Port) -> None:
    """Otherwise its blocks would be kept until its hold ends, for readers that wait in vain."""
    sums: list[Summed] = []
    publishing = scheduled(port, "r", "s", sums=sums)
    for request in ("r", "s"):
        publishing.publish(request, BLOCKS, prompt=PROMPT)
    port.take()
    port.refuses = WrongState("publication 1 was released")
    publishing.computed({0: 1, 1: 0})
    assert port.take() == []
    publishing.computed({1: 1})
    assert port.take() == [("abort", 1), ("abort", 2)]
    assert not publishing.waiting
    assert sums == []
