"""Sources that a rank meets at the same moment, as it does when it starts: all of them are measured, and none waits for
the memory that another has borrowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry._clock import now
from kvferry._loop import Loop
from kvferry._memory.rank_memory import RankMemory
from kvferry._reads.runtime import _MeasuredCosts
from kvferry._transport.staging_pool import StagingOptions
from kvferry._transport.transport import Transport
from kvferry.geometry import RankGeometry
from kvferry.planner import PathRule
from tests.transport.sources import SOON, Memory, Source
from tests.transport.staged_parts import planes
from tests.transport.transfers import until

HOMES = 3


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def sources() -> Iterator[list[Source]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Source(size=16 << 20)) for _ in range(HOMES)]


@pytest.mark.parametrize("slots", [2, 8])
def test_sources_that_are_met_at_once_are_all_measured(
    loop: Loop, sources: list[Source], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine takes its time.
    monkeypatch.setattr("kvferry._reads.runtime.MEASURE_TIMEOUT", SOON)
    memory = Memory(4 << 20)
    transport = Transport(RankMemory([memory.region]), staging=StagingOptions(slots=slots))
    rank = RankGeometry(0, planes(memory.base, heads_first=True))
    rule = PathRule()
    costs = _MeasuredCosts(loop, rule, rank, transport, measured=True)
    infos = [source.info for source in sources]
    # Each home twice: the second does not measure it again.
    asked = [
        loop.submit(costs.rule_of(f"home-{at % HOMES}", infos[at % HOMES], now() + SOON)) for at in range(2 * HOMES)
    ]
    found = [future.result(2 * SOON) for future in asked]
    assert None not in found
    assert len({id(one) for one in found}) == HOMES
    assert all(one is not None and one.costs != rule.costs for one in found)
    # A read ends just before its last slot is free.
    assert until(lambda: transport.gauges().staging_slots == 0)
    assert transport.close(SOON)


def test_a_source_that_stops_while_it_is_measured_holds_up_no_other_for_longer_than_its_time(
    loop: Loop, sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry._reads.runtime.MEASURE_TIMEOUT", 0.5)
    memory = Memory(4 << 20)
    transport = Transport(RankMemory([memory.region]))
    rank = RankGeometry(0, planes(memory.base, heads_first=True))
    costs = _MeasuredCosts(loop, PathRule(), rank, transport, measured=True)
    stopped, other, _ = sources
    # It does not even answer the first read.
    infos = stopped.info, other.info
    stopped.stop()
    first = loop.submit(costs.rule_of("stopped", infos[0], now() + SOON))
    assert first.result(SOON) is None
    # A busy machine takes its time.
    monkeypatch.setattr("kvferry._reads.runtime.MEASURE_TIMEOUT", SOON)
    assert loop.run(costs.rule_of("other", infos[1], now() + SOON)) is not None
    stopped.resume()
    assert transport.close(SOON)
